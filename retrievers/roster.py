"""The chunk ids of a segment's rows, in arrays that can be mapped: opening 100,000 of them reads no text and makes no
dictionary.

An id is decoded when a hit needs it. The row of an id is found by binary search among the keys: the first 16 bytes of
the id's blake2b digest (`H` in docs/formats.md), which the store has too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self
from weakref import WeakKeyDictionary

from ragkv.retrievers.postings import mapped_array

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["KeySet", "Roster", "find_sorted", "id_key", "keys_of", "require_texts"]

_ARRAYS = {"text": "uint8", "cuts": "int64", "keys": "S16", "order": "int32"}
KEY_BYTES = 16
_CONTINUES = 0x80  # the top bits of a byte that continues a character in UTF-8, under the mask 0xC0


def id_key(chunk_id: str) -> bytes:
    """The key of a chunk id."""
    return hashlib.blake2b(chunk_id.encode("utf-8", "surrogatepass"), digest_size=32).digest()[:KEY_BYTES]


def keys_of(chunk_ids: Iterable[str]) -> NDArray[Any]:
    """The keys of chunk ids, `(ids,)` of type S16, in the order of the ids."""
    import numpy as np

    return np.frombuffer(b"".join(map(id_key, chunk_ids)), dtype="S16")


def require_texts(text: NDArray[np.uint8], cuts: NDArray[np.int64]) -> None:
    """`ValueError` unless `cuts` cut a text in UTF-8 into texts that can be decoded."""
    if not len(cuts) or cuts[0] != 0 or cuts[-1] != len(text) or (cuts[1:] < cuts[:-1]).any():
        raise ValueError("its texts are not those of its rows")
    str(text.tobytes(), "utf-8", "surrogatepass")  # `UnicodeDecodeError`, which is a `ValueError`
    begins = cuts[cuts < len(text)]
    if ((text[begins] & 0xC0) == _CONTINUES).any():
        raise ValueError("a text begins within a character")


def find_sorted(wanted: NDArray[Any], among: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the values `wanted` stand in the ascending array `among`: places in `wanted`, and places in `among`."""
    import numpy as np

    if not len(among) or not len(wanted):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    at = np.searchsorted(among, wanted)
    at[at == len(among)] = 0
    there = np.flatnonzero(among[at] == wanted)
    return there, at[there]


