"""Rebuild a damaged document from its intact rows, or give the reason why that cannot be done.

The content of a row can often be told from other rows. A chunk's id is a hash that its place and its KV still name, so
its span in the text is found by trying spans. Its tokens are also in its KV's manifest. A text consists of its chunks
and the white space between them. Page and heading are stored nowhere else: they are taken from the neighbouring
chunks where these agree. The document then forgets its recipe, so that the next ingest of its source makes it anew,
with the KV that is already there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from ragkv.errors import CorruptStoreError
from ragkv.store.document import drop_vectors, names_of, read_vector
from ragkv.store.format.identity import KVIdentity
from ragkv.store.format.row import StoredDocument, pack_chunk, pack_document, pack_text, parse_document, parse_text
from ragkv.store.format.vector import VECTOR_KINDS, ChunkVectors, vector_rows
from ragkv.store.history import advance, generation
from ragkv.store.seal import DamagedError
from ragkv.store.transaction import INDEX_OWNER, Transaction, chunk_key, digest, document_digest
from ragkv.store.upkeep.check import chunk_of, chunk_ordinals, find_record, most_chunks
from ragkv.types import Chunk, Document, Encoding

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV

__all__ = ["DamagedDocument", "Mender", "Plan", "UnmendableError", "apply_plan", "examine", "plan_document"]


class Mender(Protocol):
    """What repair needs to know beyond the store: how chunks are cut, tokenised, encoded and embedded.

    Its methods are called outside of transactions.
    """

    def find_chunk(
        self, document: Document, text: str, ordinal: int, low: int, high: int, known: Callable[[str], bool]
    ) -> tuple[str, int, int] | None:
        """Id, start and end of the chunk within `text[low:high]` whose id is `known`; None when there is none."""

    def tokens(self, text: str) -> tuple[int, ...]:
        """A chunk's token ids."""

    def identities(self, chunk: Chunk) -> Sequence[KVIdentity]:
        """The KV that the index, as it is configured now, may ask for this chunk."""

    def encode(self, identities: Sequence[KVIdentity]) -> Sequence[ChunkKV]:
        """KV made anew."""

    def embed(self, chunks: Sequence[Chunk]) -> Mapping[str, ChunkVectors] | None:
        """Vectors made anew, by chunk id; None when the index has no embedder."""


class UnmendableError(Exception):
    """A document cannot be made whole; the message says why, as a clause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedDocument:
    """All that one snapshot holds of a document; `row` and `generation` tell whether it has changed since.

    `good` are the intact chunks by ordinal, `bad` the ordinals of the others, `extra` those beyond the document's
    count. `names` are, for each bad chunk, the digests of the ids that it may have had; `tokens` the token ids that
    the KV of such a name holds. `bad_vectors` are the ordinals of chunks of which a vector cannot be read.
    `ids_taken`: a chunk's id is also that of a chunk of another document.
    """

    key: bytes
    row: bytes
    generation: int
    stored: StoredDocument
    text: str | None
    good: dict[int, Chunk]
    bad: list[int]
    extra: list[int]
    names: dict[int, set[bytes]]
    tokens: dict[bytes, tuple[int, ...]]
    bad_vectors: set[int]
    ids_taken: bool

    @property
    def digest(self) -> bytes:
        """Of the document's id."""
        return document_digest(self.key)


