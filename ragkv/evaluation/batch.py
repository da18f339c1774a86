"""Embed a benchmark's passages batch by batch into files, so that a killed run continues.

    FOLDER/<fingerprint of the embedder>/<digest of a batch's ids and texts>.{dense.npy,sparse.npz,ends.npy,colbert.npy}

A file's name depends on everything that decides its content, and the file appears complete by a rename. So a file is
never stale, and no other record is needed: another embedder or a changed passage gives other names. Folders may be
deleted at any time; they only save time.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ragkv.errors import RetrievalError
from ragkv.evaluation.judgement import Passage
from ragkv.retrievers import Embedder, Embedding, ScoreKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BATCH", "Batches"]

BATCH = 256
"""Passages per file, which a killed run may have to embed again."""

_SUFFIX: dict[ScoreKind, str] = {"dense": ".dense.npy", "sparse": ".sparse.npz", "colbert": ".colbert.npy"}
_ENDS = ".ends.npy"
"""(n + 1,) the ends of each passage's ColBERT rows. Written before the rows, which need it."""

_DAMAGE = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile)

logger = logging.getLogger(__name__)


class Batches:
    """The vectors of a corpus. `embed` makes the missing files; then each kind of vector can be read.

    ColBERT rows are float16 and memory-mapped, because a passage of 100 tokens has 200 KB of them at 1024 dimensions.
    """

    def __init__(
        self,
        folder: Path,
        embedder: Embedder,
        passages: Sequence[Passage],
        kinds: Sequence[ScoreKind],
        *,
        batch: int = BATCH,
    ) -> None:
        self._folder = folder / embedder.fingerprint[:32]
        self._embedder = embedder
        self._kinds = [kind for kind in _SUFFIX if kind in kinds]
        self._batches = [passages[start : start + batch] for start in range(0, len(passages), batch)]
        self._names = [_digest(found) for found in self._batches]
        self._rows: dict[str, tuple[Any, int, int]] | None = None  # ColBERT's: (batch's rows, start, end)

    def embed(self, on_progress: Callable[[int, int], None] | None = None) -> int:
        """Embed the batches that lack a file, and return how many passages they have.

        `on_progress` receives the passages that are done and their total. Raises RetrievalError if the folder cannot be
        written.
        """
        total, done, made = sum(map(len, self._batches)), 0, 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        for name, passages in zip(self._names, self._batches, strict=True):
            missing = [kind for kind in self._kinds if not self._whole(kind, name, len(passages))]
            if missing:
                embedding = self._embedder.embed_documents([passage.text for passage in passages])
                for kind in missing:
                    self._write(kind, name, embedding, len(passages))
                made += len(passages)
            done += len(passages)
            if on_progress is not None:
                on_progress(done, total)
        return made

    def dense(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """(passage id, vector `(d,)`) of every passage, in the order of the corpus."""
        for number, loaded in self._read("dense"):
            yield from zip((passage.passage_id for passage in self._batches[number]), loaded, strict=True)

    def sparse(self) -> Iterator[tuple[str, Mapping[str, float]]]:
        """(passage id, token to weight) of every passage."""
        for number, loaded in self._read("sparse"):
            words = json.loads(loaded["tokens"].tobytes())
            for passage, (start, end) in zip(self._batches[number], pairwise(loaded["ends"].tolist()), strict=True):
                places, weights = loaded["places"][start:end].tolist(), loaded["weights"][start:end].tolist()
                yield passage.passage_id, {words[i]: weight for i, weight in zip(places, weights, strict=True)}

    def colbert(self, passage_ids: Sequence[str]) -> dict[str, NDArray[np.float16]]:
        """The rows `(tokens, d)` of some passages. The first call opens all files."""
        if self._rows is None:
            ends = dict(self._read("colbert", _ENDS))
            self._rows = {
                passage.passage_id: (rows, start, end)
                for number, rows in self._read("colbert")
                for passage, (start, end) in zip(self._batches[number], pairwise(ends[number].tolist()), strict=True)
            }
        return {name: rows[start:end] for name in passage_ids for rows, start, end in [self._rows[name]]}

    def _read(self, kind: ScoreKind, suffix: str | None = None) -> Iterator[tuple[int, Any]]:
        """(number of the batch, content of its file)."""
        for number, name in enumerate(self._names):
            path = self._path(name, suffix or _SUFFIX[kind])
            try:
                yield number, _load(path)
            except _DAMAGE as error:
                raise RetrievalError(
                    f"{path} cannot be read ({error}); delete it and run the command again."
                ) from error

    def _whole(self, kind: ScoreKind, name: str, count: int) -> bool:
        """Whether the file exists and has `count` passages. A damaged file counts as missing."""
        path = self._path(name, _SUFFIX[kind])
        if not path.exists():
            return False
        try:
            loaded = _load(path)
            if kind == "dense":
                return len(loaded) == count
            ends = loaded["ends"] if kind == "sparse" else _load(self._path(name, _ENDS))
            rows = loaded["weights"] if kind == "sparse" else loaded
            return len(ends) == count + 1 and int(ends[-1]) == len(rows)
        except _DAMAGE as error:
            logger.warning("%s is damaged and embedded again: %s", path, error)
            return False

    def _write(self, kind: ScoreKind, name: str, embedding: Embedding, count: int) -> None:
        import numpy as np

        found = getattr(embedding, kind)
        if found is None or len(found) != count:
            raise RetrievalError(
                f"The embedder {self._embedder.name} gave {0 if found is None else len(found)} {kind} vectors for "
                f"{count} passages; choose other --modes, or another --embedder."
            )
        ends = np.cumsum([0, *map(len, found)], dtype=np.int64)
        if kind == "dense":
            self._save(name, _SUFFIX[kind], lambda file: np.save(file, np.asarray(found, dtype=np.float32)))
        elif kind == "sparse":
            self._save(name, _SUFFIX[kind], lambda file: np.savez(file, ends=ends, **_pack_sparse(found)))
        else:
            rows = np.concatenate([np.asarray(each, dtype=np.float16) for each in found])  # (all tokens, d)
            self._save(name, _ENDS, lambda file: np.save(file, ends))
            self._save(name, _SUFFIX[kind], lambda file: np.save(file, rows))

    def _save(self, name: str, suffix: str, write: Callable[[IO[bytes]], object]) -> None:
        path = self._path(name, suffix)
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        try:
            with fresh.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise self._unwritable(error) from error

    def _path(self, name: str, suffix: str) -> Path:
        return self._folder / f"{name}{suffix}"

    def _unwritable(self, error: OSError) -> RetrievalError:
        return RetrievalError(f"Vectors cannot be kept in {self._folder} ({error}); make room, or give another --work.")


def _load(path: Path) -> Any:
    """The memory-mapped array of a .npy file, or all arrays of an .npz file."""
    import numpy as np

    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False, mmap_mode="r")
    with path.open("rb") as file:  # given a path, numpy would leave a damaged archive open
        loaded = np.load(file, allow_pickle=False)
        return {name: loaded[name] for name in loaded.files}


def _pack_sparse(found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The batch's vocabulary as JSON, and for each weight its value and its place in the vocabulary."""
    import numpy as np

    vocabulary: dict[str, int] = {}
    places = [vocabulary.setdefault(token, len(vocabulary)) for weights in found for token in weights]
    return {
        "tokens": np.frombuffer(json.dumps(list(vocabulary)).encode(), dtype=np.uint8),
        "places": np.array(places, dtype=np.int32),
        "weights": np.array([weight for weights in found for weight in weights.values()], dtype=np.float32),
    }


def _digest(passages: Sequence[Passage]) -> str:
    """A hex digest of ids and texts. Lengths are hashed too, so that text cannot move from one to the next."""
    import xxhash

    digest = xxhash.xxh3_128()
    for passage in passages:
        for text in (passage.passage_id, passage.text):
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
    return digest.hexdigest()
