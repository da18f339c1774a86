"""The store's tables within one LMDB transaction, and the bytes of their rows.

`Transaction` keeps records and references consistent. Each row of a document, text, chunk, vector or KV use has a
checksum. Retrieval indexes are derived from the vectors, so vectors are written and deleted in their document's
transaction; their keys begin with the kind, so a scan reads one kind only. A row of `uses` outlives its KV record: if
an evicted chunk is requested again, it is known to be wanted (`ragkv.store.maintenance.eviction`).
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from ragkv.errors import CorruptStoreError, StoreError
from ragkv.store.codecs import Buffer, DamagedError, add_checksum, verify_checksum
from ragkv.store.record import EncodedRecord, pack_ids, unpack_ids
from ragkv.types import Chunk, Document
from ragkv.util.files import parse_json

TABLES: Mapping[str, bool] = {
    "meta": False,
    "documents": False,
    "texts": False,
    "chunks": False,
    "places": False,
    "kv": False,
    "segments": False,
    "references": True,
    "needs": True,
    "vectors": False,
    "unreferenced": False,
    "changes": False,
    "uses": False,
}
"""Every table, and whether its keys have several values (docs/formats.md)."""

VALUE_BYTES = 32
"""Length of every value in tables with several values per key: a digest."""

PLACE_BYTES = 36
"""Length of the keys in `chunks`, which are also the values in `places`: a document's digest and an ordinal."""

TIERS = b"fact/tiers"
"""The key in `meta` that records that the index has shared tiers."""
TOMBSTONE = b"tombstone/"
"""The prefix, in `meta`, of keys of KV that no chunk needs any more and that is still to be deleted from the tiers."""

_KEY_LIMIT = 511
T = TypeVar("T")


def digest(identifier: str) -> bytes:
    """A key of 32 bytes for an id of any length."""
    return hashlib.blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def document_key(document_id: str) -> bytes:
    """A document's key in `documents`: the id itself, so that documents are sorted by it.

    LMDB limits keys to 511 bytes, so a longer id is cut, and its hash is appended.
    """
    raw = document_id.encode("utf-8", "surrogatepass")
    return raw if len(raw) < _KEY_LIMIT else raw[: _KEY_LIMIT - 32] + digest(document_id)


INDEX_OWNER = digest("@index")
"""The owner of KV that belongs to the index itself, such as the prefix's."""


