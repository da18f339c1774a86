"""A damaged document made whole from its intact rows, or the plain reason why it cannot be.

What a row says can often be told from others: a chunk's id is a hash that its place and its KV still name, so its
span in the text is found by trying; its tokens stand in its KV's manifest; a text is its chunks and the white space
between them. Page and heading stand nowhere else: they are taken from the neighbours where these agree, and the
document forgets its recipe, so that the next ingest of its source makes it anew, from the KV that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ragkv.attention.kv import ChunkKV
from ragkv.errors import CorruptStoreError
from ragkv.store.document import advance, generation, names_of
from ragkv.store.format.identity import KVIdentity
from ragkv.store.format.row import StoredDocument, pack_chunk, pack_document, pack_text, parse_document, parse_text
from ragkv.store.format.vector import VECTOR_KINDS, ChunkVectors, pack_vectors, parse_vector, vector_prefix
from ragkv.store.seal import DamagedError
from ragkv.store.transaction import INDEX_OWNER, Transaction, digest, place_of
from ragkv.store.upkeep.check import chunk_of, chunk_ordinals, find_record, most_chunks
from ragkv.types import Chunk, Document

__all__ = ["Mender", "Patient", "Plan", "UnmendableError", "apply_plan", "examine", "plan_document"]


class Mender(Protocol):
    """What the store does not know of its own content; called outside transactions."""

    def find_chunk(
        self, document: Document, text: str, ordinal: int, low: int, high: int, known: Callable[[str], bool]
    ) -> tuple[str, int, int] | None:
        """Id, start and end of the chunk in `text[low:high]` whose id is `known`; None when there is none."""

    def tokens(self, text: str) -> tuple[int, ...]:
        """A chunk's token ids."""

    def identities(self, chunk: Chunk) -> Sequence[KVIdentity]:
        """The KV that the index may ask for, for this chunk, as it is configured now."""

    def encode(self, identities: Sequence[KVIdentity]) -> Sequence[ChunkKV]:
        """KV made anew."""

    def embed(self, chunks: Sequence[Chunk]) -> Mapping[str, ChunkVectors] | None:
        """Vectors made anew, by chunk id; None when the index has no embedder."""


class UnmendableError(Exception):
    """A document cannot be made whole; the message says why, as a clause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """All that one snapshot holds of a document; `row` and `generation` tell whether it has changed since.

    `names` are the digests of chunk ids that may be the bad chunks' (ordinal to names), `tokens` what the KV of a
    name says are its tokens.
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
    blind: set[int]
    taken: bool

    @property
    def place(self) -> bytes:
        return place_of(self.key)


