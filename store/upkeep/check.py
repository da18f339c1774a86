"""What has to hold between the rows of a store: one function per table, each within one snapshot.

Because a check sees one snapshot only, a writer beside it never makes it report a contradiction that is not there.
A check reports findings; `repair` acts on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ragkv.boundary.plainfile import parse_json
from ragkv.errors import ConfigError, CorruptStoreError
from ragkv.store.document import read_vector, require_shape
from ragkv.store.format.decode import check_payloads
from ragkv.store.format.record import Manifest
from ragkv.store.format.row import parse_chunk, parse_document, parse_text
from ragkv.store.format.use import UseRow
from ragkv.store.format.vector import VECTOR_KINDS
from ragkv.store.history import parse_change
from ragkv.store.seal import DamagedError
from ragkv.store.tally import is_garbage
from ragkv.store.transaction import (
    INDEX_OWNER,
    PLACE_BYTES,
    VALUE_BYTES,
    Transaction,
    chunk_key,
    digest,
    document_digest,
    document_key,
)
from ragkv.store.upkeep.finding import Finding
from ragkv.types import Chunk

__all__ = [
    "PLACE_BYTES",
    "chunk_named",
    "chunk_of",
    "chunk_ordinals",
    "find_record",
    "in_change",
    "in_document",
    "in_facts",
    "in_list",
    "in_needs",
    "in_place",
    "in_record",
    "in_references",
    "in_segments",
    "in_uses",
    "in_vector",
    "most_chunks",
    "segment_count",
]

_KINDS = {kind[:1].encode(): kind for kind in VECTOR_KINDS}


def in_facts(txn: Transaction, key: bytes) -> Iterator[Finding]:
    """`meta`: facts are JSON, the generation is a number of 8 bytes."""
    value = bytes(txn.get("meta", key) or b"")
    damaged = partial(Finding, kind="damaged", table="meta", key=key)
    if key == b"generation" and len(value) != 8:
        yield damaged(where="the generation", what="it is not a number of 8 bytes")
    if key.startswith(b"fact/"):
        try:
            parse_json(value)
        except ValueError as error:
            yield damaged(where=f"fact {key[5:].decode(errors='replace')!r}", what=f"it is not JSON ({error})")


def in_change(txn: Transaction, key: bytes) -> Iterator[Finding]:
    """`changes`: names a document and its chunks."""
    value = txn.get("changes", key)
    try:
        if value is not None:
            parse_change(value)
    except DamagedError as error:
        where = f"change {int.from_bytes(key[:8], 'big')}"
        yield Finding(kind="damaged", table="changes", key=key, where=where, what=str(error))


def in_document(txn: Transaction, key: bytes) -> Iterator[Finding]:
    """`documents`, with the document's text, its chunks and their places."""
    try:
        stored = parse_document(txn.get("documents", key) or b"")
    except CorruptStoreError as error:
        name = key.decode(errors="replace")
        where, what = f"document {name}", _cause(error)
        yield Finding(kind="damaged", table="documents", key=key, where=where, what=what, document=name)
        return
    name = stored.document.document_id
    of_row = partial(Finding, table="documents", key=key, where=f"document {name}")
    if document_key(name) != key:
        # `document` stays unset: repair has to treat the row where it lies, not where the document's own row would be.
        yield of_row(kind="mismatch", what="it lies under a key that is not its own")
        return
    yield from _in_text(txn, key, name)
    document = document_digest(key)
    found = chunk_ordinals(txn, document)
    if stored.chunks > most_chunks(found):
        what = f"it counts {stored.chunks} chunks, of which {len(found)} are there"
        yield of_row(kind="damaged", what=what, document=name)
        return
    expected = set(range(stored.chunks))
    tokens: int | None = 0  # None as soon as a chunk's tokens are not known
    for ordinal in sorted(found | expected):
        at = chunk_key(document, ordinal)
        of_chunk = partial(Finding, table="chunks", key=at, where=f"chunk {ordinal} of {name}", document=name)
        if ordinal not in found:
            tokens = None
            yield of_chunk(kind="missing", what="its row is missing")
            continue
        chunk, cause = chunk_of(txn, at)
        if chunk is None or chunk.document_id != name or chunk.ordinal != ordinal:
            tokens = None
            yield of_chunk(kind="damaged", what=cause or "it is another chunk's row")
            continue
        tokens = None if tokens is None else tokens + len(chunk.token_ids)
        own = digest(chunk.chunk_id)
        place = txn.get("places", own)
        if place is None:
            yield of_chunk(kind="missing", table="places", key=own, what="its place is missing")
        elif bytes(place) != at:
            yield of_chunk(kind="mismatch", table="places", key=own, what="its place is another's")
    if found - expected or tokens not in (None, stored.tokens):
        what = f"it counts {stored.chunks} chunks and {stored.tokens} tokens, which its chunks do not add up to"
        yield of_row(kind="mismatch", what=what, document=name)


