"""Postings and chunk ids of an index segment, as arrays that are memory-mapped from files.

Terms and ids are stored as the first 16 bytes of their blake2b digests (`H` in docs/formats.md), in ascending order. A
lookup is a binary search in a mapped file, merging needs no loop over terms, and opening an index of 100,000 chunks
decodes no text. An id is decoded when a hit needs it.

All row numbers are checked when a file is opened, in one pass over arrays whose checksum was just computed. numpy would
otherwise raise IndexError during a question, or read another chunk's score through a negative row number.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ragkv.util.files import open_plain

_POSTINGS_ARRAYS = {"words": ("S16",), "starts": ("int64",), "rows": ("int32",)}
_HEAD = re.compile(rb"\{'descr': '([<>|a-zA-Z0-9]{2,9})', 'fortran_order': False, 'shape': \(([0-9]{1,15}),\), \} *\n?")
"""The header that `np.save` writes for an array of one dimension. numpy parses headers by Python's own parser, which
raises errors of all kinds for hostile input."""
_BLOCK = 1 << 21  # postings that a merge moves at once


def term_hashes(words: Iterable[str]) -> NDArray[Any]:
    """The hashes of words, `(words,)` of type S16, in the order of the words."""
    hashes = (hashlib.blake2b(packed(word), digest_size=16).digest() for word in words)
    return np.frombuffer(b"".join(hashes), dtype="S16")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Postings:
    """Word `w` is in the rows `rows[starts[w] : starts[w + 1]]`, with the corresponding `numbers`."""

    words: NDArray[Any]  # (words,) S16, ascending
    starts: NDArray[np.int64]  # (words + 1,)
    rows: NDArray[np.int32]  # (postings,), ascending within a word
    numbers: NDArray[Any]  # (postings,)

    PARTS: ClassVar = tuple(f"{name}.npy" for name in (*_POSTINGS_ARRAYS, "numbers"))

    @classmethod
    def collect(
        cls, words: Sequence[str], word_of: NDArray[np.int32], rows: NDArray[np.int32], numbers: NDArray[Any]
    ) -> Self:
        """The postings of columns: the word `words[at[i]]` is in `rows[i]`. Rows are ascending within each word."""
        keys = term_hashes(words)
        order = np.argsort(keys, kind="stable")
        place = np.empty(len(keys), dtype=np.int32)
        place[order] = np.arange(len(keys), dtype=np.int32)
        word_of = place[word_of]
        starts = _starts(np.bincount(word_of, minlength=len(keys)))
        by_word = np.argsort(word_of, kind="stable")
        return cls(words=keys[order], starts=starts, rows=rows[by_word], numbers=numbers[by_word])

    @classmethod
    def merged(cls, parts: Sequence[tuple[Postings, NDArray[np.bool_]]]) -> Self:
        """Concatenate the postings of several segments, with the rows that each mask `(rows,)` keeps.

        Words without a kept row are dropped. Each posting is moved to its final place, so nothing is sorted.
        """
        counts = [part._counts(living) for part, living in parts]  # (words of the part,)
        left = [part.words[count > 0] for (part, _), count in zip(parts, counts, strict=True)]
        words = np.unique(np.concatenate(left))
        places = [np.searchsorted(words, part.words) for part, _ in parts]  # any place for dropped words
        total = np.zeros(len(words) + 1, dtype=np.int64)
        for place, count in zip(places, counts, strict=True):
            total[1:][place[count > 0]] += count[count > 0]
        starts = np.cumsum(total)
        rows = np.empty(starts[-1], dtype=np.int32)
        numbers = np.empty(starts[-1], dtype=np.result_type(*(part.numbers.dtype for part, _ in parts)))
        free, before = starts[:-1].copy(), 0
        for (part, living), place, count in zip(parts, places, counts, strict=True):
            new = (before + np.cumsum(living) - 1).astype(np.int32)  # (rows,): the number of a kept row
            used = count > 0
            to = np.zeros(len(count), dtype=np.int64)
            to[used] = free[place[used]]
            part._move(living, new, to, count, rows, numbers)
            free[place[used]] += count[used]
            before += int(np.count_nonzero(living))
        return cls(words=words, starts=starts, rows=rows, numbers=numbers)

    def _blocks(self) -> Iterator[tuple[slice, slice, NDArray[np.int64]]]:
        """Runs of words of about `_BLOCK` postings: the words, their postings, and the cuts between these."""
        last = len(self.words)
        bounds = np.searchsorted(self.starts, np.arange(0, len(self.rows), _BLOCK), side="right") - 1
        for low, high in pairwise([*np.unique(bounds).tolist(), last]):
            cuts = self.starts[low : high + 1]
            yield slice(low, high), slice(cuts[0], cuts[-1]), cuts - cuts[0]

    def _counts(self, living: NDArray[np.bool_]) -> NDArray[np.int64]:
        """(words,): the number of postings of each word in kept rows."""
        counts = np.diff(self.starts)
        if not living.all():
            for words, postings, cuts in self._blocks():
                there = np.zeros(cuts[-1] + 1, dtype=np.int64)
                np.cumsum(living[self.rows[postings]], out=there[1:])
                counts[words] = np.diff(there[cuts])
        return counts

    def _move(
        self,
        living: NDArray[np.bool_],
        new: NDArray[np.int32],
        to: NDArray[np.int64],
        count: NDArray[np.int64],
        rows: NDArray[np.int32],
        numbers: NDArray[Any],
    ) -> None:
        """Write the postings of kept rows to `rows` and `numbers`, the `count[w]` ones of word `w` from `to[w]` on."""
        for words, postings, _ in self._blocks():
            there = living[self.rows[postings]]
            each = count[words]
            ends = np.cumsum(each)
            places = np.repeat(to[words] - (ends - each), each) + np.arange(ends[-1] if len(ends) else 0)
            rows[places] = new[self.rows[postings][there]]
            numbers[places] = self.numbers[postings][there]

    def find(self, keys: NDArray[Any]) -> list[slice]:
        """The slice of postings of each word key, empty for an unknown word."""
        if not len(self.words):
            return [slice(0, 0)] * len(keys)
        at = np.searchsorted(self.words, keys)
        at[at == len(self.words)] = 0
        there = self.words[at] == keys
        low, high = np.where(there, self.starts[at], 0), np.where(there, self.starts[at + 1], 0)
        return list(map(slice, low.tolist(), high.tolist()))

    def write(self, folder: Path, name: str) -> None:
        """Write the files `name.<part>` for all `PARTS`."""
        for part in (*_POSTINGS_ARRAYS, "numbers"):
            np.save(folder / f"{name}.{part}.npy", getattr(self, part))

    @classmethod
    def read(cls, folder: Path, name: str, rows: int, numbers: tuple[str, ...]) -> Self:
        """Map what `write` wrote, with numbers of one of these types.

        `ValueError` unless every word has postings, and all their rows are below `rows`.
        """
        kinds = {**_POSTINGS_ARRAYS, "numbers": numbers}
        self = cls(**{part: mapped_array(folder / f"{name}.{part}.npy", kind) for part, kind in kinds.items()})
        starts, there = self.starts, self.rows
        if len(starts) != len(self.words) + 1 or starts[0] != 0 or starts[-1] != len(there):
            raise ValueError("its postings are not those of its words")
        if (starts[1:] < starts[:-1]).any() or not (self.words[:-1] < self.words[1:]).all():
            raise ValueError("its words are in no order")
        if len(self.numbers) != len(there):
            raise ValueError("its postings have other numbers than they should")
        if len(there) and not (there.min() >= 0 and there.max() < rows and np.isfinite(self.numbers).all()):
            raise ValueError("its postings are of chunks that it does not have")
        return self


def best_rows(
    scores: NDArray[np.float32], k: int, allowed: NDArray[np.bool_] | None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The rows with the best `k` scores above 0 and all ties with the last of them, with their scores.

    `scores` is overwritten unless all rows are `allowed`.
    """
    if allowed is not None:
        scores *= allowed
    least = np.partition(scores, -k)[-k] if k < len(scores) else np.float32(0)
    found = np.flatnonzero(scores >= least if least > 0 else scores > 0)
    return found, scores[found]


