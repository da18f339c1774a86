"""`ragkv verify --quick`: what can be told without the content of rows, some microseconds for each.

Pages and the checksums of all rows but KV's payloads are checked, and that the rows that belong together are there.
What looks wrong is looked at again as the whole verification does (`ragkv.store.upkeep.check`), in the same snapshot,
so that both find the same in the same words.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable

from ragkv.attention.shape import ITEM_SIZES
from ragkv.errors import CorruptStoreError
from ragkv.store.format.record import Manifest, Summary, summarise
from ragkv.store.format.row import parse_document
from ragkv.store.seal import DamagedError, unseal
from ragkv.store.tally import Tally
from ragkv.store.transaction import INDEX_OWNER, PLACE_BYTES, Transaction, document_digest, document_key
from ragkv.store.upkeep import check
from ragkv.store.upkeep.finding import Finding
from ragkv.types import Encoding

__all__ = ["UNCHECKED", "QuickCheck"]

UNCHECKED = (
    "the KV itself: whether its payloads match their checksums and can be decoded",
    "whether a chunk's row, its place and its KV are those of its id and its tokens",
    "the heads of large values, which count the pages that deleting them frees",
)
"""What a quick verification leaves out, for people."""

Rows = Iterable[Finding]
Visit = Callable[[Transaction, bytes, memoryview], Rows]


class QuickCheck:
    """The checks of one quick verification: one function per table, which gets the rows in the order of their keys."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.orphans: Counts[str] = Counts()
        self.segments = 0
        self._chunks: dict[
            bytes, tuple[bytes, int]
        ] = {}  # of documents: their key, and how many chunks are missing yet
        self._vector_key = b""  # of the part that was looked at last
        self._layouts: dict[tuple[str, bytes], tuple[int, int]] = {}  # bytes of the states, and of each token
        self._record = b""  # of the reference that was looked at last

    def tables(self) -> dict[str, Visit]:
        """By table; those that are not named need no walk of their own."""
        return {
            "documents": self._document,
            "texts": self._text,
            "chunks": self._chunk,
            "places": self._in_place,
            "kv": self._in_record,
            "references": self._reference,
            "vectors": self._vector,
        }

    def _document(self, txn: Transaction, key: bytes, value: memoryview) -> Rows:
        self.tally.count_document(key, value)
        document = document_digest(key)
        try:
            stored = parse_document(value)
        except CorruptStoreError:
            return check.in_document(txn, key)
        self._chunks[document] = key, stored.chunks
        if txn.get("texts", document) is None or document_key(stored.document.document_id) != key:
            return check.in_document(txn, key)
        return ()

    def _text(self, txn: Transaction, key: bytes, value: memoryview) -> Rows:
        if _is_sealed(value):
            return ()
        return self._again(txn, key)

    def _chunk(self, txn: Transaction, key: bytes, value: memoryview) -> Rows:
        owner, left = self._chunks.get(key[:32], (b"", 0))
        self._chunks[key[:32]] = owner, left - 1
        if _is_sealed(value):
            return ()
        return self._again(txn, key)

    def _again(self, txn: Transaction, key: bytes) -> Rows:
        """All of the document of a damaged row."""
        owner, _ = self._chunks.get(key[:32], (b"", 0))
        return check.in_document(txn, owner) if owner and txn.get("documents", owner) is not None else ()

    def incomplete(self) -> list[bytes]:
        """Keys of the documents whose chunks are not as many as they count."""
        return [key for key, left in self._chunks.values() if key and left]

    def stray(self, key: bytes) -> bool:
        """Whether a row of `texts` or `chunks` is of a document that was not there."""
        return not self._chunks.get(key[:32], (b"", 0))[0]

    def _in_place(self, txn: Transaction, key: bytes, value: memoryview) -> Rows:
        if len(value) == PLACE_BYTES and txn.get("chunks", bytes(value)) is not None:
            return ()
        return check.in_place(txn, key)

    def _in_record(self, txn: Transaction, key: bytes, value: memoryview) -> Rows:
        needed = txn.is_needed(key)
        referenced = needed or txn.is_referenced(key)
        lengths = [len(payload) for _, payload in txn.scan("segments", key)]  # the payloads are not read
        self.segments += len(lengths)
        self.orphans["records"] += not referenced
        try:
            summary = summarise(value)
        except DamagedError:
            self.tally.count_record(key, value, needed=needed)
            return (*check.in_record(txn, key, payload=False), *check.in_list(txn, key))
        self.tally.count_summary(summary, needed=needed)
        self.orphans["bytes"] += 0 if referenced else summary.stored_bytes
        self.segments -= max(0, len(lengths) - summary.segments)  # then the segments are looked at one by one
        whole: Rows = ()
        if (summary.segments, summary.stored_bytes) != (len(lengths), sum(lengths)) or not self._fits(key, summary):
            whole = tuple(check.in_record(txn, key, payload=False))
            if not whole:
                self._know(summary.layout, Manifest.parse(value))
        return (*whole, *check.in_list(txn, key, referenced=referenced))

    def _fits(self, key: bytes, summary: Summary) -> bool:
        """Whether a record lies under its key, and is as its layout, which was found right before, makes it."""
        sizes = self._layouts.get((summary.model, summary.layout))
        if sizes is None or summary.key != key or summary.encoded_at != _position(summary):
            return False
        return summary.raw_bytes == sizes[0] + len(summary.chunk_ids) // 4 * sizes[1]

    def _know(self, layout: bytes, manifest: Manifest) -> None:
        widths = sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in manifest.shapes)
        sizes = sum(state.nbytes for state in manifest.states), widths * ITEM_SIZES[manifest.dtype]
        self._layouts[manifest.identity.model, layout] = sizes

    def _reference(self, txn: Transaction, key: bytes, owner: memoryview) -> Rows:
        found: Rows = ()
        if key != self._record:
            self._record = key
            if txn.get("kv", key) is None:
                found = [finding for one in txn.values("references", key) for finding in check.in_needs(txn, one)]
        name = bytes(owner)
        if txn.has("needs", name, key) and (name == INDEX_OWNER or txn.get("places", name) is not None):
            return found
        return (*found, *(finding for finding in check.in_references(txn, key) if finding.owner == name))

    def _vector(self, txn: Transaction, key: bytes, value: memoryview) -> Rows:
        kind, place = key[:1], key[1:-4]
        before, self._vector_key = self._vector_key, key
        if key[:-4] == before[:-4]:
            whole = int.from_bytes(key[-4:], "big") == int.from_bytes(before[-4:], "big") + 1
        else:
            whole = key[-4:] == bytes(4) and len(key) == PLACE_BYTES + 5 and txn.get("chunks", place) is not None
        if whole and _is_sealed(value):
            return ()
        return check.in_vector(txn, kind, place)


def _is_sealed(value: memoryview) -> bool:
    try:
        unseal(value)
    except DamagedError:
        return False
    return True


def _position(summary: Summary) -> int:
    """Where its identity says that its first token stands."""
    if summary.encoding != Encoding.LONG:
        return len(summary.prefix_ids) // 4
    return int.from_bytes(summary.prefix_ids[-4:], "little")
