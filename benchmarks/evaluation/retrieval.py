"""`python -m ragkv.benchmarks.evaluation retrieval`: compare all modes of retrieval, with and without the reranker.

On the user's index the searches are those of `ragkv query`, on the questions of a file. On a benchmark's corpus the
same code searches vectors outside any index: passages are embedded but never prefilled.

A benchmark's vectors are kept in files, so that a killed run continues:

    FOLDER/<fingerprint of the embedder>/<digest of a batch's ids and texts>.{dense.npy,sparse.npz,ends.npy,colbert.npy}

A file's name depends on everything that decides its content, and the file appears complete by a rename. So a file is
never stale. Folders may be deleted at any time.

A file of questions is the one that `ragkv doctor` and `ragkv tune` read, with further keys: `"sources"` (or `"source"`,
`"document"`, `"documents"`) names documents, `"evidence"` is a passage of theirs. The relevant chunks are:

1. with documents and a text (the evidence, else the answers): the chunks of these documents that contain the text, or
   all chunks of these documents if none does, because an answer may be worded differently;
2. with documents only: all their chunks;
3. with a text only: the chunks of the whole index that contain it.

Case, white space and punctuation make no difference.
"""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from ragkv.config import MODES, NONE, Mode
from ragkv.doctor.io import FileRow, Progress, normal, question_of, rows
from ragkv.doctor.metrics import Passage, RetrievalQuestion, RetrievalTask, Search
from ragkv.errors import ConfigError, RetrievalError, UsageError
from ragkv.index.index import indexes_of, kinds_of, served, useful_kinds, why_not_served
from ragkv.index.search import Searcher
from ragkv.model.checkpoint import pick_device
from ragkv.pipeline import RagKV
from ragkv.retrievers import (
    BM25,
    DenseIndex,
    Embedder,
    Embedding,
    Reranker,
    ScoreKind,
    SparseIndex,
    embedder_modes,
    load_embedder,
    load_reranker,
)
from ragkv.store import Store
from ragkv.util.files import refusal, replace_plain

BATCH = 256
"""Passages per file, which a killed run may have to embed again."""

_SUFFIX: dict[ScoreKind, str] = {"dense": ".dense.npy", "sparse": ".sparse.npz", "colbert": ".colbert.npy"}
_ENDS = ".ends.npy"
"""(n + 1,) the end of each passage's ColBERT rows. Written before the rows, which need it."""

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
        held = BytesIO()
        write(held)
        try:
            replace_plain(self._path(name, suffix), held.getvalue())
        except OSError as error:
            raise self._unwritable(error) from error

    def _path(self, name: str, suffix: str) -> Path:
        return self._folder / f"{name}{suffix}"

    def _unwritable(self, error: OSError) -> RetrievalError:
        return RetrievalError(
            f"Vectors cannot be kept in {self._folder} ({refusal(error)}); make room, or give another --work."
        )


def _load(path: Path) -> Any:
    """The memory-mapped array of a .npy file, or all arrays of an .npz file."""
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False, mmap_mode="r")
    with path.open("rb") as file:  # given a path, numpy would leave a damaged archive open
        loaded = np.load(file, allow_pickle=False)
        return {name: loaded[name] for name in loaded.files}


