"""`python -m ragkv.benchmarks.evaluation answers`: candidates answer the questions of tasks.

A candidate is a model with an engine, its settings, a codec, and a way of ranking chunks. The chunks are those of the
example (`TaskSource`), or an index finds them (`IndexSource`). Answers can be saved, so that a stopped run continues.
The rows of the tables are means over questions with 95 % intervals, and differences from a baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from ragkv.benchmarks.evaluation.metrics import Example, Task, bootstrap_mean, score
from ragkv.benchmarks.evaluation.output import ResultCache, digest_of
from ragkv.benchmarks.evaluation.retrieval import MemoEmbedder, MemoReranker, build_searcher
from ragkv.config import MODES, NONE, EncodingConfig, IndexConfig, Mode, PromptConfig, StepsConfig, build_config
from ragkv.decoding import GREEDY
from ragkv.doctor.compare import HELD_BYTES, RoundTrip, with_kv
from ragkv.doctor.questions import Progress
from ragkv.doctor.specs import Spec
from ragkv.engines import Engine, Request, engine_class, make_engine
from ragkv.errors import NothingFoundError, PromptTooLongError, UsageError
from ragkv.index.answer import AnswerBackend, AnswerStream, AnswerTask, IndexBackend, validate_task
from ragkv.index.contexts import Contexts
from ragkv.index.index import indexes_of, kinds_of, useful_kinds
from ragkv.index.kv_source import After, Prefetch, Reads
from ragkv.index.search import Finder, Searcher
from ragkv.model.checkpoint import HEADS, MINI, digest_files, pick_device, resolve
from ragkv.retrievers import (
    Embedder,
    Reranker,
    ScoreKind,
    embedder_fingerprint,
    load_embedder,
    load_reranker,
    reranker_fingerprint,
)
from ragkv.store import MemoryTier, codec_from_config
from ragkv.types import Encoding, KVUse, ScoredChunk

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.model.language_model import LanguageModel
    from ragkv.pipeline import RagKV

GIVEN = "given"
"""Chunks in the order of the task and all equally relevant, without a retriever."""
RAW = "raw"
_PROMPT = "prompt."
CONTEXT = "context"
"""The option of a spec for chunks that saw this many tokens of their document, `[encoding] context`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way of answering: everything that an answer depends on besides the question and its chunks.

    `retrieval` is a mode of `ragkv.index.search`, or `given`; the best `top_k` chunks are read (None: all). `dtype`
    None means float32 for the mini model on a CPU, and the checkpoint's own otherwise. `name` is a label for tables, if
    engine and options are not enough. The codec of an engine without stored KV is always raw.
    """

    engine: str
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = MINI
    dtype: str | None = None
    codec: str = RAW
    retrieval: str = GIVEN
    rerank: bool = False
    top_k: int | None = None
    prompt: PromptConfig = field(default_factory=PromptConfig)
    name: str = ""
    context: int = 0
    """`[encoding] context`: how many tokens of its document a chunk of an index sees."""
    steps: int = 1
    """The most searches: for the question, then for queries that it writes as `writing` says."""
    writing: StepsConfig = field(default_factory=StepsConfig)

    def __post_init__(self) -> None:
        codec_from_config({"id": self.codec})
        if self.make().encoding is None:
            object.__setattr__(self, "codec", RAW)
        if self.retrieval not in (GIVEN, *MODES):
            raise UsageError(f"--retrieval must be of {GIVEN}, {', '.join(MODES)}, not {self.retrieval!r}.")
        if self.retrieval == GIVEN and (self.rerank or self.top_k is not None):
            raise UsageError(
                f"--rerank and --top-k choose among chunks that were scored; give --retrieval {'|'.join(MODES)}."
            )
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k must be at least 1, not {self.top_k}.")
        if self.steps > 1 and self.top_k is None:
            raise UsageError("--steps needs --retrieval and --top-k: if all chunks are read, nothing is searched.")

    @property
    def label(self) -> str:
        """The name in tables: `name`, or the engine with its options."""
        return self.name or str(Spec(self.engine, self.options))

    @property
    def scoring(self) -> str:
        """The way its chunks are ranked, in a word."""
        return f"{self.retrieval}+rerank" if self.rerank else self.retrieval

    def make(self) -> Engine:
        """A new engine. Raises UsageError if it is unknown, and ConfigError for options that it does not have."""
        engine_class(self.engine)
        return make_engine(self.engine, {self.engine: self.options}, context=self.context)

    def task(self, config: IndexConfig, example: Example, **options: Any) -> AnswerTask:
        """The example's question as this candidate answers it, greedily."""
        own = replace(
            config,
            default_engine=self.engine,
            tuning={self.engine: self.options},
            encoding=EncodingConfig(context=self.context),
            steps=self.writing,
        )
        return validate_task(own, example.question, decoding=GREEDY, steps=self.steps, **options)