class Transaction:
    """One LMDB transaction over the store's tables.

    Values are views of the map, valid within the transaction.
    """

    __slots__ = ("_tables", "_txn", "before_documents", "before_records", "changed")

    def __init__(self, txn: Any, tables: Mapping[str, Any]) -> None:
        self._txn = txn
        self._tables = tables
        self.changed: set[bytes] = set()
        """Keys of the KV records that this transaction wrote or dropped."""
        self.before_documents: dict[bytes, bytes | None] = {}
        """Rows of `documents` before their first change in this transaction."""
        self.before_records: dict[bytes, bytes | None] = {}
        """Rows of `kv` before this transaction first changed them, their references or segments."""

    def close(self) -> None:
        """Release LMDB's transaction: py-lmdb keeps its reader slot for as long as anything refers to it."""
        self._txn = None

    def number(self) -> int:
        """The number of the commit that this transaction sees."""
        return int(self._txn.id())

    def get(self, table: str, key: bytes) -> memoryview | None:
        # LMDB raises for a key of an impossible length, and a damaged row may hold one.
        if not 0 < len(key) <= _KEY_LIMIT:
            return None
        value: memoryview | None = self._txn.get(key, db=self._tables[table])
        return value

    def put(self, table: str, key: bytes, value: Buffer) -> None:
        """Add or replace a value; in a table with several values per key, add one."""
        self._note(table, key)
        self._txn.put(key, value, db=self._tables[table])

    def delete(self, table: str, key: bytes, value: bytes = b"") -> bool:
        """Delete a value, or with an empty `value` all values of the key; returns whether there was one."""
        self._note(table, key)
        return bool(self._txn.delete(key, value, db=self._tables[table]))

    def _note(self, table: str, key: bytes) -> None:
        """Keep a counted row before its first change (`ragkv.store.counters`)."""
        if table == "documents" and key not in self.before_documents:
            row = self.get(table, key)
            self.before_documents[key] = None if row is None else bytes(row)
        elif table in ("kv", "segments", "references"):
            record = key[:VALUE_BYTES] if table == "segments" else key
            if record not in self.before_records:
                row = self.get("kv", record)
                self.before_records[record] = None if row is None else bytes(row)

    def values(self, table: str, key: bytes) -> list[bytes]:
        """All values of a key."""
        with self._txn.cursor(db=self._tables[table]) as cursor:
            return [bytes(value) for value in cursor.iternext_dup()] if cursor.set_key(key) else []

    def has(self, table: str, key: bytes, value: bytes) -> bool:
        """Whether this is one of the key's values, in a table with several values per key."""
        with self._txn.cursor(db=self._tables[table]) as cursor:
            return bool(cursor.set_key_dup(key, value))

    def is_referenced(self, key: bytes) -> bool:
        """Whether a chunk or the index itself refers to a record."""
        return self.get("references", key) is not None

    def is_needed(self, key: bytes) -> bool:
        """Whether a chunk refers to a record."""
        first = self.get("references", key)
        if first is None or bytes(first) != INDEX_OWNER:
            return first is not None
        with self._txn.cursor(db=self._tables["references"]) as cursor:
            more = cursor.set_key(key)
            while more and bytes(cursor.value()) == INDEX_OWNER:
                more = cursor.next_dup()
            return bool(more)

    def keys(self, table: str, *, after: bytes | None = None) -> Iterator[bytes]:
        """Keys in order, each once, beginning behind `after`. No value is read from the disk."""
        with self._txn.cursor(db=self._tables[table]) as cursor:
            more = cursor.set_range(after) if after else cursor.first()
            if more and bytes(cursor.key()) == after:
                more = cursor.next_nodup()
            while more:
                key = bytes(cursor.key())
                yield key
                more = cursor.next_nodup()

    def scan(
        self, table: str, prefix: bytes = b"", *, after: bytes | None = None, limit: int | None = None
    ) -> Iterator[tuple[bytes, memoryview]]:
        """At most `limit` entries whose keys begin with `prefix`, in order, beginning behind `after`."""
        with self._txn.cursor(db=self._tables[table]) as cursor:
            start = after or prefix
            more = cursor.set_range(start) if start else cursor.first()
            if more and bytes(cursor.key()) == after:
                more = cursor.next_nodup()
            while more and limit != 0 and (key := bytes(cursor.key())).startswith(prefix):
                yield key, cursor.value()
                more, limit = cursor.next(), limit and limit - 1

    def count(self, table: str) -> int:
        """Entries of a table."""
        return int(self._txn.stat(self._tables[table])["entries"])

    def used_bytes(self, *tables: str) -> int:
        """Bytes of the pages in use by these tables, or by all."""
        pages, size = 0, 0
        for table in (self._tables[name] for name in tables or self._tables):
            stat = self._txn.stat(table)
            pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
            size = stat["psize"]
        return pages * size

    def segment(self, key: bytes, index: int) -> memoryview | None:
        return self.get("segments", _segment_key(key, index))

    def payload_bytes(self, key: bytes) -> int:
        """Bytes of a record's segments; they are not read."""
        return sum(len(payload) for _, payload in self.scan("segments", key))

    def put_record(self, record: EncodedRecord) -> None:
        """Write a record, replacing an old one even if damaged."""
        self.drop_record(record.key)
        for index, payload in enumerate(record.segments):
            self.put("segments", _segment_key(record.key, index), payload)
        self.put("kv", record.key, record.manifest)

    def drop_record(self, key: bytes) -> None:
        """Delete a record with all segments under its key, whatever its manifest says."""
        self.changed.add(key)
        self.delete("kv", key)
        if len(key) != VALUE_BYTES:  # a shorter, damaged key would match segments of other records
            return
        for segment_key in [found for found, _ in self.scan("segments", key)]:
            self.delete("segments", segment_key)

    def evict(self, key: bytes, owners: Iterable[bytes] = ()) -> None:
        """Drop a record with all references to it, and the needs of further `owners`."""
        for owner in {*self.values("references", key), *owners}:
            self.delete("needs", owner, key)
        self.delete("references", key)
        self.drop_record(key)

    def refer(self, chunk: bytes, key: bytes) -> None:
        """Add a reference from a chunk (by the digest of its id) to a record."""
        self.put("references", key, chunk)
        self.put("needs", chunk, key)

    def release(self, chunk: bytes) -> list[bytes]:
        """Delete all references of a chunk; returns the keys of the records that it needed, for `collect`."""
        keys = self.values("needs", chunk)
        self.delete("needs", chunk)
        for key in keys:
            self.delete("references", key, chunk)
        return keys

    def collect(self, keys: set[bytes]) -> None:
        """Drop the records that no chunk needs any more."""
        for key in keys:
            if not self.is_referenced(key):
                self.drop_record(key)
                self.delete("uses", key)
                self.add_tombstone(key)

    def add_tombstone(self, key: bytes) -> None:
        """Note that the tiers, if there are any, need not keep this record any more."""
        if self.get("meta", TIERS) is not None:
            self.put("meta", TOMBSTONE + key, b"")