def _in_text(txn: Transaction, key: bytes, name: str) -> Iterator[Finding]:
    at = document_digest(key)
    of_text = partial(Finding, table="texts", key=at, where=f"the text of {name}", document=name)
    value = txn.get("texts", at)
    if value is None:
        yield of_text(kind="missing", what="its row is missing")
        return
    try:
        parse_text(value)
    except CorruptStoreError as error:
        yield of_text(kind="damaged", what=_cause(error))


def in_place(txn: Transaction, key: bytes) -> Iterator[Finding]:
    """`places`: the chunk that a place leads to is the one that the place belongs to."""
    at = bytes(txn.get("places", key) or b"")
    chunk, _ = chunk_of(txn, at)
    if chunk is not None and digest(chunk.chunk_id) == key:
        return
    if chunk is None and txn.get("chunks", at) is not None:
        # The chunk's row is damaged, which is reported for the row; repair needs the place to identify the chunk.
        return
    what = "there is no such chunk where it leads"
    yield Finding(kind="stray", table="places", key=key, where=f"place {key.hex()[:16]}", what=what)


def in_vector(txn: Transaction, kind: bytes, place: bytes) -> Iterator[Finding]:
    """`vectors`: all parts of a chunk's vector of one kind."""
    keys = [key for key, _ in txn.scan("vectors", kind + place)]
    name = _KINDS.get(kind)
    of_vector = partial(Finding, table="vectors", key=keys[0] if keys else b"")
    where = f"vector {kind!r} of chunk {place.hex()[:16]}"
    if name is None or len(place) != PLACE_BYTES or any(len(key) != PLACE_BYTES + 5 for key in keys):
        yield of_vector(kind="stray", where=where, what="it has a key that means nothing")
        return
    if txn.get("chunks", place) is None:
        yield of_vector(kind="stray", where=where, what="it is of a chunk that is not there")
        return
    chunk, _ = chunk_of(txn, place)
    document = None if chunk is None else chunk.document_id
    if chunk is not None:
        where = f"{name} vector of chunk {chunk.ordinal} of {document}"
    try:
        read_vector(txn, name, place)
    except DamagedError as error:
        yield of_vector(kind="damaged", where=where, what=str(error), document=document)


def in_record(txn: Transaction, key: bytes, *, payload: bool) -> Iterator[Finding]:
    """`kv`; with `payload` also `segments`: every checksum, and that the codec gives back the tensors' bytes."""
    try:
        manifest = Manifest.parse(txn.get("kv", key) or b"")
        if manifest.identity.key() != key:
            raise DamagedError("it lies under a key that is not its own")
        require_shape(txn, manifest)
        if payload:
            check_payloads(manifest, partial(txn.segment, key))
        elif any(txn.segment(key, index) is None for index in range(len(manifest.segments))):
            raise DamagedError("a segment is missing")
    except (ValueError, ConfigError) as error:
        where, what = f"KV record {key.hex()[:16]}", str(error).rstrip(".")
        yield Finding(kind="damaged", table="kv", key=key, where=where, what=what, document=_needed_by(txn, key))


def in_list(txn: Transaction, key: bytes, *, referenced: bool | None = None) -> Iterator[Finding]:
    """`unreferenced`: it lists the KV that nothing refers to, and nothing else."""
    if "unreferenced" not in txn.tables:
        return
    garbage = is_garbage(txn, key) if referenced is None else not referenced
    if garbage == (txn.get("unreferenced", key) is not None):
        return
    what = (
        "nothing refers to it, and it is not on the list" if garbage else "it is on the list, and it is in use or gone"
    )
    where = f"KV {key.hex()[:16]} in the list of what nothing refers to"
    yield Finding(kind="mismatch", table="unreferenced", key=key, where=where, what=what)


def in_segments(txn: Transaction, key: bytes) -> Iterator[Finding]:
    """`segments` beyond those of a record that is in use; those of garbage go with it."""
    if not txn.is_referenced(key):
        return
    count = segment_count(txn, key)
    for found, _ in txn.scan("segments", key):
        if int.from_bytes(found[VALUE_BYTES:], "big") >= count:
            where = f"segment of KV record {key.hex()[:16]}"
            yield Finding(kind="stray", table="segments", key=found, where=where, what="the record has fewer segments")