@dataclass(frozen=True, kw_only=True, eq=False)
class Roster:
    """`row` has the id `text[cuts[row] : cuts[row + 1]]`. `keys` are ascending; `keys[i]` is that of row `order[i]`."""

    text: NDArray[np.uint8]  # (bytes,), UTF-8
    cuts: NDArray[np.int64]  # (rows + 1,)
    keys: NDArray[Any]  # (rows,) S16
    order: NDArray[np.int32]  # (rows,)

    PARTS: ClassVar = tuple(f"{name}.npy" for name in _ARRAYS)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, row: int) -> str:
        return str(self.text[self.cuts[row] : self.cuts[row + 1]].tobytes(), "utf-8", "surrogatepass")

    @classmethod
    def of(cls, chunk_ids: Sequence[str]) -> Self:
        """The roster of ids in the order of their rows; no id may occur twice (`repeated`)."""
        import numpy as np

        encoded = [chunk_id.encode("utf-8", "surrogatepass") for chunk_id in chunk_ids]
        cuts = np.zeros(len(encoded) + 1, dtype=np.int64)
        np.cumsum([len(each) for each in encoded], out=cuts[1:])
        return cls._sorted(np.frombuffer(b"".join(encoded), dtype=np.uint8), cuts, keys_of(chunk_ids))

    @classmethod
    def joined(cls, parts: Sequence[tuple[Roster, NDArray[np.bool_]]]) -> Self:
        """The ids of several rosters, one after another, of the rows that each mask keeps."""
        import numpy as np

        texts, lengths, keys = [], [], []
        for roster, kept in parts:
            length = np.diff(roster.cuts)
            texts.append(roster.text[np.repeat(kept, length)])
            lengths.append(length[kept])
            by_row = np.empty_like(roster.keys)
            by_row[roster.order] = roster.keys
            keys.append(by_row[kept])
        cuts = np.zeros(sum(map(len, lengths)) + 1, dtype=np.int64)
        np.cumsum(np.concatenate(lengths), out=cuts[1:])
        return cls._sorted(np.concatenate(texts), cuts, np.concatenate(keys))

    @classmethod
    def _sorted(cls, text: NDArray[np.uint8], cuts: NDArray[np.int64], keys: NDArray[Any]) -> Self:
        import numpy as np

        order = np.argsort(keys, kind="stable")
        return cls(text=text, cuts=cuts, keys=keys[order], order=order.astype(np.int32))

    def repeated(self) -> str | None:
        """An id that occurs twice, if there is one."""
        import numpy as np

        same = np.flatnonzero(self.keys[1:] == self.keys[:-1])
        return self[int(self.order[same[0]])] if len(same) else None

    def rows(self, keys: NDArray[Any]) -> NDArray[np.int32]:
        """The rows with these keys; keys of other chunks are left out."""
        return self.order[find_sorted(keys, self.keys)[1]]

    def marked(self, keys: NDArray[Any]) -> NDArray[np.bool_]:
        """(rows,): which rows have one of these keys, which are ascending."""
        import numpy as np

        marked = np.zeros(len(self), dtype=np.bool_)
        # the shorter side is looked up in the longer one
        places = find_sorted(keys, self.keys)[1] if len(keys) < len(self) else find_sorted(self.keys, keys)[0]
        marked[self.order[places]] = True
        return marked

    def write(self, folder: Path, name: str) -> None:
        """Write the files `name.<part>` for all `PARTS`."""
        import numpy as np

        for part in _ARRAYS:
            np.save(folder / f"{name}.{part}.npy", getattr(self, part))

    @classmethod
    def read(cls, folder: Path, name: str) -> Self:
        """Map what `write` wrote; `ValueError` unless every row has an id that can be decoded and a key of its own."""
        import numpy as np

        self = cls(**{part: mapped_array(folder / f"{name}.{part}.npy", (kind,)) for part, kind in _ARRAYS.items()})
        rows, cuts = len(self), self.cuts
        if len(self.keys) != rows or len(cuts) != rows + 1:
            raise ValueError("its ids are not those of its rows")
        if not (self.keys[:-1] < self.keys[1:]).all():
            raise ValueError("its ids are in no order")
        if rows and (self.order.min() < 0 or self.order.max() >= rows or np.bincount(self.order).min() != 1):
            raise ValueError("its keys do not lead to each row")
        require_texts(self.text, cuts)
        return self


class KeySet:
    """A set of chunks, by the keys of their ids: those that a search may find, or an update removes.

    `keys` are ascending, each once. Questions that share one share its masks too.
    """

    def __init__(self, keys: NDArray[Any]) -> None:
        self.keys = keys
        self._masks: WeakKeyDictionary[Roster, NDArray[np.bool_]] = WeakKeyDictionary()

    @classmethod
    def of(cls, chunks: Iterable[str | bytes]) -> Self:
        """The chunks with these ids, or these digests of ids; those of no chunk do no harm."""
        import numpy as np

        keys = b"".join(id_key(each) if isinstance(each, str) else each[:KEY_BYTES] for each in chunks)
        return cls(np.unique(np.frombuffer(keys, dtype="S16")))

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, chunk_id: str) -> bool:
        return bool(len(find_sorted(keys_of([chunk_id]), self.keys)[0]))

    def mask(self, roster: Roster) -> NDArray[np.bool_]:
        """(rows,): which rows may be found. It is computed once for every roster, which never changes."""
        mask = self._masks.get(roster)
        if mask is None:
            mask = self._masks[roster] = roster.marked(self.keys)
        return mask