def all_candidates(
    engines: Iterable[Spec],
    *,
    models: Sequence[str] = (MINI,),
    codecs: Sequence[str] = (RAW,),
    retrievals: Sequence[str] = (GIVEN,),
    rerank: bool | Sequence[bool] = False,
    steps: Sequence[int] = (1,),
    prompt: PromptConfig | None = None,
    tuning: Mapping[str, Mapping[str, Any]] | None = None,
    context: int = 0,
    **settings: Any,
) -> list[Candidate]:
    """Every combination of engines, models, codecs, retrievals, reranking and steps, once each; they share the other
    `settings`.

    An option of a spec overrides one of `tuning`. Without `prompt`, a checkpoint that was tuned without a BOS is asked
    without one. Options that begin with `prompt.` set fields of `PromptConfig`: `ape(prompt.prefix_newlines=20)`.
    `ape(context=256)` overrides `context`.
    """
    result: list[Candidate] = []
    both = [rerank] if isinstance(rerank, bool) else rerank
    for model, spec, codec, retrieval, reranked, most in product(models, engines, codecs, retrievals, both, steps):
        words = {key.removeprefix(_PROMPT): value for key, value in spec.options.items() if key.startswith(_PROMPT)}
        options = {key: value for key, value in spec.options.items() if not key.startswith(_PROMPT)}
        changed = words or CONTEXT in options
        seen = EncodingConfig(context=options.pop(CONTEXT, context)).context
        texts = asdict(prompt or resolve(model).tuned_words(PromptConfig())) | words
        candidate = Candidate(
            engine=spec.name,
            options={**(tuning or {}).get(spec.name, {}), **options},
            model=model,
            codec=codec,
            retrieval=retrieval,
            rerank=reranked,
            prompt=build_config(PromptConfig, texts, f"{spec}: {_PROMPT[:-1]}"),
            name=str(spec) if changed else "",
            context=seen,
            steps=most,
            **settings,
        )
        if candidate not in result:
            result.append(candidate)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleResult:
    """One answer and its score.

    If the prompt was too long for the model, `score` is None and `text` is empty. `chunks` is the number of chunks that
    were read, and `charge` what was recomputed of them. `trace` has the text of every token and the position of the
    chunk whose expert proposed it, for an engine with experts (PCED Figure 2). `evidence`: whether all chunks with the
    evidence were read, if the task knows them.
    """

    task: str
    example: Example
    candidate: Candidate
    text: str
    score: float | None
    chunks: int
    charge: float | None = None
    trace: tuple[tuple[str, int | None], ...] = ()
    evidence: bool | None = None


class ChunkSource(Protocol):
    """Provides the backend that answers a question for a candidate."""

    def check(self, candidate: Candidate) -> None:
        """Raise UsageError, before any work is done, if the candidate cannot get chunks."""

    def facts(self, candidate: Candidate, example: Example) -> Any:
        """Plain data that identifies the model, and the chunks with their scores."""

    def ask(self, candidate: Candidate, example: Example, **options: Any) -> tuple[AnswerBackend, AnswerTask]:
        """The question, and the backend that answers it; `options` are those of a `Question`."""


