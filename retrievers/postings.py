"""Postings: for each word, the rows that have it, each with a number: a weight, or how often the word occurs.

Words are kept as the first 16 bytes of their blake2b digests, in ascending order. So a word is found by binary search
in a file that is mapped and not read, segments are merged without a loop over words, and no text stands in the files.

numpy would use whatever rows a file names: a row that does not exist is an `IndexError` during a question, and a
negative one is the score of another chunk. So they are checked when they are opened, in one pass over arrays that were
just read for their checksum.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ragkv.boundary.plainfile import open_plain

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Postings", "best_rows", "mapped_array", "word_keys"]

_ARRAYS = {"words": ("S16",), "starts": ("int64",), "rows": ("int32",)}
_BLOCK = 1 << 21  # postings that are moved at once when segments are merged


def word_keys(words: Iterable[str]) -> NDArray[Any]:
    """The keys of words, `(words,)` of type S16, in their order."""
    import numpy as np

    made = (hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=16).digest() for word in words)
    return np.frombuffer(b"".join(made), dtype="S16")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Postings:
    """Word `w` is in the rows `rows[starts[w] : starts[w + 1]]`, with the `numbers` at the same places."""

    words: NDArray[Any]  # (words,) S16, ascending
    starts: NDArray[np.int64]  # (words + 1,)
    rows: NDArray[np.int32]  # (postings,), ascending within a word
    numbers: NDArray[Any]  # (postings,)

    PARTS: ClassVar = tuple(f"{name}.npy" for name in (*_ARRAYS, "numbers"))

    @classmethod
    def collect(
        cls, words: Sequence[str], at: NDArray[np.int32], rows: NDArray[np.int32], numbers: NDArray[Any]
    ) -> Self:
        """The postings of columns: the word `words[at[i]]` is in `rows[i]`. Rows are ascending within each word."""
        import numpy as np

        keys = word_keys(words)
        order = np.argsort(keys, kind="stable")
        place = np.empty(len(keys), dtype=np.int32)
        place[order] = np.arange(len(keys), dtype=np.int32)
        at = place[at]
        starts = np.zeros(len(keys) + 1, dtype=np.int64)
        np.cumsum(np.bincount(at, minlength=len(keys)), out=starts[1:])
        by_word = np.argsort(at, kind="stable")
        return cls(words=keys[order], starts=starts, rows=rows[by_word], numbers=numbers[by_word])

    @classmethod
    def merged(cls, parts: Sequence[tuple[Postings, NDArray[np.bool_]]]) -> Self:
        """The postings of several segments, one after another, of the rows that each mask `(rows,)` keeps.

        Words that no kept row has are left out. Each posting is moved to its place, so that nothing is sorted.
        """
        import numpy as np

        counts = [part._counts(kept) for part, kept in parts]  # (words of the part,)
        left = [part.words[count > 0] for (part, _), count in zip(parts, counts, strict=True)]
        words = np.unique(np.concatenate(left))
        places = [np.searchsorted(words, part.words) for part, _ in parts]  # of words that are left out, any place
        total = np.zeros(len(words) + 1, dtype=np.int64)
        for place, count in zip(places, counts, strict=True):
            total[1:][place[count > 0]] += count[count > 0]
        starts = np.cumsum(total)
        rows = np.empty(starts[-1], dtype=np.int32)
        numbers = np.empty(starts[-1], dtype=np.result_type(*(part.numbers.dtype for part, _ in parts)))
        free, before = starts[:-1].copy(), 0
        for (part, kept), place, count in zip(parts, places, counts, strict=True):
            new = (before + np.cumsum(kept) - 1).astype(np.int32)  # (rows,): the number of a kept row
            used = count > 0
            to = np.zeros(len(count), dtype=np.int64)
            to[used] = free[place[used]]
            part._move(kept, new, to, count, rows, numbers)
            free[place[used]] += count[used]
            before += int(np.count_nonzero(kept))
        return cls(words=words, starts=starts, rows=rows, numbers=numbers)

    def _blocks(self) -> Iterator[tuple[slice, slice, NDArray[np.int64]]]:
        """Runs of words of about `_BLOCK` postings: the words, their postings, and the cuts between these."""
        import numpy as np

        last = len(self.words)
        bounds = np.searchsorted(self.starts, np.arange(0, len(self.rows), _BLOCK), side="right") - 1
        for low, high in pairwise([*np.unique(bounds).tolist(), last]):
            cuts = self.starts[low : high + 1]
            yield slice(low, high), slice(cuts[0], cuts[-1]), cuts - cuts[0]

    def _counts(self, kept: NDArray[np.bool_]) -> NDArray[np.int64]:
        """(words,): how many postings of each word are of kept rows."""
        import numpy as np

        counts = np.diff(self.starts)
        if not kept.all():
            for words, postings, cuts in self._blocks():
                there = np.zeros(cuts[-1] + 1, dtype=np.int64)
                np.cumsum(kept[self.rows[postings]], out=there[1:])
                counts[words] = np.diff(there[cuts])
        return counts

    def _move(
        self,
        kept: NDArray[np.bool_],
        new: NDArray[np.int32],
        to: NDArray[np.int64],
        count: NDArray[np.int64],
        rows: NDArray[np.int32],
        numbers: NDArray[Any],
    ) -> None:
        """Write the postings of kept rows to `rows` and `numbers`, the `count[w]` ones of word `w` from `to[w]` on."""
        import numpy as np

        for words, postings, _ in self._blocks():
            there = kept[self.rows[postings]]
            each = count[words]
            ends = np.cumsum(each)
            places = np.repeat(to[words] - (ends - each), each) + np.arange(ends[-1] if len(ends) else 0)
            rows[places] = new[self.rows[postings][there]]
            numbers[places] = self.numbers[postings][there]

    def find(self, keys: NDArray[Any]) -> list[slice]:
        """For each word key, where its postings are; an empty slice for a word that no row has."""
        import numpy as np

        if not len(self.words):
            return [slice(0, 0)] * len(keys)
        at = np.searchsorted(self.words, keys)
        at[at == len(self.words)] = 0
        there = self.words[at] == keys
        low, high = np.where(there, self.starts[at], 0), np.where(there, self.starts[at + 1], 0)
        return list(map(slice, low.tolist(), high.tolist()))

    def write(self, folder: Path, name: str) -> None:
        """Write the files `name.<part>` for all `PARTS`."""
        import numpy as np

        for part in (*_ARRAYS, "numbers"):
            np.save(folder / f"{name}.{part}.npy", getattr(self, part))

    @classmethod
    def read(cls, folder: Path, name: str, rows: int, numbers: tuple[str, ...]) -> Self:
        """Map what `write` wrote, with numbers of one of these types.

        `ValueError` unless every word has postings of its own, and all of them are of rows below `rows`.
        """
        import numpy as np

        kinds = {**_ARRAYS, "numbers": numbers}
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
    """The rows with the best `k` scores above 0, and all that tie with the last of them, with their scores.

    `scores` is written over when not all rows are `allowed`.
    """
    import numpy as np

    if allowed is not None:
        scores *= allowed
    least = np.partition(scores, -k)[-k] if k < len(scores) else np.float32(0)
    found = np.flatnonzero(scores >= least if least > 0 else scores > 0)
    return found, scores[found]


def mapped_array(path: Path, kinds: tuple[str, ...]) -> NDArray[Any]:
    """Map the one-dimensional array in a .npy file; `ValueError` unless its type is one of `kinds`, such as "int32".

    The result is a plain array over the map, because slicing a `np.memmap` takes ten times longer.
    """
    import numpy as np

    with os.fdopen(open_plain(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{path.name} is an array of another version")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        # Check the shape here, because numpy's own product of a shape can overflow.
        if len(shape) != 1 or dtype not in [np.dtype(kind) for kind in kinds]:
            raise ValueError(f"{path.name} holds another array than it should")
        if file.tell() + shape[0] * dtype.itemsize != size:
            raise ValueError(f"{path.name} does not hold the numbers that it says")
        if not shape[0]:  # nothing to map
            return np.empty(0, dtype)
        return np.asarray(np.memmap(file, dtype, mode="r", offset=file.tell(), shape=shape))