def mapped_array(path: Path, kinds: tuple[str, ...]) -> NDArray[Any]:
    """Map the one-dimensional array in a .npy file; `ValueError` unless its type is one of `kinds`, such as "int32".

    The result is a plain array over the map, because slicing a `np.memmap` takes ten times longer.
    """
    with os.fdopen(open_plain(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{path.name} is an array of another version")
        head = _HEAD.fullmatch(file.read(int.from_bytes(file.read(2), "little")))
        known = {np.dtype(kind).str: np.dtype(kind) for kind in kinds}
        if head is None or head[1].decode() not in known:
            raise ValueError(f"{path.name} holds another array than it should")
        dtype, length = known[head[1].decode()], int(head[2])
        if file.tell() + length * dtype.itemsize != size:
            raise ValueError(f"{path.name} does not hold the numbers that it says")
        if not length:  # nothing to map
            return np.empty(0, dtype)
        return np.asarray(np.memmap(file, dtype, mode="r", offset=file.tell(), shape=(length,)))


_ARRAYS = {"keys": "S16", "order": "int32"}
KEY_BYTES = 16
_CONTINUES = 0x80  # the top bits of a byte that continues a character in UTF-8, under the mask 0xC0


def id_key(chunk_id: str) -> bytes:
    """The key of a chunk id."""
    return hashlib.blake2b(packed(chunk_id), digest_size=32).digest()[:KEY_BYTES]


def keys_of(chunk_ids: Iterable[str]) -> NDArray[Any]:
    """The keys of chunk ids, `(ids,)` of type S16, in the order of the ids."""
    return np.frombuffer(b"".join(map(id_key, chunk_ids)), dtype="S16")


def packed(text: str) -> bytes:
    """The UTF-8 of a text, in which a lone surrogate, as of a file name, is kept."""
    return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True, eq=False)
class Texts(Sequence[bytes]):
    """Concatenated texts in UTF-8: text `at` is `text[cuts[at] : cuts[at + 1]]`."""

    text: NDArray[np.uint8]
    cuts: NDArray[np.int64]

    PARTS: ClassVar = ("text.npy", "cuts.npy")

    @classmethod
    def of(cls, texts: Sequence[bytes]) -> Self:
        return cls(np.frombuffer(b"".join(texts), dtype=np.uint8), _starts([len(text) for text in texts]))

    @classmethod
    def joined(cls, parts: Sequence[tuple[Texts, NDArray[np.bool_]]]) -> Self:
        """Concatenate several, with the texts that each mask keeps."""
        lengths = [np.diff(texts.cuts) for texts, _ in parts]
        bodies = [texts.text[np.repeat(kept, length)] for (texts, kept), length in zip(parts, lengths, strict=True)]
        sizes = [length[kept] for (_, kept), length in zip(parts, lengths, strict=True)]
        return cls(np.concatenate(bodies), _starts(np.concatenate(sizes)))

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def __getitem__(self, at: Any) -> Any:
        return self.text[self.cuts[at] : self.cuts[at + 1]].tobytes()

    def many(self, low: int, high: int) -> list[bytes]:
        """The texts from `low` up to `high`."""
        cuts = self.cuts[low : high + 1].tolist()
        whole = self.text[cuts[0] : cuts[-1]].tobytes()
        return [whole[start - cuts[0] : end - cuts[0]] for start, end in pairwise(cuts)]

    def write(self, folder: Path, name: str) -> None:
        """Write the files `name.<part>` for all `PARTS`."""
        np.save(folder / f"{name}.text.npy", self.text)
        np.save(folder / f"{name}.cuts.npy", self.cuts)

    @classmethod
    def read(cls, folder: Path, name: str) -> Self:
        """Map what `write` wrote; `ValueError` unless each text can be decoded."""
        text = mapped_array(folder / f"{name}.text.npy", ("uint8",))
        cuts = mapped_array(folder / f"{name}.cuts.npy", ("int64",))
        if not len(cuts) or cuts[0] != 0 or cuts[-1] != len(text) or (cuts[1:] < cuts[:-1]).any():
            raise ValueError("its texts are not those of its rows")
        str(text.tobytes(), "utf-8", "surrogatepass")  # `UnicodeDecodeError`, which is a `ValueError`
        begins = cuts[cuts < len(text)]
        if ((text[begins] & 0xC0) == _CONTINUES).any():
            raise ValueError("a text begins within a character")
        return cls(text, cuts)


def _starts(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of several parts begins, and the end."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def find_sorted(wanted: NDArray[Any], among: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the values `wanted` in the ascending array `among`: their indices in `wanted` and in `among`."""
    if not len(among) or not len(wanted):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    at = np.searchsorted(among, wanted)
    at[at == len(among)] = 0
    there = np.flatnonzero(among[at] == wanted)
    return there, at[there]


@dataclass(frozen=True, kw_only=True, eq=False)
class IdTable:
    """The ids of rows. `keys` are ascending; `keys[i]` is that of row `order[i]`."""

    texts: Texts
    keys: NDArray[Any]  # (rows,) S16
    order: NDArray[np.int32]  # (rows,)

    PARTS: ClassVar = (*Texts.PARTS, *(f"{name}.npy" for name in _ARRAYS))

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, row: int) -> str:
        return str(self.texts[row], "utf-8", "surrogatepass")

    @classmethod
    def of(cls, chunk_ids: Sequence[str]) -> Self:
        """The table of these ids, one per row; no id may occur twice (`repeated`)."""
        return cls._sorted(Texts.of(list(map(packed, chunk_ids))), keys_of(chunk_ids))

    @classmethod
    def joined(cls, parts: Sequence[tuple[IdTable, NDArray[np.bool_]]]) -> Self:
        """Concatenate several tables, with the rows that each mask keeps."""
        keys = []
        for id_table, living in parts:
            by_row = np.empty_like(id_table.keys)
            by_row[id_table.order] = id_table.keys
            keys.append(by_row[living])
        return cls._sorted(Texts.joined([(table.texts, living) for table, living in parts]), np.concatenate(keys))

    @classmethod
    def _sorted(cls, texts: Texts, keys: NDArray[Any]) -> Self:
        order = np.argsort(keys, kind="stable")
        return cls(texts=texts, keys=keys[order], order=order.astype(np.int32))

    def repeated(self) -> str | None:
        """An id that occurs twice, or None."""
        same = np.flatnonzero(self.keys[1:] == self.keys[:-1])
        return self[int(self.order[same[0]])] if len(same) else None

    def rows(self, keys: NDArray[Any]) -> NDArray[np.int32]:
        """The rows with these keys; unknown keys are ignored."""
        return self.order[find_sorted(keys, self.keys)[1]]

    def marked(self, keys: NDArray[Any]) -> NDArray[np.bool_]:
        """(rows,): which rows have one of these ascending keys."""
        marked = np.zeros(len(self), dtype=np.bool_)
        # look up the shorter side in the longer one
        places = find_sorted(keys, self.keys)[1] if len(keys) < len(self) else find_sorted(self.keys, keys)[0]
        marked[self.order[places]] = True
        return marked

    def write(self, folder: Path, name: str) -> None:
        """Write the files `name.<part>` for all `PARTS`."""
        self.texts.write(folder, name)
        for part in _ARRAYS:
            np.save(folder / f"{name}.{part}.npy", getattr(self, part))

    @classmethod
    def read(cls, folder: Path, name: str) -> Self:
        """Map what `write` wrote; `ValueError` unless each row has a decodable id and its own key."""
        keys, order = (mapped_array(folder / f"{name}.{part}.npy", (kind,)) for part, kind in _ARRAYS.items())
        self = cls(texts=Texts.read(folder, name), keys=keys, order=order)
        rows = len(self)
        if len(keys) != rows or len(self.texts) != rows:
            raise ValueError("its ids are not those of its rows")
        if not (keys[:-1] < keys[1:]).all():
            raise ValueError("its ids are in no order")
        if rows and (order.min() < 0 or order.max() >= rows or np.bincount(order).min() != 1):
            raise ValueError("its keys do not lead to each row")
        return self


class IdSet:
    """A set of chunks, by the keys of their ids: those that a search may find, or an update removes.

    `keys` are ascending and unique. Questions that share a set share its cached masks. `terms` are the conditions that
    gave the set, for an index that filters by them itself: a document has one of each list (`retrievers/qdrant.py`).
    """

    terms: Callable[[], list[list[str]]] | None = None

    def __init__(self, keys: NDArray[Any]) -> None:
        self.keys = keys
        self._masks: WeakKeyDictionary[IdTable, NDArray[np.bool_]] = WeakKeyDictionary()

    @classmethod
    def of(cls, chunks: Iterable[str | bytes]) -> Self:
        """The chunks with these ids or digests of ids; unknown ones are ignored by `mask`."""
        keys = b"".join(id_key(each) if isinstance(each, str) else each[:KEY_BYTES] for each in chunks)
        return cls(np.unique(np.frombuffer(keys, dtype="S16")))

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, chunk_id: str) -> bool:
        return bool(len(find_sorted(keys_of([chunk_id]), self.keys)[0]))

    def mask(self, id_table: IdTable) -> NDArray[np.bool_]:
        """(rows,): which rows of the table are in the set; cached per table, which never changes."""
        mask = self._masks.get(id_table)
        if mask is None:
            mask = self._masks[id_table] = id_table.marked(self.keys)
        return mask