class LoadedModel:
    """One model. To find a kept answer, only the `fingerprint` is needed, for which no local checkpoint is loaded."""

    def __init__(self, name: str, dtype: str | None, device: str | None) -> None:
        self.name = name
        self._device = device
        mini = name == MINI and pick_device(device).type == "cpu"  # several times faster without bfloat16 units
        self.dtype = dtype or ("float32" if mini else "auto")
        self._contexts: dict[PromptConfig, TaskContexts] = {}

    @cached_property
    def model(self) -> LanguageModel:
        from ragkv.model.self_check import load_model

        return load_model(self.name, dtype=self.dtype, device=self._device)

    @cached_property
    def fingerprint(self) -> str:
        checkpoint = resolve(self.name)
        revision = None if checkpoint.local else self.model.revision
        return checkpoint.fingerprint(self.dtype, revision, device=self._device)

    @cached_property
    def heads(self) -> str:
        """A digest of the retaining heads beside the model, which are no part of its fingerprint; "" without any."""
        checkpoint = resolve(self.name)
        path = Path(checkpoint.location) / HEADS
        return digest_files(path.parent, [path]) if checkpoint.local and path.exists() else ""

    def contexts(self, prompt: PromptConfig) -> TaskContexts:
        """Answers with this prompt; they share the KV of their chunks."""
        if prompt not in self._contexts:
            self._contexts[prompt] = TaskContexts(self.model, (), IndexConfig(model=self.name, prompt=prompt))
        return self._contexts[prompt]


class TaskContexts(Contexts):
    """The answer backend of one example and candidate (`of`); KV is kept for the next questions."""

    source: TaskSource
    candidate: Candidate
    example: Example

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._memory = MemoryTier(HELD_BYTES)

    def of(self, source: TaskSource, candidate: Candidate, example: Example) -> TaskContexts:
        """A shallow copy, which shares model and KV."""
        own = copy(self)
        own.source, own.candidate, own.example = source, candidate, example
        return own

    def find(self, task: AnswerTask, on_candidates: Callable[[list[ScoredChunk]], None]) -> list[ScoredChunk]:
        candidate, texts = self.candidate, self.example.chunks
        [asked] = task.query.searches
        ranked = self.source.rank(asked, texts, candidate.retrieval, rerank=candidate.rerank)
        best = ranked[-(candidate.top_k or len(ranked)) :] if ranked else []
        return [
            ScoredChunk(
                chunk=self.chunk(texts[index], chunk_id=str(index)),
                source=str(index),
                retrieval_score=0.0,
                rerank_score=None,
                score=relevance,
            )
            for index, relevance in reversed(best)
        ]

    def request(self, task: AnswerTask, reads: Reads, prefetch: Prefetch | None, after: After) -> tuple[Request, KVUse]:
        request, use = super().request(task, reads, prefetch, after)
        if self.candidate.codec != RAW:
            request = with_kv(request, RoundTrip(codec_from_config({"id": self.candidate.codec})))
        return request, use

    def _kv(self, encoding: Encoding, ids: tuple[int, ...]) -> ChunkKV:
        key = f"{encoding} {ids}".encode()
        kept, _ = self._memory.get_many([key], lambda _: {key: super(TaskContexts, self)._kv(encoding, ids)})
        return kept[key]


class IndexSource:
    """The user's index, opened for reading, answers as for `ragkv query`, with its model, prompt and codec."""

    def __init__(self, rag: RagKV) -> None:
        self._rag = rag
        self._backend = IndexBackend(rag.index, Finder(rag.index), rag.kv_source)

    @property
    def settings(self) -> dict[str, Any]:
        """How the index is configured to answer, as fields of a `Candidate`."""
        config = self._rag.config
        return {
            "model": config.model,
            "codec": config.codec,
            "retrieval": config.retrieval,
            "rerank": config.rerank and config.reranker != NONE,
            "top_k": config.top_k,
            "prompt": config.prompt,
            "context": config.encoding.context,
            "writing": config.steps,
        }

    def candidate(self, engine: str, **settings: Any) -> Candidate:
        """A candidate that answers as the index is configured, but for `settings`."""
        options = self._rag.config.tuning.get(engine, {})
        return Candidate(engine=engine, **({"options": options} | self.settings | settings))

    def check(self, candidate: Candidate) -> None:
        if candidate.retrieval == GIVEN:
            raise UsageError(f"An index has no chunks in a given order; --retrieval is one of {', '.join(MODES)}.")
        if candidate.context not in (0, window := self._rag.config.encoding.context):
            raise UsageError(
                f"The chunks of this index saw {window} tokens of their document, not {candidate.context}; "
                f"ingest into another index with --context-tokens {candidate.context}, or leave {CONTEXT} out."
            )

    def facts(self, candidate: Candidate, example: Example) -> Any:
        scored = self._rag.retrieve(example.question, **self._search(candidate))
        seen = [candidate.context, self._rag.store.generation] if candidate.context else []
        return [self._rag.index.fingerprint, *seen, *((each.chunk.token_ids, each.score) for each in scored)]

    def ask(self, candidate: Candidate, example: Example, **options: Any) -> tuple[AnswerBackend, AnswerTask]:
        return self._backend, candidate.task(self._rag.config, example, **self._search(candidate), **options)

    def _search(self, candidate: Candidate) -> dict[str, Any]:
        return {"retrieval": candidate.retrieval, "rerank": candidate.rerank, "top_k": candidate.top_k}


