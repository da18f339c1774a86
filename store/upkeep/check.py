"""What has to hold between the rows of a store, one function per table, each within one snapshot.

A check sees one moment only, so a writer at work beside it never makes it see a contradiction that is none. Findings
name the row; what is done about them is `repair`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator

from ragkv.boundary.plainfile import parse_json
from ragkv.errors import ConfigError, CorruptStoreError
from ragkv.store.document import require_shape
from ragkv.store.format.decode import check_payloads
from ragkv.store.format.record import Manifest
from ragkv.store.format.row import parse_chunk, parse_document, parse_text
from ragkv.store.format.vector import VECTOR_KINDS, parse_vector
from ragkv.store.seal import DamagedError
from ragkv.store.transaction import INDEX_OWNER, PLACE_BYTES, Transaction, digest, document_key, place_of
from ragkv.store.upkeep.finding import Finding
from ragkv.types import Chunk

__all__ = [
    "PLACE_BYTES",
    "chunk_named",
    "chunk_of",
    "chunk_ordinals",
    "find_record",
    "in_document",
    "in_facts",
    "in_needs",
    "in_place",
    "in_record",
    "in_references",
    "in_vector",
    "most_chunks",
]

_KINDS = {kind[:1].encode(): kind for kind in VECTOR_KINDS}


def in_facts(txn: Transaction, key: bytes) -> Iterator[Finding]:
    """`meta`: facts are JSON, the generation a number of 8 bytes."""
    value = bytes(txn.get("meta", key) or b"")
    if key == b"generation" and len(value) != 8:
        yield Finding(kind="damaged", table="meta", key=key, where="the generation", what="it is no number of 8 bytes")
    if key.startswith(b"fact/"):
        try:
            parse_json(value)
        except ValueError as error:
            name = key[5:].decode(errors="replace")
            yield Finding(
                kind="damaged", table="meta", key=key, where=f"fact {name!r}", what=f"it is no JSON ({error})"
            )


def in_document(txn: Transaction, key: bytes) -> Iterator[Finding]:
    """`documents`, with the document's text, its chunks and their places."""
    try:
        stored = parse_document(txn.get("documents", key) or b"")
    except CorruptStoreError as error:
        name = key.decode(errors="replace")
        yield Finding(
            kind="damaged", table="documents", key=key, where=f"document {name}", what=_cause(error), document=name
        )
        return
    name = stored.document.document_id
    where = f"document {name}"
    if document_key(name) != key:
        yield Finding(
            kind="mismatch", table="documents", key=key, where=where, what="it lies under a key that is not its own"
        )
        return
    yield from _in_text(txn, key, name)
    place = place_of(key)
    found = chunk_ordinals(txn, place)
    tokens: int | None = 0
    if stored.chunks > most_chunks(found):
        what = f"it counts {stored.chunks} chunks, of which {len(found)} are there"
        yield Finding(kind="damaged", table="documents", key=key, where=where, what=what, document=name)
        return
    for ordinal in sorted(found | set(range(stored.chunks))):
        at = place + ordinal.to_bytes(4, "big")
        label = f"chunk {ordinal} of {name}"
        if ordinal not in found:
            tokens = None
            yield Finding(kind="missing", table="chunks", key=at, where=label, what="its row is missing", document=name)
            continue
        chunk, cause = chunk_of(txn, at)
        if chunk is None or chunk.document_id != name or chunk.ordinal != ordinal:
            tokens = None
            cause = cause or "it is another chunk's row"
            yield Finding(kind="damaged", table="chunks", key=at, where=label, what=cause, document=name)
            continue
        tokens = None if tokens is None else tokens + len(chunk.token_ids)
        home = txn.get("places", digest(chunk.chunk_id))
        if home is None or bytes(home) != at:
            kind, what = ("missing", "its place is missing") if home is None else ("mismatch", "its place is another's")
            yield Finding(
                kind=kind,  # type: ignore[arg-type]
                table="places",
                key=digest(chunk.chunk_id),
                where=label,
                what=what,
                document=name,
            )
    if found - set(range(stored.chunks)) or tokens not in (None, stored.tokens):
        what = f"it counts {stored.chunks} chunks and {stored.tokens} tokens, which its chunks do not add up to"
        yield Finding(kind="mismatch", table="documents", key=key, where=where, what=what, document=name)


def _in_text(txn: Transaction, key: bytes, name: str) -> Iterator[Finding]:
    value = txn.get("texts", place_of(key))
    try:
        if value is not None:
            parse_text(value)
            return
        kind, what = "missing", "its row is missing"
    except CorruptStoreError as error:
        kind, what = "damaged", _cause(error)
    yield Finding(
        kind=kind,  # type: ignore[arg-type]
        table="texts",
        key=place_of(key),
        where=f"the text of {name}",
        what=what,
        document=name,
    )


def in_place(txn: Transaction, key: bytes) -> Iterator[Finding]:
    """`places`: the chunk that a place leads to is the one that it is the place of."""
    at = bytes(txn.get("places", key) or b"")
    chunk, _ = chunk_of(txn, at)
    if chunk is not None and digest(chunk.chunk_id) == key:
        return
    if chunk is None and txn.get("chunks", at) is not None:
        return  # the row is damaged, which is told of the row; its place is what it is found again by
    yield Finding(
        kind="stray",
        table="places",
        key=key,
        where=f"place {key.hex()[:16]}",
        what="there is no such chunk where it leads",
    )