def _pack_sparse(found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The batch's vocabulary as JSON, and for each weight its value and its place in the vocabulary."""
    vocabulary: dict[str, int] = {}
    places = [vocabulary.setdefault(token, len(vocabulary)) for weights in found for token in weights]
    return {
        "tokens": np.frombuffer(json.dumps(list(vocabulary)).encode(), dtype=np.uint8),
        "places": np.array(places, dtype=np.int32),
        "weights": np.array([weight for weights in found for weight in weights.values()], dtype=np.float32),
    }


def _digest(passages: Sequence[Passage]) -> str:
    """A hex digest of ids and texts. Lengths are hashed too, so that text cannot move from one to the next."""
    digest = xxhash.xxh3_128()
    for passage in passages:
        for text in (passage.passage_id, passage.text):
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
    return digest.hexdigest()


class MemoEmbedder:
    """An `Embedder` that embeds consecutive equal questions once."""

    def __init__(self, embedder: Embedder) -> None:
        self.name = embedder.name
        self.modes: frozenset[ScoreKind] = embedder.modes
        self.fingerprint = embedder.fingerprint
        self.embed_documents = embedder.embed_documents
        self.embed_query = lru_cache(1)(embedder.embed_query)


class MemoReranker:
    """A `Reranker` that scores each pair of question and text once.

    The last bits of a logit depend on the other texts of its batch, so they may differ from those without the memo.
    """

    def __init__(self, reranker: Reranker) -> None:
        self.name = reranker.name
        self._reranker = reranker
        self._question: str | None = None
        self._known: dict[str, float] = {}

    def score(self, question: str, texts: Sequence[str]) -> list[float]:
        if question != self._question:
            self._question, self._known = question, {}
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        self._known |= dict(zip(new, self._reranker.score(question, new), strict=True))
        return [self._known[text] for text in texts]


def build_searcher(
    texts: Mapping[str, str],
    *,
    vectors: Mapping[ScoreKind, Iterable[tuple[str, Any]]],
    colbert: Callable[[Sequence[str]], Mapping[str, Any]] | None = None,
    bm25: bool = False,
    embedder: Embedder | None = None,
    reranker: Reranker | None = None,
) -> Searcher:
    """Index `texts` in memory by id: `vectors` are pairs of (id, vector), dense or sparse.

    `colbert` returns the `(tokens, d)` arrays of some ids; `bm25` also builds a BM25 index.
    """
    indexes: dict[str, Any] = {}
    for kind, pairs in vectors.items():
        indexes[kind] = DenseIndex() if kind == "dense" else SparseIndex()
        indexes[kind].update(pairs, (), generation=1, embedder="")
    if bm25:
        indexes["bm25"] = BM25()
        indexes["bm25"].build(texts.items(), 1)
    return Searcher(
        embedder=embedder,
        indexes=indexes,
        texts=lambda ids: {name: texts[name] for name in ids},
        colbert=colbert or (lambda ids: {}),
        reranker=reranker,
    )


CANDIDATES = 50
"""The default number of a benchmark's passages that the reranker reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure. None means all modes, both with and without a reranker, and the index's candidates."""

    modes: Sequence[str] | None = None
    rerank: bool | None = None
    candidates: int | None = None

    def __post_init__(self) -> None:
        for mode in self.modes or ():
            if mode not in MODES:
                raise UsageError(f"--modes are any of {', '.join(MODES)}, not {mode!r}.")


def index_searches(rag: RagKV, settings: Settings) -> dict[str, Search]:
    """The searches of an index, by name."""
    modes = _modes(settings.modes, rag.index.encoders.kinds, f"the index at {rag.folder}")
    variants = _variants(settings.rerank, rag.config.reranker != NONE, "set `reranker` in the index's ragkv.toml")

    def search(mode: Mode, rerank: bool, question: str, k: int) -> list[str]:
        found = rag.retrieve(question, top_k=k, retrieval=mode, rerank=rerank, candidates=settings.candidates)
        return [each.chunk.chunk_id for each in found]

    return {_name(mode, rerank): partial(search, mode, rerank) for mode in modes for rerank in variants}


def load_models(
    settings: Settings,
    embedder: str | None,
    reranker: str | None,
    *,
    device: str | None = None,
    max_tokens: int | None = None,
) -> tuple[Embedder | None, Reranker | None]:
    """Load the models that are named. The embedder only computes the kinds of vectors that the modes need."""
    place = str(pick_device(device))
    kinds = None if settings.modes is None else _needed(settings.modes)
    if kinds and embedder and settings.modes is not None:
        kinds |= _kinds(settings.modes) & (embedder_modes(embedder) or frozenset())
    return (
        load_embedder(embedder, device=place, max_tokens=max_tokens, modes=kinds)
        if embedder and kinds != frozenset()
        else None,
        load_reranker(reranker, device=place) if reranker and settings.rerank is not False else None,
    )


def corpus_searches(
    task: RetrievalTask,
    settings: Settings,
    embedder: Embedder | None = None,
    reranker: Reranker | None = None,
    *,
    work: Path,
    on_progress: Progress | None = None,
) -> dict[str, Search]:
    """The searches of a benchmark's corpus, by name. Its vectors are made now and kept in `work`, batch by batch.

    `on_progress` counts passages. Raises RetrievalError if `work` cannot be written.
    """
    assert task.passages is not None
    what = "this run without --embedder" if embedder is None else f"embedder {embedder.name!r}"
    modes = _modes(settings.modes, () if embedder is None else embedder.modes, what)
    variants = _variants(settings.rerank, reranker is not None, "give --reranker")
    texts = {passage.passage_id: passage.text for passage in task.passages}
    vectors: dict[ScoreKind, Iterable[tuple[str, Any]]] = {}
    colbert = None
    if embedder is not None and (kinds := _kinds(modes) & embedder.modes):
        batches = Batches(work, embedder, task.passages, sorted(kinds))
        batches.embed(None if on_progress is None else lambda done, total: on_progress(done, total, embedder.name))
        readers: dict[ScoreKind, Any] = {"dense": batches.dense, "sparse": batches.sparse}
        vectors = {kind: read() for kind, read in readers.items() if kind in kinds}
        colbert = batches.colbert
    searcher = build_searcher(
        texts,
        vectors=vectors,
        colbert=colbert,
        bm25=any("bm25" in indexes_of(mode, vectors) for mode in modes),
        embedder=None if embedder is None else MemoEmbedder(embedder),
        reranker=None if reranker is None else MemoReranker(reranker),
    )
    candidates = settings.candidates or CANDIDATES

    def search(mode: Mode, rerank: bool, question: str, k: int) -> list[str]:
        found = searcher.search(question, mode=mode, top_k=k, candidates=candidates, rerank=rerank)
        return [each.chunk_id for each in found]

    return {_name(mode, rerank): partial(search, mode, rerank) for mode in modes for rerank in variants}


def _needed(modes: Iterable[str]) -> frozenset[ScoreKind]:
    return frozenset(kind for mode in modes for kind in kinds_of(cast("Mode", mode)))


def _kinds(modes: Iterable[str]) -> frozenset[ScoreKind]:
    return frozenset(kind for mode in modes for kind in useful_kinds(cast("Mode", mode)))


def _name(mode: Mode, rerank: bool) -> str:
    return f"{mode}+rerank" if rerank else mode


def _modes(wanted: Sequence[str] | None, kinds: Collection[ScoreKind], what: str) -> list[Mode]:
    """The wanted modes. Raises RetrievalError for a mode that needs other vectors than `kinds`."""
    for mode in wanted or ():
        if why := why_not_served(cast("Mode", mode), kinds, f"{what[0].upper()}{what[1:]}"):
            raise RetrievalError(why)
    return [mode for mode in served(kinds) if wanted is None or mode in wanted]


def _variants(wanted: bool | None, there: bool, remedy: str) -> list[bool]:
    if wanted and not there:
        raise RetrievalError(f"--rerank needs a reranker: {remedy}.")
    return [wanted] if wanted is not None else [False, True] if there else [False]


_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_PUNCTUATION = re.compile(r"(?<!\d)[.,:]|[.,:](?!\d)|[^\w\s.,:#%&@+$€£°=<>*/\\]|_")
"""Punctuation to ignore, except where it has a meaning: in numbers (3.5, 10:30), and in names such as C#."""


@dataclass(frozen=True, slots=True)
class Wording:
    """A text in three readings, of which one must match. `plain` only ignores case and white space.

    In `apart` punctuation separates words, in `joined` it does not: of `Oskel's well-known "U.S." mill` they are
    `oskel s well known u s mill` and `oskels wellknown us mill`.
    """

    plain: str
    apart: str
    joined: str

    @classmethod
    def of(cls, text: str) -> Wording:
        plain = normal(text)
        bare = _THOUSANDS.sub("", plain)
        return cls(plain, *(" ".join(_PUNCTUATION.sub(sign, bare).split()) for sign in (" ", "")))

    def holds(self, wanted: Wording) -> bool:
        """Whether `wanted` occurs in this text. If it is all punctuation, it must occur as it is."""
        if not wanted.joined:
            return wanted.plain in self.plain
        return wanted.plain in self.plain or wanted.apart in self.apart or wanted.joined in self.joined


_NAMES = ("sources", "source", "documents", "document")


def judged_questions(path: Path, store: Store) -> RetrievalTask:
    """The questions of a file with their relevant chunks in `store`.

    A question is unjudged if it names a document that is not in the index, or a text that no chunk contains. Raises
    ConfigError, which names file and line, and RetrievalError if no question has a relevant chunk.
    """
    lines = list(rows(path, "a JSONL file of questions"))
    if not lines:
        raise ConfigError(f'{path} holds no question; write one JSON object per line: {{"question": "…"}}.')
    chunks = _Chunks(store)
    judgements, unjudged, whole = [], [], 0
    for number, row in enumerate(lines, start=1):
        question = question_of(row)
        documents, evidence = _texts(row, _NAMES), _texts(row, ("evidence",))
        texts = question.answers if row.values.get("evidence") is None else evidence
        name = row.name("id") if "id" in row.values else str(number)
        relevant = among = chunks.of_documents(documents, row.where) if documents else None
        if texts and among != []:
            relevant = chunks.holding(texts, among)
            if not relevant and among is not None:
                relevant, whole = among, whole + 1
        if relevant:
            judgements.append(
                RetrievalQuestion(question_id=name, question=question.text, relevant=dict.fromkeys(relevant, 1.0))
            )
        else:
            unjudged.append(name)
    if not judgements:
        raise RetrievalError(
            f"No chunk of the index is relevant to any question of {path}; ingest the documents that it asks about, "
            'and name them ("sources") or give an "answer" in their words.'
        )
    notes = [f"{whole} questions judged by document alone: no chunk of it holds the answer"] if whole else []
    return RetrievalTask(name=path.stem, judgements=judgements, unjudged=unjudged, notes=notes)


def _texts(row: FileRow, keys: Sequence[str]) -> tuple[str, ...]:
    """The text or list of texts under one of `keys`. No text may be empty."""
    given = [key for key in keys if row.values.get(key) is not None]
    if len(given) > 1:
        raise ConfigError(f'{row.where}: give "{given[0]}" or "{given[1]}", not both.')
    found: Any = row.values[given[0]] if given else []
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(f'{row.where}: "{given[0]}" is a text or a list of texts, none of them empty.')
    return tuple(texts)


class _Chunks:
    """The index's chunks, with normalised texts, by document and name."""

    def __init__(self, store: Store) -> None:
        self._texts: dict[str, Wording] = {}
        self._by_document: dict[str, list[str]] = {}
        self._named: dict[str, set[str]] = {}
        for stored in store.documents():
            document = stored.document
            for name in (document.document_id, document.source):
                self._named.setdefault(name, set()).add(document.document_id)
        for chunk in store.chunks():
            self._texts[chunk.chunk_id] = Wording.of(chunk.text)
            self._by_document.setdefault(chunk.document_id, []).append(chunk.chunk_id)

    def of_documents(self, names: Sequence[str], where: str) -> list[str]:
        return [chunk for name in names for chunk in self._by_document.get(self._document(name, where), ())]

    def _document(self, name: str, where: str) -> str:
        """The id of the document with this id, source, or end of a path (in whole parts); "" if there is none."""
        ids = self._named.get(name) or set().union(
            *(found for known, found in self._named.items() if known.endswith("/" + name.removeprefix("./")))
        )
        if len(ids) > 1:
            raise ConfigError(f"{where}: the index has {len(ids)} documents {name!r}; give more of the path.")
        return next(iter(ids), "")

    def holding(self, texts: Sequence[str], among: Iterable[str] | None) -> list[str]:
        wanted = [Wording.of(text) for text in texts]
        candidates = self._texts if among is None else {chunk: self._texts[chunk] for chunk in among}
        return [chunk for chunk, text in candidates.items() if any(text.holds(each) for each in wanted)]