SCHEME = 2
"""Increase it when an engine, a codec or the prompt answers differently with the same settings; kept answers expire."""


def run_candidates(
    tasks: Sequence[Task],
    candidates: Sequence[Candidate],
    *,
    source: ChunkSource,
    max_new_tokens: int | None = None,
    work: Path | None = None,
    on_progress: Progress | None = None,
) -> list[ExampleResult]:
    """Greedy answers of all candidates to all tasks; those that share a model answer a question in one batch.

    `max_new_tokens` None means the task's own. Answers are kept in the folder `work`, under a digest of everything that
    they depend on, and are not computed again; None keeps nothing. Raises UsageError for two tasks of the same name, or
    if a candidate lacks something.
    """
    if len({task.name for task in tasks}) != len(tasks):
        raise UsageError(f"Two tasks have one name: {', '.join(sorted(task.name for task in tasks))}; give each once.")
    for candidate in candidates:
        source.check(candidate)
    total = len(candidates) * sum(len(task.examples) for task in tasks)
    ledgers: dict[Path, ResultCache] = {}
    results: list[ExampleResult] = []
    for model in dict.fromkeys((one.model, one.dtype) for one in candidates):  # each model is loaded once
        own = [one for one in candidates if (one.model, one.dtype) == model]
        for task in tasks:
            for example in task.examples:
                asked: list[_Asked] = []
                for number, candidate in enumerate(own):
                    if on_progress is not None and not number:
                        on_progress(len(results), total, f"{task.name}, {candidate.label}")
                    ledger = None
                    if work is not None:
                        path = _ledger(work, task, candidate)
                        ledger = ledgers[path] = ledgers.get(path) or ResultCache(path)
                    asked.append(_Asked(source, task, example, candidate, max_new_tokens, ledger, asked))
                for number, answer in enumerate(asked):
                    if on_progress is not None and number:
                        on_progress(len(results), total, f"{task.name}, {answer.candidate.label}")
                    results.append(answer.result())
    if on_progress is not None:
        on_progress(total, total, "")
    return results


def _ledger(work: Path, task: Task, candidate: Candidate) -> Path:
    """A file per task and candidate with a readable name. Names may collide, since keys are unique."""
    words = (task.name, candidate.label, candidate.codec, candidate.scoring)
    name = "-".join("".join(c if c.isalnum() else "_" for c in word) for word in words)
    return work / "answers" / f"{name[:120]}.jsonl"


