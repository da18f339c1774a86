"""How well an index finds: recall and MRR of every mode of retrieval, where a file of questions names gold passages.

A question of the file is relevant to chunks by `"sources"` (or `"source"`, `"document"`, `"documents"`), which names
documents, and by `"evidence"`, a passage of theirs:

1. with documents and a text (the evidence, else the answers): the chunks of these documents that contain the text, or
   all chunks of these documents if none does, because an answer may be worded differently;
2. with documents only: all their chunks;
3. with a text only: the chunks of the whole index that contain it.

Case, white space and punctuation make no difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from ragkv.config import MODES, NONE, Mode
from ragkv.doctor.questions import FileRow, Progress, draw_sample, normal, question_of, question_rows, rows
from ragkv.doctor.verdicts import MetricValue, share_interval
from ragkv.errors import ConfigError, RetrievalError, UsageError
from ragkv.index.index import served, why_not_served
from ragkv.retrievers import ScoreKind

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV
    from ragkv.store import Store

_DOCUMENTS = ("sources", "source", "documents", "document")
GOLD = (*_DOCUMENTS, "evidence")
"""The keys by which a line of a file of questions names gold passages."""
DEPTHS = (1, 5, 10)
"""The values of k in recall@k."""


def names_gold(path: Path) -> bool:
    """Whether a line of a file of questions names gold passages."""
    return any(row.values.get(key) for row in rows(path, "a JSONL file of questions") for key in GOLD)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalQuestion:
    """A question, and the ids of the passages or chunks that are relevant to it, with grades above 0.

    `excluded` is a passage that is removed from every ranking: the question itself, if the corpus contains it.
    """

    question_id: str
    question: str
    relevant: Mapping[str, float]
    excluded: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalTask:
    """A set of questions with known relevant ids.

    `unjudged` are the ids of questions without a relevant passage, for which no measure is defined. `passages` is a
    benchmark's corpus by id, or None if it is the user's index. `notes` are sentences that a reader of the figures must
    know.
    """

    name: str
    judgements: Sequence[RetrievalQuestion]
    unjudged: Sequence[str] = ()
    passages: Mapping[str, str] | None = None
    notes: Sequence[str] = ()

    def sample(self, limit: int | None, seed: int) -> Self:
        """A copy with at most `limit` judged questions, drawn by `seed`, in their order. The corpus stays complete."""
        if limit is None or len(self.judgements) <= limit:
            return self
        note = f"{limit} of {len(self.judgements)} judged questions, drawn by seed {seed}"
        return replace(self, judgements=draw_sample(self.judgements, limit, seed), notes=[*self.notes, note])


Search: TypeAlias = Callable[[str, int], Sequence[str]]
"""A function from (question, k) to at most `k` distinct ids, best first."""
Measure: TypeAlias = Callable[[Sequence[str], Mapping[str, float]], float]
"""A function from a ranking, which holds each id once, and the grades of the relevant ids to a number in [0, 1]."""


def recall_at(k: int, ranked: Sequence[str], relevant: Mapping[str, float]) -> float:
    """The share of all relevant ids among the first `k`. If R > k ids are relevant, it is at most k / R (trec_eval)."""
    return sum(each in relevant for each in ranked[:k]) / len(relevant)


def reciprocal_rank(k: int, ranked: Sequence[str], relevant: Mapping[str, float]) -> float:
    """1 / rank of the first relevant id, or 0.0 if none is among the first `k`."""
    return next((1 / rank for rank, each in enumerate(ranked[:k], start=1) if each in relevant), 0.0)


def measured(
    task: RetrievalTask,
    searches: Mapping[str, Search],
    measures: Mapping[str, Measure],
    depth: int,
    *,
    on_progress: Progress | None = None,
) -> dict[tuple[str, str], list[float]]:
    """Each measure of the first `depth` results, by search and measure, question by question.

    Questions are the outer loop, so that searches that share an embedder embed each question once. A ranking may be
    shorter, if the search found nothing more.
    """
    values: dict[tuple[str, str], list[float]] = {(name, metric): [] for name in searches for metric in measures}
    for done, judgement in enumerate(task.judgements):
        for name, search in searches.items():
            if on_progress is not None:
                on_progress(done, len(task.judgements), name)
            ranked = [
                each
                for each in search(judgement.question, depth + (judgement.excluded is not None))
                if each != judgement.excluded
            ][:depth]
            for metric, measure in measures.items():
                values[name, metric].append(measure(ranked, judgement.relevant))
    if on_progress is not None:
        on_progress(len(task.judgements), len(task.judgements), "")
    return values


def index_searches(
    rag: RagKV, modes: Sequence[str] | None = None, *, rerank: bool | None = None, candidates: int | None = None
) -> dict[str, Search]:
    """The searches of an index, by name: in these modes (None: all that it serves), with and without its reranker."""

    def search(mode: Mode, rerank: bool, question: str, k: int) -> list[str]:
        hits = rag.retrieve(question, top_k=k, retrieval=mode, rerank=rerank, candidates=candidates)
        return [hit.chunk.chunk_id for hit in hits]

    return {
        name: partial(search, mode, reranked)
        for name, mode, reranked in variants(
            modes,
            rerank,
            rag.index.encoders.kinds,
            f"The index at {rag.folder}",
            reranker=rag.config.reranker != NONE,
            remedy="set `reranker` in the index's ragkv.toml",
        )
    }


def variants(
    modes: Sequence[str] | None,
    rerank: bool | None,
    kinds: Collection[ScoreKind],
    what: str,
    *,
    reranker: bool,
    remedy: str,
) -> list[tuple[str, Mode, bool]]:
    """(name, mode, whether to rerank) of the wanted searches; None: all modes, both with and without a reranker.

    Raises RetrievalError for a mode that needs other vectors than the `kinds` of `what`, and without a reranker.
    """
    for mode in modes or ():
        if mode not in MODES:
            raise UsageError(f"--modes are any of {', '.join(MODES)}, not {mode!r}.")
        if why := why_not_served(mode, kinds, what):
            raise RetrievalError(why)
    if rerank and not reranker:
        raise RetrievalError(f"--rerank needs a reranker: {remedy}.")
    reranks = [rerank] if rerank is not None else [False, True] if reranker else [False]
    chosen = [mode for mode in served(kinds) if modes is None or mode in modes]
    return [(f"{mode}+rerank" if reranked else mode, mode, reranked) for mode in chosen for reranked in reranks]


def measure_retrieval(rag: RagKV, task: RetrievalTask, *, seed: int) -> list[MetricValue]:
    """Recall@k and MRR of every mode that the index serves, with and without its reranker."""
    measures: dict[str, Measure] = {f"recall@{k}": partial(recall_at, k) for k in DEPTHS}
    measures[f"mrr@{DEPTHS[-1]}"] = partial(reciprocal_rank, DEPTHS[-1])
    return [
        MetricValue(
            task=task.name,
            engine=engine,
            metric=metric,
            value=sum(values) / len(values),
            n=len(values),
            ci95=share_interval(values),
            seed=seed,
        )
        for (engine, metric), values in measured(task, index_searches(rag), measures, DEPTHS[-1]).items()
    ]


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


def judged_questions(path: Path, store: Store) -> RetrievalTask:
    """The questions of a file with their relevant chunks in `store`.

    A question is unjudged if it names a document that is not in the index, or a text that no chunk contains. Raises
    ConfigError, which names file and line, and RetrievalError if no question has a relevant chunk.
    """
    asked, chunks = question_rows(path), _Chunks(store)
    judgements, unjudged, whole = [], [], 0
    for number, row in enumerate(asked, start=1):
        question = question_of(row)
        documents, evidence = _texts(row, _DOCUMENTS), _texts(row, ("evidence",))
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
    present = [key for key in keys if row.values.get(key) is not None]
    if len(present) > 1:
        raise ConfigError(f'{row.where}: give "{present[0]}" or "{present[1]}", not both.')
    value: Any = row.values[present[0]] if present else []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(f'{row.where}: "{present[0]}" is a text or a list of texts, none of them empty.')
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
            *(named for known, named in self._named.items() if known.endswith("/" + name.removeprefix("./")))
        )
        if len(ids) > 1:
            raise ConfigError(f"{where}: the index has {len(ids)} documents {name!r}; give more of the path.")
        return next(iter(ids), "")

    def holding(self, texts: Sequence[str], among: Iterable[str] | None) -> list[str]:
        wanted = [Wording.of(text) for text in texts]
        candidates = self._texts if among is None else {chunk: self._texts[chunk] for chunk in among}
        return [chunk for chunk, text in candidates.items() if any(text.holds(wording) for wording in wanted)]