@dataclass(slots=True, kw_only=True)
class Plan:
    """The changes that make a document whole."""

    deletes: list[tuple[str, bytes]] = field(default_factory=list)
    puts: list[tuple[str, bytes, bytes]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """About how many bytes it writes."""
        return sum(len(value) for _, _, value in self.puts)


def examine(txn: Transaction, key: bytes) -> DamagedDocument:
    """Read a document with all its rows; `UnmendableError` when the document's own row is lost."""
    row = bytes(txn.get("documents", key) or b"")
    try:
        stored = parse_document(row)
    except CorruptStoreError as error:
        raise UnmendableError("its row is damaged") from error
    document = document_digest(key)
    good: dict[int, Chunk] = {}
    there = chunk_ordinals(txn, document)
    if stored.chunks > most_chunks(there):
        raise UnmendableError(f"it counts {stored.chunks} chunks, of which {len(there)} are there")
    for ordinal in sorted(there & set(range(stored.chunks))):
        chunk, _ = chunk_of(txn, chunk_key(document, ordinal))
        if chunk is not None and (chunk.document_id, chunk.ordinal) == (stored.document.document_id, ordinal):
            good[ordinal] = chunk
    bad = [ordinal for ordinal in range(stored.chunks) if ordinal not in good]
    names = {ordinal: set(names_of(txn, chunk_key(document, ordinal))) for ordinal in bad}
    if not all(names.values()):
        # The place is lost too. Then the name is one of those that need KV and have no place.
        unplaced = {name for name in txn.keys("needs") if name != INDEX_OWNER and txn.get("places", name) is None}
        names = {ordinal: found or unplaced for ordinal, found in names.items()}
    known = {name for found in names.values() for name in found}
    return DamagedDocument(
        key=key,
        row=row,
        generation=generation(txn),
        stored=stored,
        text=_text(txn, document),
        good=good,
        bad=bad,
        extra=sorted(there - set(range(stored.chunks))),
        names=names,
        tokens={name: tokens for name in known if (tokens := _tokens(txn, name)) is not None},
        bad_vectors={ordinal for ordinal in range(stored.chunks) if _has_bad_vector(txn, chunk_key(document, ordinal))},
        ids_taken=any(_is_taken(txn, chunk, chunk_key(document, ordinal)) for ordinal, chunk in good.items()),
    )


def plan_document(damaged: DamagedDocument, mender: Mender) -> Plan:
    """The changes that make a document whole; `UnmendableError` when there is no way."""
    stored, text = damaged.stored, damaged.text
    if damaged.ids_taken:
        raise UnmendableError("its chunk ids are another document's")
    if text is None and damaged.bad:
        raise UnmendableError("its text is lost, and chunks of it too")
    plan = Plan()
    chunks = dict(damaged.good)
    if text is None:
        text = _joined(list(chunks.values()))
        plan.puts.append(("texts", damaged.digest, pack_text(text)))
    for ordinal in damaged.bad:
        chunks[ordinal] = _found(damaged, text, ordinal, chunks, mender)
        plan.puts.append(("chunks", chunk_key(damaged.digest, ordinal), pack_chunk(chunks[ordinal])))
        plan.deletes += [("places", name) for name in damaged.names[ordinal] if len(damaged.names[ordinal]) == 1]
    plan.deletes += [("chunks", chunk_key(damaged.digest, ordinal)) for ordinal in damaged.extra]
    plan.puts += [("places", digest(chunk.chunk_id), chunk_key(damaged.digest, n)) for n, chunk in chunks.items()]
    if damaged.bad_vectors:
        plan.puts += _vectors(damaged, [chunks[ordinal] for ordinal in sorted(damaged.bad_vectors)], mender)
    # What was rebuilt may lack a page or a heading. Without a recipe, the next ingest makes the document anew.
    whole = not (damaged.bad or damaged.text is None or damaged.bad_vectors)
    now = replace(
        stored,
        recipe=stored.recipe if whole else "",
        chunks=len(chunks),
        tokens=sum(len(chunk.token_ids) for chunk in chunks.values()),
    )
    plan.puts.append(("documents", damaged.key, pack_document(now)))
    return plan


def apply_plan(txn: Transaction, damaged: DamagedDocument, plan: Plan) -> bool:
    """Make the changes; False when the document has changed since it was examined."""
    if generation(txn) != damaged.generation or bytes(txn.get("documents", damaged.key) or b"") != damaged.row:
        return False
    for ordinal in damaged.bad_vectors:
        drop_vectors(txn, chunk_key(damaged.digest, ordinal))
    for table, key in plan.deletes:
        txn.delete(table, key)
    for table, key, value in plan.puts:
        txn.put(table, key, value)
    advance(txn)
    return True


def _found(damaged: DamagedDocument, text: str, ordinal: int, chunks: Mapping[int, Chunk], mender: Mender) -> Chunk:
    """The chunk between its neighbours; those before it have been rebuilt already."""
    before, after = chunks.get(ordinal - 1), chunks.get(min((n for n in chunks if n > ordinal), default=-1))
    low, high = 0 if before is None else before.end, len(text) if after is None else after.start
    names = damaged.names[ordinal]
    document = damaged.stored.document
    span = mender.find_chunk(document, text, ordinal, low, high, lambda name: digest(name) in names)
    if span is None:
        raise UnmendableError(f"its chunk {ordinal} is damaged, and its text does not tell where that began and ended")
    chunk_id, start, end = span
    next_to = [chunk for chunk in (before, after) if chunk is not None]
    pages, headings = {chunk.page for chunk in next_to}, {chunk.heading for chunk in next_to}
    tokens = damaged.tokens.get(digest(chunk_id))
    return Chunk(
        chunk_id=chunk_id,
        document_id=document.document_id,
        ordinal=ordinal,
        text=text[start:end],
        token_ids=mender.tokens(text[start:end]) if tokens is None else tokens,
        start=start,
        end=end,
        page=pages.pop() if len(pages) == 1 else None,
        heading=headings.pop() if len(headings) == 1 else None,
    )


def _vectors(damaged: DamagedDocument, chunks: Sequence[Chunk], mender: Mender) -> Iterator[tuple[str, bytes, bytes]]:
    made = mender.embed(chunks)
    if made is None:
        raise UnmendableError("a vector of it is damaged, and there is no embedder to make it again")
    for chunk in chunks:
        for key, part in vector_rows(made[chunk.chunk_id], chunk_key(damaged.digest, chunk.ordinal)):
            yield "vectors", key, part


def _joined(chunks: Sequence[Chunk]) -> str:
    """The text that the chunks were cut from, with line ends for the white space between them."""
    text = ""
    for chunk in chunks:
        if chunk.start < len(text) or chunk.end - chunk.start != len(chunk.text):
            raise UnmendableError("its text is lost, and its chunks do not say where they stood in it")
        text += "\n" * (chunk.start - len(text)) + chunk.text
    return text


def _text(txn: Transaction, document: bytes) -> str | None:
    value = txn.get("texts", document)
    try:
        return None if value is None else parse_text(value)
    except CorruptStoreError:
        return None


def _tokens(txn: Transaction, name: bytes) -> tuple[int, ...] | None:
    """The token ids of a chunk, from the manifest of its KV."""
    for key in txn.values("needs", name):
        manifest = find_record(txn, key)
        if manifest is not None and manifest.identity.encoding is not Encoding.LONG:
            return manifest.identity.chunk_ids
    return None


def _has_bad_vector(txn: Transaction, chunk: bytes) -> bool:
    try:
        for kind in VECTOR_KINDS:
            read_vector(txn, kind, chunk)
    except DamagedError:
        return True
    return False


def _is_taken(txn: Transaction, chunk: Chunk, at: bytes) -> bool:
    """Whether the chunk's id is also that of a chunk elsewhere."""
    home = txn.get("places", digest(chunk.chunk_id))
    if home is None or bytes(home) == at:
        return False
    other, _ = chunk_of(txn, bytes(home))
    return other is not None and other.chunk_id == chunk.chunk_id
