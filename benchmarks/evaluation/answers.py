"""`python -m ragkv.benchmarks.evaluation answers`: candidates answer tasks whose examples bring their own chunks.

The rows of its tables are means over questions with 95 % intervals, and differences from a baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

from ragkv.benchmarks.evaluation.retrieval import MemoEmbedder, MemoReranker, build_searcher
from ragkv.config import Mode
from ragkv.doctor.answers import (
    CONTEXT,
    GIVEN,
    RAW,
    Candidate,
    ChunkSource,
    ExampleResult,
    LoadedModel,
    Placed,
    run_candidates,
)
from ragkv.doctor.io import Progress
from ragkv.doctor.metrics import Example, Task, bootstrap_mean
from ragkv.engines import ContextChunk
from ragkv.errors import UsageError
from ragkv.index.index import indexes_of, kinds_of, useful_kinds
from ragkv.index.search import Searcher
from ragkv.model.checkpoint import pick_device
from ragkv.retrievers import (
    Embedder,
    Reranker,
    ScoreKind,
    embedder_fingerprint,
    load_embedder,
    load_reranker,
    reranker_fingerprint,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """A mean in [0, 1] over `n` questions with its 95 % bootstrap interval, and the settings that it was made with.

    `kind` is a slice of the task; "" is the whole task. `chunks` is the mean number of chunks read, `charge` the mean
    of what an engine recomputed of them (`Engine.charge`), and `evidence` the share of questions of which all chunks
    with the evidence were read. `difference` is the mean of (this - baseline) over the questions that both answered.
    The prompts of `too_long` questions did not fit the model; they are not counted, and
    if none fitted, `value` is None.
    """

    task: str
    kind: str
    engine: str
    metric: str
    value: float | None
    n: int
    ci95: tuple[float, float] | None
    seed: int
    model: str
    options: Mapping[str, Any]
    codec: str
    retrieval: str
    rerank: bool
    top_k: int | None
    steps: int
    chunks: float
    evidence: float | None = None
    charge: float | None = None
    too_long: int = 0
    baseline: str | None = None
    difference: float | None = None
    difference_ci95: tuple[float, float] | None = None
    candidate: Candidate = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """A row in the form that `--json` prints."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "candidate"}


def rows_of(
    tasks: Iterable[Task],
    candidates: Sequence[Candidate],
    results: Iterable[ExampleResult],
    *,
    seed: int = 0,
    baseline: str | None = None,
) -> list[ScoreRow]:
    """For each task, rows of the whole task and then of every slice, with the candidates in order."""
    by: dict[tuple[str, int], list[ExampleResult]] = {}
    for result in results:
        by.setdefault((result.task, id(result.candidate)), []).append(result)
    rows = []
    for task in tasks:
        kinds = list(dict.fromkeys(example.kind for example in task.examples))
        for kind in ["", *(kinds if len(kinds) > 1 else ())]:
            for candidate in candidates:
                other = None if baseline is None else baseline_of(candidate, candidates, baseline)
                own, others = (
                    [result for result in by.get((task.name, id(one)), ()) if kind in ("", result.example.kind)]
                    for one in (candidate, other)
                )
                rows.append(_row(task, kind, candidate, own, others, other, seed))
    return rows


def baseline_of(candidate: Candidate, among: Sequence[Candidate], name: str) -> Candidate | None:
    """The candidate that `candidate` is compared with: the one labelled `name` that is most similar to it.

    Similarity means the same model first, then the same ranking of chunks, then a raw codec. A lossy version of the
    baseline itself is compared with its raw version, and the baseline over several steps with that over one. None for
    the baseline itself, and if no candidate has the name.
    """
    closeness: list[Callable[[Candidate], Any]] = [
        lambda other: other.model == candidate.model,
        lambda other: [getattr(other, name) == getattr(candidate, name) for name in ("retrieval", "rerank", "top_k")],
        lambda other: other.steps == candidate.steps,
        lambda other: other.codec == RAW,
    ]
    named = [other for other in among if other.label == name]
    if candidate in named:
        raw = [other for other in named if other.codec == RAW and other != candidate and other.model == candidate.model]
        once = [other for other in named if other == replace(candidate, steps=1)]
        named = raw if candidate.codec != RAW else once if candidate.steps > 1 else []
    if not named:
        return None
    return max(named, key=lambda other: [near(other) for near in closeness])