def in_vector(txn: Transaction, kind: bytes, place: bytes) -> Iterator[Finding]:
    """`vectors`: all parts of a chunk's vector of one kind."""
    parts = list(txn.scan("vectors", kind + place))
    name = _KINDS.get(kind)
    where = f"vector {kind!r} of chunk {place.hex()[:16]}"
    key = parts[0][0] if parts else b""
    if name is None or len(place) != PLACE_BYTES or any(len(key) != PLACE_BYTES + 5 for key, _ in parts):
        yield Finding(kind="stray", table="vectors", key=key, where=where, what="it has a key that means nothing")
        return
    chunk, _ = chunk_of(txn, place)
    if txn.get("chunks", place) is None:
        yield Finding(kind="stray", table="vectors", key=key, where=where, what="it is of a chunk that is not there")
        return
    if chunk is not None:
        where = f"{name} vector of chunk {chunk.ordinal} of {chunk.document_id}"
    try:
        if [key[-4:] for key, _ in parts] != [n.to_bytes(4, "big") for n in range(len(parts))]:
            raise DamagedError("a part of it is missing")
        parse_vector(name, [value for _, value in parts])
    except DamagedError as error:
        document = chunk.document_id if chunk is not None else None
        yield Finding(kind="damaged", table="vectors", key=key, where=where, what=str(error), document=document)


def in_record(txn: Transaction, key: bytes, *, payload: bool) -> Iterator[Finding]:
    """`kv`, and with `payload` `segments`: every checksum, and that the codec gives the tensors' bytes back."""
    where = f"KV record {key.hex()[:16]}"
    try:
        manifest = Manifest.parse(txn.get("kv", key) or b"")
        if manifest.identity.key() != key:
            raise DamagedError("it lies under a key that is not its own")
        require_shape(txn, manifest)
        if payload:
            check_payloads(manifest, lambda index: txn.segment(key, index))
        elif any(txn.segment(key, index) is None for index in range(len(manifest.segments))):
            raise DamagedError("a segment is missing")
    except (ValueError, ConfigError) as error:
        yield Finding(
            kind="damaged", table="kv", key=key, where=where, what=str(error).rstrip("."), document=_needed_by(txn, key)
        )


def in_references(txn: Transaction, key: bytes) -> Iterator[Finding]:
    """`references`: whoever a record is said to be needed by is there, and says so too."""
    for owner in txn.values("references", key):
        if _is_owner(txn, owner) and txn.has("needs", owner, key):
            continue
        yield Finding(
            kind="mismatch",
            table="references",
            key=key,
            owner=owner,
            where=f"reference of chunk {owner.hex()[:16]} to KV record {key.hex()[:16]}",
            what="the chunk does not know of it" if _is_owner(txn, owner) else "there is no such chunk",
        )


def in_needs(txn: Transaction, owner: bytes) -> Iterator[Finding]:
    """`needs`: every record that a chunk needs is there, is of its tokens, and knows of the chunk."""
    place = txn.get("places", owner)
    chunk = chunk_of(txn, bytes(place))[0] if place is not None else None
    name = None if chunk is None else chunk.document_id
    for key in txn.values("needs", owner):
        where = f"need of chunk {owner.hex()[:16]} for KV record {key.hex()[:16]}"
        value = txn.get("kv", key)
        if not _is_owner(txn, owner):
            what = "there is no such chunk"
        elif value is None:
            yield Finding(
                kind="missing",
                table="kv",
                key=key,
                owner=owner,
                where=f"KV record {key.hex()[:16]}",
                what="its row is missing",
                document=name,
            )
            continue
        elif not txn.has("references", key, owner):
            what = "the record does not know of it"
        elif chunk is not None and not _is_of(value, chunk):
            what = "the record is of other tokens"
        else:
            continue
        yield Finding(kind="mismatch", table="needs", key=key, owner=owner, where=where, what=what, document=name)


def chunk_of(txn: Transaction, place: bytes) -> tuple[Chunk | None, str]:
    """The chunk at a place, or why there is none that can be read."""
    value = txn.get("chunks", place) if len(place) == PLACE_BYTES else None
    if value is None:
        return None, "its row is missing"
    try:
        return parse_chunk(value), ""
    except CorruptStoreError as error:
        return None, _cause(error)


def chunk_ordinals(txn: Transaction, place: bytes) -> set[int]:
    """The ordinals that a document, by the digest of its id, has rows for."""
    return {int.from_bytes(key[32:], "big") for key, _ in txn.scan("chunks", place) if len(key) == PLACE_BYTES}


def most_chunks(there: set[int]) -> int:
    """How many chunks a document's row may count beside those that are there: no damage takes so many, and each that
    is missing is looked for."""
    return 4 * len(there) + (1 << 16)


def chunk_named(txn: Transaction, owner: bytes) -> Chunk | None:
    """The chunk by the digest of its id."""
    place = txn.get("places", owner)
    return None if place is None else chunk_of(txn, bytes(place))[0]


def find_record(txn: Transaction, key: bytes) -> Manifest | None:
    """A record's manifest, if it is one and lies where it should."""
    try:
        manifest = Manifest.parse(txn.get("kv", key) or b"")
    except ValueError:
        return None
    return manifest if manifest.identity.key() == key else None


def _needed_by(txn: Transaction, key: bytes) -> str | None:
    """A document that has to do with a record."""
    for owner in txn.values("references", key):
        chunk = chunk_named(txn, owner)
        if chunk is not None:
            return chunk.document_id
    return None


def _is_owner(txn: Transaction, owner: bytes) -> bool:
    return owner == INDEX_OWNER or txn.get("places", owner) is not None


def _is_of(value: bytes | memoryview, chunk: Chunk) -> bool:
    """False when a manifest is whole and of other tokens; a damaged one is told of where it lies."""
    try:
        return Manifest.parse(value).identity.chunk_ids == chunk.token_ids
    except ValueError:
        return True


def _cause(error: CorruptStoreError) -> str:
    return str(error.__cause__ or error)