@dataclass(slots=True, kw_only=True)
class Plan:
    """The changes that make a document whole."""

    deletes: list[tuple[str, bytes]] = field(default_factory=list)
    puts: list[tuple[str, bytes, bytes]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """About how many bytes it writes."""
        return sum(len(value) for _, _, value in self.puts)


def examine(txn: Transaction, key: bytes) -> Patient:
    """Read a document with all its rows; `UnmendableError` when its own is lost."""
    row = bytes(txn.get("documents", key) or b"")
    try:
        stored = parse_document(row)
    except CorruptStoreError as error:
        raise UnmendableError("its row is damaged") from error
    place = place_of(key)
    good: dict[int, Chunk] = {}
    there = chunk_ordinals(txn, place)
    if stored.chunks > most_chunks(there):
        raise UnmendableError(f"it counts {stored.chunks} chunks, of which {len(there)} are there")
    for ordinal in sorted(there & set(range(stored.chunks))):
        chunk, _ = chunk_of(txn, _at(place, ordinal))
        if chunk is not None and (chunk.document_id, chunk.ordinal) == (stored.document.document_id, ordinal):
            good[ordinal] = chunk
    bad = [ordinal for ordinal in range(stored.chunks) if ordinal not in good]
    names = {ordinal: set(names_of(txn, _at(place, ordinal))) for ordinal in bad}
    if not all(names.values()):  # the place is lost too: the name is one that needs KV and has no place
        homeless = {name for name in txn.keys("needs") if name != INDEX_OWNER and txn.get("places", name) is None}
        names = {ordinal: found or homeless for ordinal, found in names.items()}
    known = {name for found in names.values() for name in found}
    return Patient(
        key=key,
        row=row,
        generation=generation(txn),
        stored=stored,
        text=_text(txn, place),
        good=good,
        bad=bad,
        extra=sorted(there - set(range(stored.chunks))),
        names=names,
        tokens={name: tokens for name in known if (tokens := _tokens(txn, name)) is not None},
        blind={ordinal for ordinal in range(stored.chunks) if any(_bad_vectors(txn, _at(place, ordinal)))},
        taken=any(_is_taken(txn, chunk, _at(place, ordinal)) for ordinal, chunk in good.items()),
    )


def plan_document(patient: Patient, mender: Mender) -> Plan:
    """How to make it whole; `UnmendableError` when there is no way."""
    stored, text = patient.stored, patient.text
    if patient.taken:
        raise UnmendableError("its chunk ids are another document's")
    if text is None and patient.bad:
        raise UnmendableError("its text is lost, and chunks of it too")
    plan = Plan()
    chunks = dict(patient.good)
    if text is None:
        text = _joined(list(chunks.values()))
        plan.puts.append(("texts", patient.place, pack_text(text)))
    for ordinal in patient.bad:
        chunks[ordinal] = _found(patient, text, ordinal, chunks, mender)
        plan.puts.append(("chunks", _at(patient.place, ordinal), pack_chunk(chunks[ordinal])))
        plan.deletes += [("places", name) for name in patient.names[ordinal] if len(patient.names[ordinal]) == 1]
    plan.deletes += [("chunks", _at(patient.place, ordinal)) for ordinal in patient.extra]
    plan.puts += [("places", digest(chunk.chunk_id), _at(patient.place, n)) for n, chunk in chunks.items()]
    if patient.blind:
        plan.puts += _vectors(patient, [chunks[ordinal] for ordinal in sorted(patient.blind)], mender)
    whole = not (patient.bad or patient.text is None or patient.blind)
    now = replace(
        stored,
        recipe=stored.recipe if whole else "",
        chunks=len(chunks),
        tokens=sum(len(chunk.token_ids) for chunk in chunks.values()),
    )
    plan.puts.append(("documents", patient.key, pack_document(now)))
    return plan


def apply_plan(txn: Transaction, patient: Patient, plan: Plan) -> bool:
    """Carry it out; False when the document has changed since it was examined."""
    if generation(txn) != patient.generation or bytes(txn.get("documents", patient.key) or b"") != patient.row:
        return False
    for ordinal in patient.blind:
        for kind in VECTOR_KINDS:
            for key in [key for key, _ in txn.scan("vectors", vector_prefix(kind, _at(patient.place, ordinal)))]:
                txn.delete("vectors", key)
    for table, key in plan.deletes:
        txn.delete(table, key)
    for table, key, value in plan.puts:
        txn.put(table, key, value)
    advance(txn)
    return True


def _found(patient: Patient, text: str, ordinal: int, chunks: Mapping[int, Chunk], mender: Mender) -> Chunk:
    """The chunk between its neighbours; those before it are whole by now."""
    before, after = chunks.get(ordinal - 1), chunks.get(min((n for n in chunks if n > ordinal), default=-1))
    low, high = 0 if before is None else before.end, len(text) if after is None else after.start
    names = patient.names[ordinal]
    document = patient.stored.document
    span = mender.find_chunk(document, text, ordinal, low, high, lambda name: digest(name) in names)
    if span is None:
        raise UnmendableError(f"its chunk {ordinal} is damaged, and its text does not tell where that began and ended")
    chunk_id, start, end = span
    next_to = [chunk for chunk in (before, after) if chunk is not None]
    pages, headings = {chunk.page for chunk in next_to}, {chunk.heading for chunk in next_to}
    tokens = patient.tokens.get(digest(chunk_id))
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


def _vectors(patient: Patient, chunks: Sequence[Chunk], mender: Mender) -> Iterator[tuple[str, bytes, bytes]]:
    made = mender.embed(chunks)
    if made is None:
        raise UnmendableError("a vector of it is damaged, and there is no embedder to make it again")
    for chunk in chunks:
        for kind, parts in pack_vectors(made[chunk.chunk_id]):
            for number, part in enumerate(parts):
                key = vector_prefix(kind, _at(patient.place, chunk.ordinal)) + number.to_bytes(4, "big")
                yield "vectors", key, part


def _joined(chunks: Sequence[Chunk]) -> str:
    """The text that chunks were cut from, all white space between them as line ends."""
    text = ""
    for chunk in chunks:
        if chunk.start < len(text) or chunk.end - chunk.start != len(chunk.text):
            raise UnmendableError("its text is lost, and its chunks do not say where they stood in it")
        text += "\n" * (chunk.start - len(text)) + chunk.text
    return text


def _text(txn: Transaction, place: bytes) -> str | None:
    value = txn.get("texts", place)
    try:
        return None if value is None else parse_text(value)
    except CorruptStoreError:
        return None


def _tokens(txn: Transaction, name: bytes) -> tuple[int, ...] | None:
    """The tokens of a chunk, by what its KV says."""
    for key in txn.values("needs", name):
        manifest = find_record(txn, key)
        if manifest is not None:
            return manifest.identity.chunk_ids
    return None


def _bad_vectors(txn: Transaction, at: bytes) -> Iterator[str]:
    for kind in VECTOR_KINDS:
        parts = list(txn.scan("vectors", vector_prefix(kind, at)))
        try:
            if [key[-4:] for key, _ in parts] != [n.to_bytes(4, "big") for n in range(len(parts))]:
                yield kind
            elif parts:
                parse_vector(kind, [value for _, value in parts])
        except DamagedError:
            yield kind


def _is_taken(txn: Transaction, chunk: Chunk, at: bytes) -> bool:
    """Whether a chunk's id is also that of a chunk elsewhere."""
    home = txn.get("places", digest(chunk.chunk_id))
    if home is None or bytes(home) == at:
        return False
    other, _ = chunk_of(txn, bytes(home))
    return other is not None and other.chunk_id == chunk.chunk_id


def _at(place: bytes, ordinal: int) -> bytes:
    return place + ordinal.to_bytes(4, "big")