def require_baseline(candidates: Sequence[Candidate], name: str) -> None:
    """Raise UsageError if no candidate is labelled `name`."""
    labels = list(dict.fromkeys(one.label for one in candidates))
    if name not in labels:
        raise UsageError(f"--baseline {name} is not among the engines; choose one of {', '.join(labels)}.")


def _row(
    task: Task,
    kind: str,
    candidate: Candidate,
    own: Sequence[ExampleResult],
    others: Sequence[ExampleResult],
    other: Candidate | None,
    seed: int,
) -> ScoreRow:
    scores = {result.example.example_id: result.score for result in own if result.score is not None}
    theirs = {result.example.example_id: result.score for result in others if result.score is not None}
    drawn = seed if task.seed is None else task.seed
    value = bootstrap_mean([list(scores.values())], drawn) if scores else None
    both = [score - theirs[name] for name, score in scores.items() if name in theirs]
    apart = bootstrap_mean([both], drawn) if both else None
    charged = [result.charge for result in own if result.charge is not None]
    evident = [result.evidence for result in own if result.evidence is not None]
    return ScoreRow(
        task=task.name,
        kind=kind,
        engine=candidate.label,
        metric=task.metric,
        value=None if value is None else value.value,
        n=len(scores),
        ci95=None if value is None else value.ci95,
        seed=drawn,
        model=candidate.model,
        options=candidate.options,
        codec=candidate.codec,
        retrieval=candidate.retrieval,
        rerank=candidate.rerank,
        top_k=candidate.top_k,
        steps=candidate.steps,
        evidence=sum(evident) / len(evident) if evident else None,
        chunks=sum(result.chunks for result in own) / len(own) if own else 0.0,
        charge=sum(charged) / len(charged) if charged else None,
        too_long=len(own) - len(scores),
        baseline=None if other is None or apart is None else other.label,
        difference=None if apart is None else apart.value,
        difference_ci95=None if apart is None else apart.ci95,
        candidate=candidate,
    )


DEFAULT_WORK = Path("ragkv-eval")
"""The folder of kept answers."""

Ranked = list[tuple[int, float]]
"""Pairs of (index of the chunk, relevance r in [0, 1)) in ascending relevance; the last chunk is read last."""

_EQUAL = 1.0 - 1e-8  # r of chunks without a score: the largest r, with a logarithm of almost 0