class _Asked:
    """A candidate's answer to a question: known already, or submitted to the runtime. Those `before` it are finished
    first if there is no room for its KV beside theirs.
    """

    def __init__(
        self,
        source: ChunkSource,
        task: Task,
        example: Example,
        candidate: Candidate,
        limit: int | None,
        ledger: ResultCache | None,
        before: Sequence[_Asked],
    ) -> None:
        self.candidate = candidate
        self._task, self._example, self._ledger = task, example, ledger
        self._facts: Mapping[str, Any] | None = None
        limit = limit or task.max_new_tokens
        if ledger is not None:
            engine = candidate.make()
            self._key = digest_of(
                {
                    "steps": [candidate.steps, asdict(candidate.writing)] if candidate.steps > 1 else [],
                    "scheme": SCHEME,
                    "engine": candidate.engine,
                    "config": asdict(engine.config),
                    "codec": candidate.codec,
                    "prompt": candidate.prompt.facts(),
                    "question": example.question,
                    "source": source.facts(candidate, example),
                    "max_new_tokens": limit,
                }
            )
            self._facts = ledger.get(self._key)
        if self._facts is None:
            backend, question = source.ask(candidate, example, max_new_tokens=limit)
            self._stream, self._engine = AnswerStream(backend, question), question.engine
            try:
                if not self._stream.begin(wait=False):
                    for other in before:
                        other.finish()
                    self._stream.begin()
            except PromptTooLongError:
                self._keep(None)
            except NothingFoundError:
                self._keep("")

    def finish(self) -> Mapping[str, Any]:
        """Wait for the answer, and keep it; `answer` None: the prompt was too long."""
        while self._facts is None:
            try:
                if self._stream.collect():
                    self._keep(self._stream.answer.text)
                else:
                    self._stream.wait()
            except PromptTooLongError:
                self._keep(None)
        return self._facts

    def _keep(self, text: str | None) -> None:
        stream, example = self._stream, self._example
        sources = stream.sources
        facts: dict[str, Any] = {"answer": text, "chunks": len(sources)}
        if example.needed:
            facts["evidence"] = set(example.needed) <= {int(read.document) for read in sources}
        if text is None:
            stream.cancel()
        elif sources:
            facts["charge"] = stream.answer.charge
            if self._engine.counts_winners:
                places = [int(read.document) for read in sources] if example.chunks else range(len(sources))
                facts["trace"] = [
                    (token.text, None if token.source is None else places[token.source]) for token in stream.trace
                ]
        self._facts = facts
        if self._ledger is not None:
            self._ledger.put(self._key, task=self._task.name, example=example.example_id, **facts)

    def result(self) -> ExampleResult:
        facts, task, example = self.finish(), self._task, self._example
        text = facts["answer"]
        return ExampleResult(
            task=task.name,
            example=example,
            candidate=self.candidate,
            text=text or "",
            score=None if text is None else score(task.metric, text, example),
            chunks=facts["chunks"],
            charge=facts.get("charge"),
            evidence=facts.get("evidence"),
            trace=tuple((text, winner) for text, winner in facts.get("trace", ())),
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

Ranked: TypeAlias = list[tuple[int, float]]
"""Pairs of (index of the chunk, relevance r in [0, 1)) in ascending relevance; the last chunk is read last."""

_EQUAL = 1.0 - 1e-8  # r of chunks without a score: the largest r, with a logarithm of almost 0


class TaskSource:
    """Examples bring their own chunks, which are ranked among themselves. Models are loaded when they are needed, and
    the last is kept.

    A chunk that the mode does not find (BM25: no common word) comes first with r = 0, so that every engine reads the
    same number of chunks. Rankings are remembered, and an index is reused while consecutive questions have the same
    chunks. Engines for long documents read each chunk in blocks.
    """

    def __init__(self, *, embedder: str | None = None, reranker: str | None = None, device: str | None = None) -> None:
        self._names, self._device = (embedder, reranker), device
        self.model = lru_cache(1)(lambda name, dtype=None: LoadedModel(name, dtype, device))
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

    def facts(self, candidate: Candidate, example: Example) -> Any:
        loaded = self.model(candidate.model, candidate.dtype)
        heads = [loaded.heads] if candidate.make().whole_documents else []
        ranking = self._ranking(candidate.retrieval, rerank=candidate.rerank)
        return [loaded.fingerprint, *heads, example.chunks, ranking, candidate.top_k]

    def ask(self, candidate: Candidate, example: Example, **options: Any) -> tuple[AnswerBackend, AnswerTask]:
        loaded = self.model(candidate.model, candidate.dtype)
        contexts = loaded.contexts(candidate.prompt)
        options["top_k"] = candidate.top_k or max(1, len(example.chunks))
        return contexts.of(self, candidate, example), candidate.task(contexts.config, example, **options)

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
