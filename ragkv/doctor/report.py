"""`ragkv doctor`: compare every engine and codec with full attention on the user's own documents and questions.

Each engine and codec gets a verdict in words. The interval decides, not the mean: "good" means that even the worse end
of the interval is good. docs/quality.md states the thresholds, which are ragkv's own. With enough gold answers,
accuracy decides, because an engine may word an answer differently and still be right. Otherwise agreement with full
attention stands in for accuracy. The newest report of each model is kept in the index.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

import ragkv
from ragkv.config import NONE, EncodingConfig, IndexConfig
from ragkv.doctor.answers import Candidate, ExampleResult, IndexSource, LoadedModel, run_candidates
from ragkv.doctor.io import UNKNOWN, GoldenQuestion, Progress, Spec, Verdict
from ragkv.doctor.metrics import Interval, MetricValue, Task, difference_interval, mean_interval, share_interval
from ragkv.engines import make_engine, unsupported_reason
from ragkv.errors import RagkvError, RetrievalError, UsageError
from ragkv.index.conversation import proved_history
from ragkv.mini import embedder_path, lm_path, reranker_path
from ragkv.model.checkpoint import MINI, WEIGHTS, resolve
from ragkv.store import StoreStats

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

_PACKAGES = ("torch", "transformers", "lmdb", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions by package, and descriptions of the devices, the default device first."""

    versions: dict[str, str]
    devices: tuple[str, ...]

    @classmethod
    def look(cls) -> Environment:
        versions = {"ragkv": ragkv.__version__, "python": platform.python_version()}
        for package in _PACKAGES:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:  # some builds of torch carry no metadata
                versions[package] = "unknown"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = torch.get_num_threads()
        counts = f"{cores} core{'s' * (cores != 1)}, {threads} thread{'s' * (threads != 1)}"
        devices = [f"cpu: {platform.machine()}, {counts}"]
        if torch.cuda.is_available():
            found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
            devices = [f"cuda:{i}: {p.name}, {p.total_memory / 2**30:.0f} GiB" for i, p in enumerate(found)] + devices
        return cls(versions=versions, devices=tuple(devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedModel:
    """The model that is judged. `same`: its fingerprint is that of the index's chunks."""

    model: str
    parameters: int
    dtype: str
    device: str
    fingerprint: str
    same: bool

    @classmethod
    def of(cls, subject: LoadedModel) -> JudgedModel:
        model = subject.model
        return cls(
            model=subject.name,
            parameters=model.parameters,
            dtype=model.precision,
            device=str(model.device),
            fingerprint=subject.fingerprint,
            same=subject.current,
        )


def remedies(stats: StoreStats, subject: LoadedModel | None) -> list[str]:
    """One sentence for each thing that the user should do about the index."""
    sentences = []
    if not stats.chunks:
        sentences.append("The index holds no chunk: ragkv ingest PATH.")
    if subject is not None and subject.own and not subject.current:
        sentences.append("The model changed since the index was made: run ragkv ingest on all of its documents again.")
    if subject is not None and not subject.own:
        sentences.append(f"To answer with {subject.name}, ingest the documents into an index of its own.")
    if stats.unreadable:
        sentences.append(f"{stats.unreadable} KV records are damaged; run ragkv verify, then ragkv repair.")
    if stats.orphans:
        sentences.append(f"{stats.orphans} KV records are needed by no chunk; ragkv gc frees their space.")
    return sentences


State = Literal["here", "to be fetched", "missing"]
Role = Literal["model", "embedder", "reranker"]

_BUNDLED: dict[Role, Callable[[], Path]] = {
    "model": lm_path,
    "embedder": embedder_path,
    "reranker": reranker_path,
}
_WEIGHTS = (*WEIGHTS, "*.bin", "*.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """A model by role and name. `bytes` is the size of its weights if they are here; `what` describes the state."""

    role: Role
    name: str
    state: State
    what: str
    bytes: int | None = None


def models_present(config: IndexConfig | None) -> tuple[ModelState, ...]:
    """The bundled models, then the other models of the index."""
    wanted: list[tuple[Role, str]] = [(role, MINI) for role in _BUNDLED]
    if config is not None:
        own: list[tuple[Role, str]] = [
            ("model", config.model),
            ("embedder", config.embedder),
            ("reranker", config.reranker),
        ]
        wanted += [each for each in own if each[1] not in (MINI, NONE)]
    return tuple(_look(role, name) for role, name in wanted)


def _look(role: Role, name: str) -> ModelState:
    marks = ("config.json",) if role == "model" else ("config.json", "modules.json")
    try:
        resolved = resolve(name, bundled=_BUNDLED[role], marks=marks)
    except RagkvError as error:
        return ModelState(role=role, name=name, state="missing", what=str(error))
    if resolved.local:
        folder = Path(resolved.location)
    else:
        cached = _cached(resolved.location)
        if cached is None:
            return ModelState(role=role, name=name, state="to be fetched", what="of the hub; fetched when first used")
        folder = cached
    patterns = _WEIGHTS if resolved.file is None else (resolved.file,)
    weights = {path for pattern in patterns for path in folder.glob(pattern)}
    if not weights and role != "embedder":  # a sentence-transformers folder may keep them a level deeper
        return ModelState(role=role, name=name, state="missing", what=f"No weights in {folder}; download it again.")
    what = "bundled" if name == MINI else str(folder)
    return ModelState(role=role, name=name, state="here", what=what, bytes=sum(path.stat().st_size for path in weights))


def _cached(name: str) -> Path | None:
    """The model's folder in the hub's local cache; does not ask the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


ENOUGH = 10
"""Accuracy decides only if full attention answers at least this many questions right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """95 % intervals over questions: KL in nats per token, the shares of first choices and of whole answers."""

    kl: Interval
    top1: Interval
    answers: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The lower bounds of the shares, and the upper bound of KL."""

    top1: float
    answers: float
    kl: float


_LOSS: dict[Verdict, float] = {"good": 0.05, "fair": 0.10}  # the most accuracy that may be lost, compared with full
ENGINE_LIMITS: Mapping[Verdict, Limit] = {
    "good": Limit(top1=0.95, answers=0.8, kl=0.05),
    "fair": Limit(top1=0.85, answers=0.0, kl=0.5),
}
CODEC_LIMITS: Mapping[Verdict, Limit] = {
    "good": Limit(top1=0.95, answers=0.8, kl=0.01),
    "fair": Limit(top1=0.85, answers=0.0, kl=0.1),
}

_ROUNDING = 1e-9

_REMEDY = {
    "ape": "search its temperature, scale and prefix on questions of yours: `ragkv tune FILE.jsonl`",
    "block": "use a model that was trained to read blocks",
    "pced": "give it better scores or fewer chunks (--top-k): retrieval decides which expert it believes",
}


def loss_verdict(loss: Interval) -> Verdict:
    """Judge by the interval of the accuracy of `full` minus the engine's, over the same questions."""
    for verdict, most in _LOSS.items():
        if loss[1] <= most + _ROUNDING:
            return verdict
    return "poor" if loss[0] > _LOSS["fair"] else UNKNOWN


def agreement_verdict(limits: Mapping[Verdict, Limit], agreement: Agreement, *, joined: bool = False) -> Verdict:
    """Judge by agreement with full attention, or of a codec with the same engine on unchanged KV.

    `joined` scores (PCED) are not the distribution of a model, so their KL is reported but not judged.
    """
    for verdict, limit in limits.items():
        same = agreement.top1[0] >= limit.top1 and agreement.answers[0] >= limit.answers
        if same and (joined or agreement.kl[1] <= limit.kl):
            return verdict
    least = limits["fair"]
    poor = agreement.top1[1] < least.top1 or (not joined and agreement.kl[0] > least.kl)
    return "poor" if poor else UNKNOWN


def engine_advice(engine: str, verdict: Verdict, *, tuned_for_blocks: bool, other: str | None) -> str:
    """One sentence of advice; `other` is an engine whose verdict is good."""
    if verdict == "good":
        return "Answers like full attention here; use it."
    if verdict == UNKNOWN:
        return _MORE
    instead = f"answer with --engine {other or 'full'}"
    if engine == "block" and tuned_for_blocks:
        return f"The model was trained for blocks and still loses on these documents; {instead}."
    remedy = _REMEDY.get(engine)
    if remedy is None:
        return f"It departs from full attention here; {instead}."
    return f"{remedy[0].upper()}{remedy[1:]}, or {instead}."


def codec_advice(codec: str, verdict: Verdict, *, exact: bool) -> str:
    """One sentence of advice."""
    if exact:
        return "Gives every bit back."
    return {
        "good": "Loses bits, not answers.",
        "fair": "Changes some answers; take it where space matters more.",
        "poor": "Changes answers; ingest into a new index with --codec zstd or raw.",
        UNKNOWN: _MORE,
    }[verdict]


_WEIGHTS_ADVICE: dict[Verdict, str] = {
    "fair": "Changes some answers; take it where a decode step's time matters more.",
    "poor": 'Changes answers; set dtype = "auto" and ingest into a new index.',
}
_MORE = "These questions leave it open; ask more (--limit N, or --questions FILE.jsonl), a hundred or so."


class AgreementCounts:
    """The counts of a candidate's results, by question. KL and top-1 are means over tokens, so a long answer weighs
    more.
    """

    def __init__(self, results: Sequence[ExampleResult]) -> None:
        compared = [result.comparison for result in results if result.comparison is not None]
        coded = [item.through for item in compared if item.through is not None]
        self.questions = len(results)
        self.tokens = [len(item.kl) for item in compared]
        self.kl_sums = [sum(item.kl) for item in compared]
        self.agreed = [sum(item.agreed) for item in compared]
        self.same = [item.same for item in compared]
        self.right = [bool(result.score) for result in results if result.score is not None]
        times = [result.first_token for result in results if result.first_token is not None]
        self.first_token = statistics.median(times) if times else 0.0
        self.kv_bytes = sum(result.kv_bytes for result in results) // max(1, len(times))
        self.exact = all(item.exact for item in coded)
        self.size = sum(item.stored_bytes for item in coded) / max(1, sum(item.raw_bytes for item in coded))

    def figures(self) -> dict[str, Any]:
        """The fields that all rows have."""
        return {
            "kl": sum(self.kl_sums) / sum(self.tokens),
            "top1": sum(self.agreed) / sum(self.tokens),
            "answers": sum(self.same) / len(self.same),
            "accuracy": self.accuracy,
        }

    @property
    def accuracy(self) -> float | None:
        return sum(self.right) / len(self.right) if self.right else None

    @property
    def agreement(self) -> Agreement:
        """The intervals of KL, and of the shares of first choices and of whole answers."""
        return Agreement(
            kl=mean_interval(self.kl_sums, self.tokens),
            top1=share_interval(self.agreed, self.tokens),
            answers=share_interval(self.same),
        )

    def judged(self, before: Sequence[bool], *, joined: bool) -> dict[str, Any]:
        """The verdict, what it is based on, and the intervals; `before` says which answers of the other were right."""
        loss = None
        if self.right:
            loss = difference_interval([one - own for one, own in zip(before, self.right, strict=True)])
        by_gold = loss is not None and sum(before) >= ENOUGH
        by_agreement = agreement_verdict(ENGINE_LIMITS, self.agreement, joined=joined)
        return {
            "verdict": loss_verdict(loss) if loss and by_gold else by_agreement,
            "by": "accuracy" if by_gold else "agreement",
            "ci95": {**asdict(self.agreement), "loss": loss},
        }


def proposed(rows: Sequence[EngineRow], full_first_token: float) -> str:
    """The one setting that the report proposes, in a sentence.

    Of the engines with the best verdict, if that is good or fair, it is the one with the shortest time to first token;
    of those within a tenth of that, the one that reads the fewest bytes. An engine slower than `full` is not proposed.
    """
    for verdict in ("good", "fair"):
        able = [row for row in rows if row.verdict == verdict and row.first_token < full_first_token]
        if able:
            soonest = min(row.first_token for row in able)
            best = min((row for row in able if row.first_token <= 1.1 * soonest), key=lambda row: row.kv_bytes)
            lines = [f'default_engine = "{best.engine}"']
            tuning = {name: value for name, value in best.options.items() if name != "context"}
            if tuning:
                words = ", ".join(f"{name} = {json.dumps(value)}" for name, value in tuning.items())
                lines.append(f"{words} under [tuning.{best.engine}]")
            if "context" in best.options:
                lines.append(f"context = {best.options['context']} under [encoding] (then ingest again)")
            return (
                f"Proposed: {' and '.join(lines)} in ragkv.toml. Its answers are {verdict} beside full attention, and "
                f"its first token comes {full_first_token / best.first_token:.1f} times faster."
            )
    return "Proposed: --engine full, because no engine is shown to answer like it; more questions may show one."


EARLIER = 4
"""A question is asked again after this many earlier turns, to see whether the model can hold a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """An engine compared with `full`: shares in [0, 1], `kl` in nats per token, `accuracy` None without gold answers.

    `options` are those that differ from the index's `[tuning.<engine>]`, and `context` if it differs from its
    `[encoding]`; `label` is the engine with them.
    `first_token` is the median of seconds to the first token with KV in memory, `kv_bytes` the mean size of that KV.

    `ci95` has the 95 % intervals of `kl`, `top1`, `answers` and `loss` (the accuracy of `full` minus the engine's; None
    without gold answers). `by` says what the verdict is based on: "accuracy" or "agreement".
    """

    engine: str
    label: str
    options: dict[str, Any]
    verdict: Verdict
    by: Literal["accuracy", "agreement"]
    advice: str
    kl: float
    top1: float
    answers: float
    accuracy: float | None
    ci95: dict[str, Interval | None]
    first_token: float
    kv_bytes: int
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRow:
    """A codec compared with the same engine on unchanged KV. `size` is stored bytes divided by raw bytes. The row
    "int8 weights" is of a model with them, compared with its float32 weights.

    `ci95` has the 95 % intervals of `kl`, `top1` and `answers`, or is None for a codec that lost no bit.
    """

    engine: str
    codec: str
    verdict: Verdict
    advice: str
    exact: bool
    size: float
    kl: float
    top1: float
    answers: float
    accuracy: float | None
    ci95: dict[str, Interval] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """Questions after `EARLIER` others in the prompt, compared with the same questions alone, by one engine.

    `history` is the setting that follows from them; None if the questions cannot tell. `alone` and `accuracy` are the
    shares of right answers without and with the earlier turns, None without gold answers. The rest is as in EngineRow.
    """

    engine: str
    history: Literal["prompt", "search"] | None
    verdict: Verdict
    by: Literal["accuracy", "agreement"]
    questions: int
    turns: int
    alone: float | None
    accuracy: float | None
    kl: float
    top1: float
    answers: float
    ci95: dict[str, Interval | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The report. `source` says where the questions came from; `skipped` of them retrieved nothing."""

    date: str
    ragkv: str
    model: str
    fingerprint: str
    generation: int
    source: str
    seed: int
    questions: int
    gold: int
    skipped: int
    tokens: int
    top_k: int
    max_new_tokens: int
    full_accuracy: float | None
    full_first_token: float
    proposal: str
    engines: tuple[EngineRow, ...]
    codecs: tuple[CodecRow, ...]
    conversation: ConversationRow | None
    """None if there were no more than `EARLIER` questions."""
    retrieval: tuple[MetricValue, ...] = ()
    """Recall and MRR of the modes of retrieval, if the questions name gold passages."""

    def to_json(self) -> dict[str, Any]:
        """The report in the form that `ragkv doctor --json` prints and the index keeps."""
        return asdict(self)


def compared_engines(named: Iterable[str | Spec]) -> dict[str, Spec]:
    """The engines by label, without `full`, with which they are compared; UsageError if there is no other."""
    specs = {str(one): one if isinstance(one, Spec) else Spec(one) for one in named}
    specs.pop("full", None)
    if not specs:
        raise UsageError("There is no engine to compare with full; name some, such as --engines ape,block,pced.")
    return specs


class Doctor:
    """A comparison of engines and codecs on one model and index. `examine` asks the questions."""

    def __init__(
        self,
        rag: RagKV,
        model: str | None = None,
        *,
        engines: Sequence[str | Spec] | None = None,
        codecs: Sequence[str] = (),
        top_k: int | None = None,
        max_new_tokens: int = 64,
        device: str | None = None,
    ) -> None:
        """`model` defaults to the index's, and `engines` to those with KV in the index and those that could replace
        them (`_alternatives`). Options of a `Spec` override `[tuning.<engine>]`, its `context` that of `[encoding]`.

        Raises UsageError for an unknown engine or codec.
        """
        if max_new_tokens < 1:
            raise UsageError(f"--max-new-tokens must be at least 1, not {max_new_tokens}.")
        self._rag = rag
        self._source = IndexSource(rag, device=device)
        self.subject = self._source.model(model or rag.config.model)
        self._max_new_tokens = max_new_tokens
        named: Sequence[str | Spec] = engines or ()
        if engines is None:
            named = (*rag.config.engines, *_alternatives(rag.config, self.subject))
        specs = compared_engines(named)
        candidate = partial(self._source.candidate, model=self.subject.name, top_k=top_k or rag.config.top_k)
        self._full = candidate("full", name="full")
        self._float32 = candidate("full", name="float32 weights", dtype="float32") if self.subject.model.int8 else None
        self._engines = []
        for label, spec in specs.items():
            options = {**rag.config.tuning.get(spec.name, {}), **spec.options}
            context = EncodingConfig(context=options.pop("context", rag.config.encoding.context)).context
            self._engines.append(candidate(spec.name, options=options, context=context, name=label))
        self._options = {label: dict(spec.options) for label, spec in specs.items()}
        self._coded = [
            replace(spec, codec=codec, name=f"{spec.label}, {codec}")
            for spec in self._engines
            if spec.make().encoding is not None and (engines is not None or spec.label in rag.config.engines)
            for codec in dict.fromkeys(codecs)
        ]
        usual = rag.config.default_engine if rag.config.default_engine in specs else "full"
        self._talking = candidate(usual, turns=EARLIER, name="conversation")

    def examine(
        self,
        questions: Sequence[GoldenQuestion],
        *,
        source: str,
        seed: int,
        retrieval: Sequence[MetricValue] = (),
        on_progress: Progress | None = None,
    ) -> Quality:
        """Ask all questions; nothing is written. Raises RetrievalError if no question finds a chunk.

        `retrieval` is what was measured of the modes of retrieval.
        """
        candidates = [self._full]
        for one in self._engines:
            candidates += [one, *(coded for coded in self._coded if coded.name == f"{one.label}, {coded.codec}")]
        candidates += [self._talking] if self._float32 is None else [self._talking, self._float32]
        results = run_candidates(
            [Task.of(questions)],
            candidates,
            source=self._source,
            compare_logits=True,
            max_new_tokens=self._max_new_tokens,
            decoding=self._rag.config.decoding,
            on_progress=on_progress,
        )
        if not results:
            raise RetrievalError("No question finds a chunk of the index; ask with words that the documents use.")
        report = self._report(results, source=source, seed=seed, questions=len(questions))
        return replace(report, retrieval=tuple(retrieval))

    def _report(self, results: Sequence[ExampleResult], *, source: str, seed: int, questions: int) -> Quality:
        full = self._counts(results, self._full)
        engines = [(tried, tried.make(), self._counts(results, tried)) for tried in self._engines]
        judged = {
            tried.label: counts.judged(full.right, joined=built.counts_winners) for tried, built, counts in engines
        }
        good = next((tried.engine for tried in self._engines if judged[tried.label]["verdict"] == "good"), None)
        tuned = bool(self.subject.model.checkpoint.recommended.get("block_tuned"))
        rows = tuple(
            EngineRow(
                engine=tried.engine,
                label=tried.label,
                options=self._options[tried.label],
                advice=engine_advice(tried.engine, judged[tried.label]["verdict"], tuned_for_blocks=tuned, other=good),
                settings=asdict(built.config),
                first_token=counts.first_token,
                kv_bytes=counts.kv_bytes,
                **judged[tried.label],
                **counts.figures(),
            )
            for tried, built, counts in engines
        )
        codecs = []
        if self._float32 is not None:  # measures int8 weights: `full` in float32 beside `full` as it runs here
            counts = self._counts(results, self._float32)
            codecs.append(_codec_row("full", "int8 weights", counts, exact=False, size=0.25, advice=_WEIGHTS_ADVICE))
        for tried in self._coded:
            counts = self._counts(results, tried)
            engine = tried.label.rpartition(", ")[0]
            codecs.append(_codec_row(engine, tried.codec, counts, exact=counts.exact, size=counts.size))
        return Quality(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            ragkv=ragkv.__version__,
            model=self.subject.name,
            fingerprint=self.subject.fingerprint,
            generation=self._rag.store.generation,
            source=source,
            seed=seed,
            questions=full.questions,
            gold=len(full.right),
            skipped=questions - full.questions,
            tokens=sum(engines[0][2].tokens),
            top_k=self._full.top_k or 0,
            max_new_tokens=self._max_new_tokens,
            full_accuracy=full.accuracy,
            full_first_token=full.first_token,
            proposal=proposed(rows, full.first_token),
            engines=rows,
            codecs=tuple(codecs),
            conversation=self._conversation_row(results),
        )

    def _counts(self, results: Sequence[ExampleResult], candidate: Candidate) -> AgreementCounts:
        return AgreementCounts([result for result in results if result.candidate is candidate])

    def _conversation_row(self, results: Sequence[ExampleResult]) -> ConversationRow | None:
        talked = self._counts(results, self._talking)
        if not talked.questions:
            return None
        asked = {result.example.example_id for result in results if result.candidate is self._talking}
        [usual] = [one for one in (self._full, *self._engines) if one.label == self._talking.engine]
        alone = self._counts([result for result in results if result.example.example_id in asked], usual)
        judged = talked.judged(alone.right, joined=usual.make().counts_winners)
        return ConversationRow(
            engine=usual.engine,
            history=proved_history(judged["verdict"], judged["by"]),
            questions=talked.questions,
            turns=EARLIER,
            alone=alone.accuracy,
            **judged,
            **talked.figures(),
        )


WINDOW = 256
"""The `[encoding] context` that is tried on an index without."""


def _alternatives(config: IndexConfig, subject: LoadedModel) -> list[Spec]:
    """Settings that could replace the index's engines, if the model runs them: `block` over the other chunk KV,
    `blend`, and `block` over chunks that have seen their document.
    """
    block = make_engine("block", config.tuning).config
    specs = [Spec(name) for name in ("block", "blend") if name not in config.engines]
    if block.preset != "no-positions":
        specs.append(Spec("block", {"over": "standalone" if block.over == "prefixed" else "prefixed"}))
        if not config.encoding.context:
            over = {} if block.over == "prefixed" else {"over": "prefixed"}
            specs.append(Spec("block", {**over, "context": WINDOW}))
    return [one for one in specs if unsupported_reason(make_engine(one.name, {}), subject.model) is None]


def _codec_row(
    engine: str,
    codec: str,
    counts: AgreementCounts,
    *,
    exact: bool,
    size: float,
    advice: Mapping[Verdict, str] | None = None,
) -> CodecRow:
    verdict: Verdict = "good" if exact else agreement_verdict(CODEC_LIMITS, counts.agreement)
    return CodecRow(
        engine=engine,
        codec=codec,
        verdict=verdict,
        advice=(advice or {}).get(verdict) or codec_advice(codec, verdict, exact=exact),
        exact=exact,
        size=size,
        ci95=None if exact else asdict(counts.agreement),
        **counts.figures(),
    )