def segment_count(txn: Transaction, record: bytes) -> int:
    """How many segments a record should have."""
    manifest = find_record(txn, record)
    if manifest is not None:
        return len(manifest.segments)
    # How many segments a damaged record has is not known, so that none of them is one too many.
    return 0 if txn.get("kv", record) is None else 1 << 32


def in_references(txn: Transaction, key: bytes) -> Iterator[Finding]:
    """`references`: every chunk that is said to need a record is there, and says so too."""
    for owner in txn.values("references", key):
        known = _is_owner(txn, owner)
        if known and txn.has("needs", owner, key):
            continue
        yield Finding(
            kind="mismatch",
            table="references",
            key=key,
            owner=owner,
            where=f"reference of chunk {owner.hex()[:16]} to KV record {key.hex()[:16]}",
            what="the chunk does not know of it" if known else "there is no such chunk",
        )


def in_needs(txn: Transaction, owner: bytes) -> Iterator[Finding]:
    """`needs`: every record that a chunk needs is there, holds the chunk's tokens, and names the chunk."""
    chunk = chunk_named(txn, owner)
    name = None if chunk is None else chunk.document_id
    for key in txn.values("needs", owner):
        record = f"KV record {key.hex()[:16]}"
        finding = partial(Finding, key=key, owner=owner, document=name)
        value = txn.get("kv", key)
        if not _is_owner(txn, owner):
            what = "there is no such chunk"
        elif value is None:
            yield finding(kind="missing", table="kv", where=record, what="its row is missing")
            continue
        elif not txn.has("references", key, owner):
            what = "the record does not know of it"
        elif chunk is not None and not _is_of(value, chunk):
            what = "the record is of other tokens"
        else:
            continue
        where = f"need of chunk {owner.hex()[:16]} for {record}"
        yield finding(kind="mismatch", table="needs", where=where, what=what)


def in_uses(txn: Transaction, key: bytes) -> Iterator[Finding]:
    """`uses`: a row that can be read. What it counts belongs to no other row."""
    try:
        UseRow.parse(txn.get("uses", key) or b"")
    except DamagedError as error:
        where = f"uses of KV record {key.hex()[:16]}"
        yield Finding(kind="damaged", table="uses", key=key, where=where, what=str(error))


def chunk_of(txn: Transaction, place: bytes) -> tuple[Chunk | None, str]:
    """The chunk at a place; None with the reason when it cannot be read."""
    value = txn.get("chunks", place) if len(place) == PLACE_BYTES else None
    if value is None:
        return None, "its row is missing"
    try:
        return parse_chunk(value), ""
    except CorruptStoreError as error:
        return None, _cause(error)


def chunk_named(txn: Transaction, owner: bytes) -> Chunk | None:
    """The chunk whose id has the digest `owner`, if it is there and can be read."""
    place = txn.get("places", owner)
    return None if place is None else chunk_of(txn, bytes(place))[0]


def chunk_ordinals(txn: Transaction, document: bytes) -> set[int]:
    """The ordinals for which a document, given by the digest of its id, has rows."""
    return {int.from_bytes(key[32:], "big") for key, _ in txn.scan("chunks", document) if len(key) == PLACE_BYTES}


def most_chunks(there: set[int]) -> int:
    """The largest chunk count that a document's row may claim when the chunks `there` were found.

    Each missing chunk is looked for one by one, so a damaged or hostile count must not be believed. No real damage
    takes this many.
    """
    return 4 * len(there) + (1 << 16)


def find_record(txn: Transaction, key: bytes) -> Manifest | None:
    """A record's manifest, if it can be read and lies under its own key."""
    try:
        manifest = Manifest.parse(txn.get("kv", key) or b"")
    except ValueError:
        return None
    return manifest if manifest.identity.key() == key else None


def _needed_by(txn: Transaction, key: bytes) -> str | None:
    """The id of one document that needs a record."""
    chunks = (chunk_named(txn, owner) for owner in txn.values("references", key))
    return next((chunk.document_id for chunk in chunks if chunk is not None), None)


def _is_owner(txn: Transaction, owner: bytes) -> bool:
    return owner == INDEX_OWNER or txn.get("places", owner) is not None


def _is_of(value: bytes | memoryview, chunk: Chunk) -> bool:
    """Whether a manifest holds the chunk's tokens; a damaged one passes, since `in_record` reports it."""
    try:
        return Manifest.parse(value).identity.may_serve(chunk.token_ids)
    except ValueError:
        return True


def _cause(error: CorruptStoreError) -> str:
    return str(error.__cause__ or error)