def for_each(items: Collection[T], work: Callable[[Transaction, T], object]) -> Callable[[Transaction], None]:
    """A function for `Database.write`, which may call it several times: `work` for each item, in one transaction."""

    def apply(txn: Transaction) -> None:
        for item in items:
            work(txn, item)

    return apply


def shape_key(model: str) -> bytes:
    """The key in `meta` of the shape of a model's KV, by the model's fingerprint."""
    return b"shape/" + digest(model)


def document_digest(key: bytes) -> bytes:
    """The digest of a document's id, from its key in `documents`.

    It is the document's key in `texts`, and the keys of its chunks begin with it.
    """
    if len(key) == _KEY_LIMIT:
        return key[-32:]
    return hashlib.blake2b(key, digest_size=32).digest()


def chunk_key(document: bytes, ordinal: int) -> bytes:
    """A chunk's key in `chunks`, from the digest of its document's id; the value in `places`."""
    return document + ordinal.to_bytes(4, "big")


def _segment_key(key: bytes, index: int) -> bytes:
    return key + index.to_bytes(4, "big")


_LENGTH = struct.Struct("<I")
_TEXT_BYTES = 512 << 20
_ROW_BYTES = 64 << 20
"""No row of a document or a chunk is this large: 65,536 tokens with their text take a hundredth of it."""
_YEAR_9999 = 253_370_764_800
_CHUNK_FIELDS = [(name, hint) for name, hint in get_type_hints(Chunk).items() if name != "token_ids"]
_ChunkRow = msgspec.defstruct("_ChunkRow", _CHUNK_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDocument:
    """A document and how it was ingested: `recipe` as the ingest gave it, `ingested_at` in seconds since 1970."""

    document: Document
    recipe: str
    chunks: int
    tokens: int
    ingested_at: float


def pack_document(stored: StoredDocument) -> bytes:
    row = {name: getattr(stored, name) for name in ("recipe", "chunks", "tokens", "ingested_at")}
    fields = {name: getattr(stored.document, name) for name in Document.__slots__}
    row |= {"document": {**fields, "metadata": dict(stored.document.metadata)}}
    return add_checksum(json.dumps(row).encode())


def parse_document(value: Buffer) -> StoredDocument:
    def parse() -> StoredDocument:
        stored = msgspec.convert(parse_json(bytes(_limited(value))), StoredDocument)
        if not stored.document.document_id or not 0 <= stored.ingested_at < _YEAR_9999:
            raise ValueError("its id is empty, or its time of ingest is impossible")
        _require_range(stored.chunks, stored.tokens)
        return stored

    return _parsed(parse, "a document")


def pack_chunk(chunk: Chunk) -> bytes:
    """The uint32 length of the JSON, the JSON of all fields but the token ids, the token ids as uint32."""
    row = {name: getattr(chunk, name) for name, _ in _CHUNK_FIELDS}
    head = json.dumps(row).encode()
    return add_checksum(_LENGTH.pack(len(head)), head, pack_ids(chunk.token_ids))


def parse_chunk(value: Buffer) -> Chunk:
    def parse() -> Chunk:
        body = _limited(value)
        end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        row = msgspec.structs.asdict(msgspec.convert(parse_json(bytes(body[_LENGTH.size : end])), _ChunkRow))
        if not row["chunk_id"]:
            raise ValueError("it has no id")
        _require_range(row["ordinal"], row["start"], row["end"], row["page"] or 0)
        return Chunk(**row, token_ids=unpack_ids(body[end:]))

    return _parsed(parse, "a chunk")


def pack_text(text: str) -> bytes:
    """A text as UTF-8. Lone surrogates, which a badly decoded text may hold, are kept."""
    packed = text.encode("utf-8", "surrogatepass")
    if len(packed) > _TEXT_BYTES:
        raise StoreError(f"a document's text has {len(packed)} bytes, where {_TEXT_BYTES} is the most: split it")
    return add_checksum(packed)


def parse_text(value: Buffer) -> str:
    return _parsed(lambda: str(_limited(value, _TEXT_BYTES + 8), "utf-8", "surrogatepass"), "a text")


def _limited(value: Buffer, most: int = _ROW_BYTES) -> memoryview:
    """A row's bytes. An oversized row is refused before reading: a sparse file can hold gigabytes of zeros."""
    if len(value) > most:
        raise ValueError(f"it has {len(value)} bytes")
    return verify_checksum(value)


def _require_range(*numbers: int) -> None:
    if not all(0 <= number < 1 << 48 for number in numbers):
        raise ValueError("a number of it is out of range")


def _parsed(parse: Callable[[], T], what: str) -> T:
    try:
        return parse()
    except (ValueError, TypeError, struct.error, msgspec.ValidationError) as error:
        raise CorruptStoreError(
            f"{what} in the store is damaged ({error}): run `ragkv repair`, or restore a backup"
        ) from error


VectorKind: TypeAlias = Literal["dense", "sparse", "colbert"]
Vector: TypeAlias = NDArray[Any] | Mapping[str, float]

VECTOR_KINDS: tuple[VectorKind, ...] = ("dense", "sparse", "colbert")
PART_BYTES = 1 << 20  # longer values would fragment LMDB's file, see `ragkv.store.record`

_MOST_BYTES = 512 << 20  # 65,536 tokens of 2,048 float32 numbers each

_ARRAY = struct.Struct("<BBII")
_AXES = {"dense": 1, "colbert": 2}
_COUNT = struct.Struct("<I")
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<f2")}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkVectors:
    """One chunk's vectors, of the kinds that its embedder supports.

    dense: `(dim,)`; sparse: token to weight; colbert: `(tokens, dim)`. Arrays are float32 or float16, which is kept;
    `ValueError` for any other dtype.
    """

    dense: NDArray[Any] | None = None
    sparse: Mapping[str, float] | None = None
    colbert: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        for kind, axes in _AXES.items():
            array = getattr(self, kind)
            if array is not None and (array.ndim != axes or array.dtype not in _DTYPES.values()):
                raise ValueError(
                    f"{kind} vectors are float32 or float16 with {axes} axes, not {array.dtype}, {array.ndim}"
                )


def vector_prefix(kind: VectorKind, place: bytes = b"") -> bytes:
    """The prefix of the keys of a kind, or of one chunk by (the start of) its key in `chunks`."""
    return kind[:1].encode() + place


def vector_rows(vectors: ChunkVectors, chunk: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The rows in `vectors` of a chunk, by its key in `chunks`: each kind in parts of at most 1 MiB."""
    for kind in VECTOR_KINDS:
        vector: Vector | None = getattr(vectors, kind)
        if vector is not None:
            body = _pack_array(vector) if isinstance(vector, np.ndarray) else _pack_weights(vector)
            for number, at in enumerate(range(0, len(body), PART_BYTES)):
                yield vector_prefix(kind, chunk) + number.to_bytes(4, "big"), add_checksum(body[at : at + PART_BYTES])


def parse_vector(kind: VectorKind, parts: Sequence[Buffer]) -> Vector:
    """The vector of these values of `vector_rows`, as a copy; `DamagedError` when a part is not what was written."""
    if sum(map(len, parts)) > _MOST_BYTES or any(len(part) > 2 * PART_BYTES for part in parts):
        raise DamagedError(f"its {kind} vector is larger than any")
    body = b"".join(verify_checksum(part) for part in parts)
    try:
        return _parse_weights(body) if kind == "sparse" else _parse_array(body, kind)
    except (struct.error, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"its {kind} vector is malformed ({error!r})") from error


def _pack_array(array: NDArray[Any]) -> bytes:
    """uint8 dtype, uint8 axes, uint32 rows (1 for a single vector) and columns, the numbers row by row."""
    code = next(code for code, dtype in _DTYPES.items() if dtype == array.dtype)
    rows, columns = array.shape if array.ndim == 2 else (1, *array.shape)
    return _ARRAY.pack(code, array.ndim, rows, columns) + np.ascontiguousarray(array, _DTYPES[code]).tobytes()


def _parse_array(body: bytes, kind: VectorKind) -> NDArray[Any]:
    code, axes, rows, columns = _ARRAY.unpack_from(body)
    numbers = np.frombuffer(body, _DTYPES[code], offset=_ARRAY.size)
    if axes != _AXES[kind] or (axes == 1 and rows != 1) or (rows and not columns):
        raise ValueError(f"{axes} axes, {rows} x {columns}")
    if not np.isfinite(numbers).all():
        raise ValueError("it has numbers that are not finite")
    return numbers.reshape((rows, columns) if axes == 2 else (columns,)).copy()


def _pack_weights(weights: Mapping[str, float]) -> bytes:
    """uint32 count, the weights as float32, the tokens as a JSON list in UTF-8."""
    return b"".join(
        (
            _COUNT.pack(len(weights)),
            np.array(list(weights.values()), "<f4").tobytes(),
            json.dumps(list(weights)).encode(),
        )
    )


def _parse_weights(body: bytes) -> dict[str, float]:
    end = _COUNT.size + 4 * _COUNT.unpack_from(body)[0]
    weights = np.frombuffer(body[_COUNT.size : end], "<f4")
    tokens = parse_json(body[end:])
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ValueError("its tokens are not texts")
    if not np.isfinite(weights).all() or len(set(tokens)) != len(tokens):
        raise ValueError("it has weights that are not finite, or a token twice")
    return dict(zip(tokens, weights.tolist(), strict=True))


_ROW = struct.Struct("<dQdQQ32s")
_MOST = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class UseRow:
    """The uses of one record.

    `weight` is defined in `ragkv.store.maintenance.eviction`, `count` is the number of uses, `last` the time of the
    last recording (seconds since 1970). `tokens` and `nbytes` are the chunk's and its KV's; `owner` is the digest of
    the id of the chunk that used it last.
    """

    weight: float
    count: int
    last: float
    tokens: int
    nbytes: int
    owner: bytes

    def pack(self) -> bytes:
        return add_checksum(_ROW.pack(self.weight, self.count, self.last, self.tokens, self.nbytes, self.owner))

    @classmethod
    def parse(cls, value: Buffer) -> UseRow:
        """The row; `DamagedError` when it is not one."""
        body = verify_checksum(value)
        if len(body) != _ROW.size:
            raise DamagedError(f"it has {len(body)} bytes")
        row = cls(**dict(zip(cls.__slots__, _ROW.unpack(body), strict=True)))
        if not math.isfinite(row.weight) or abs(row.weight) > _MOST or not 0 <= row.last < _YEAR_9999:
            raise DamagedError("its weight or its time is impossible")
        if max(row.count, row.tokens, row.nbytes) > _MOST:
            raise DamagedError("its numbers are out of range")
        return row