class TaskSource(ChunkSource):
    """Examples bring their own chunks, which are ranked among themselves. Models are loaded when a mode needs them.

    A chunk that the mode does not find (BM25: no common word) comes first with r = 0, so that every engine reads the
    same number of chunks. Rankings are remembered, and an index is reused while consecutive questions have the same
    chunks.
    """

    whole = True

    def __init__(self, *, embedder: str | None = None, reranker: str | None = None, device: str | None = None) -> None:
        super().__init__(device=device)
        self._names, self._device = (embedder, reranker), device
        self.rank = cache(self._rank)
        self._ranking = cache(self._ranking_of)
        self._embedding = lru_cache(1)(lambda texts: self._embedder.embed_documents(texts))
        self._searchers: Callable[[tuple[str, ...]], dict[tuple[str, bool], Searcher]] = lru_cache(1)(lambda _: {})

    def check(self, candidate: Candidate) -> None:
        mode, (embedder, reranker) = candidate.retrieval, self._names
        if candidate.context:
            raise UsageError(
                f"The chunks of a task have no document that they saw: leave {CONTEXT} out, or use --index."
            )
        if mode != GIVEN and kinds_of(cast("Mode", mode)) and embedder is None:
            raise UsageError(f"--retrieval {mode} needs an embedder: give --embedder mini, a folder or a hub id.")
        if candidate.rerank and reranker is None:
            raise UsageError("--rerank needs a reranker: give --reranker mini, a folder or a hub id.")

    def facts(self, loaded: LoadedModel, example: Example, candidate: Candidate) -> Any:
        ranking = self._ranking(candidate.retrieval, rerank=candidate.rerank)
        return {"chunks": example.chunks, "ranking": ranking, "top_k": candidate.top_k}

    def chunks(self, loaded: LoadedModel, example: Example, candidate: Candidate) -> Placed:
        ranked = self.rank(example.question, example.chunks, candidate.retrieval, rerank=candidate.rerank)
        prompt = loaded.reader(candidate.prompt).prompt
        return [
            (index, ContextChunk(token_ids=loaded.chunk_ids(prompt, example.chunks[index]), score=score))
            for index, score in ranked[-(candidate.top_k or len(ranked)) :]
        ]

    @cached_property
    def _embedder(self) -> Embedder:
        return MemoEmbedder(load_embedder(str(self._names[0]), device=str(pick_device(self._device))))

    @cached_property
    def _reranker(self) -> Reranker:
        return MemoReranker(load_reranker(str(self._names[1]), device=str(pick_device(self._device))))

    def _ranking_of(self, mode: str, *, rerank: bool) -> dict[str, Any]:
        """What a ranking depends on besides question and chunks, without loading a model."""
        embedder, reranker = self._names
        vectors = mode != GIVEN and kinds_of(cast("Mode", mode))
        return {
            "mode": mode,
            "embedder": embedder_fingerprint(str(embedder)) if vectors else None,
            "reranker": reranker_fingerprint(str(reranker)) if rerank else None,
        }

    def _rank(self, question: str, chunks: tuple[str, ...], mode: str, *, rerank: bool) -> Ranked:
        """Every chunk with its r by PCED Eqs. 4-7. `given` keeps the order, with the same r for all."""
        if mode == GIVEN:
            return [(index, _EQUAL) for index in range(len(chunks))]
        if not chunks:
            return []
        searchers = self._searchers(chunks)
        if (mode, rerank) not in searchers:
            searchers[mode, rerank] = self._index(chunks, cast("Mode", mode), rerank=rerank)
        found = searchers[mode, rerank].search(
            question, mode=cast("Mode", mode), top_k=len(chunks), candidates=len(chunks), rerank=rerank
        )
        best = [(int(each.chunk_id), each.score) for each in found]
        missed = sorted(set(range(len(chunks))) - {index for index, _ in best})
        return [(index, 0.0) for index in missed] + best[::-1]

    def _index(self, chunks: tuple[str, ...], mode: Mode, *, rerank: bool) -> Searcher:
        """The pipeline's own search over the chunks. Ids are the positions, so that ties keep the order."""
        ids = [f"{index:06d}" for index in range(len(chunks))]
        by_kind: dict[ScoreKind, dict[str, Any]] = {}
        if mode != "bm25":
            for kind in useful_kinds(mode):
                if (vectors := getattr(self._embedding(chunks), kind)) is not None:
                    by_kind[kind] = dict(zip(ids, vectors, strict=True))
        rows = by_kind.pop("colbert", {})
        return build_searcher(
            dict(zip(ids, chunks, strict=True)),
            vectors={kind: vectors.items() for kind, vectors in by_kind.items()},
            colbert=lambda wanted: {name: rows[name] for name in wanted},
            bm25="bm25" in indexes_of(mode, by_kind),
            embedder=None if mode == "bm25" else self._embedder,
            reranker=self._reranker if rerank else None,
        )


def run(
    tasks: Sequence[Task],
    candidates: Sequence[Candidate],
    *,
    source: ChunkSource | None = None,
    seed: int = 0,
    baseline: str | None = "full",
    max_new_tokens: int | None = None,
    work: Path | None = None,
    on_progress: Progress | None = None,
) -> list[ScoreRow]:
    """The figures of every candidate on every task. `seed` draws the intervals; `baseline` is a candidate's label.

    Without `source`, examples bring their chunks. The other arguments are those of `run_candidates`.
    """
    results = run_candidates(
        tasks,
        candidates,
        source=source or TaskSource(),
        max_new_tokens=max_new_tokens,
        work=work,
        on_progress=on_progress,
    )
    return rows_of(tasks, candidates, results, seed=seed, baseline=baseline)
