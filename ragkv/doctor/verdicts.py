"""What `ragkv doctor` concludes from counts: intervals, verdicts, advice, and the report. No function here loads torch.

The interval decides, not the mean: "good" means that even the worse end of the interval is good. docs/quality.md states
the thresholds, which are ragkv's own. With enough gold answers, accuracy decides, because an engine may word an answer
differently and still be right. Otherwise agreement with full attention stands in for accuracy.

The intervals stay honest when few questions were asked or all had the same result. The unit is the question, not the
token, because the tokens of one answer are right or wrong together. One entirely right and one entirely wrong question
are added to those that were asked, as Bonett and Price (2012) do for paired proportions. So every interval has a width,
and the interval of three right answers is still wide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ragkv.index.quality import UNKNOWN, Verdict

Interval = tuple[float, float]

_NORMAL = 1.959964  # the 97.5 % quantile of the normal distribution


def share_interval(parts: Sequence[float], sizes: Sequence[float] | None = None) -> Interval:
    """The interval of sum(parts) / sum(sizes) in [0, 1], with a part and its size per question (default size: 1).

    If all n questions are right, the lower end is 1 - 2.96 / (n + 2): 0.41 for three, 0.95 for sixty.
    """
    sizes = [1.0] * len(parts) if sizes is None else sizes
    mean = sum(sizes) / len(sizes)
    value, error = _ratio_and_error([*parts, mean, 0.0], [*sizes, mean, mean])
    return max(0.0, value - error), min(1.0, value + error)


def difference_interval(differences: Sequence[float]) -> Interval:
    """The interval of the mean of differences in [-1, 1], one per question that both were asked."""
    low, high = share_interval([(difference + 1) / 2 for difference in differences])
    return 2 * low - 1, 2 * high - 1


def mean_interval(sums: Sequence[float], sizes: Sequence[float]) -> Interval:
    """The interval of sum(sums) / sum(sizes), which is unbounded: the added question equals the worst one asked."""
    worst = max(range(len(sums)), key=lambda at: sums[at] / sizes[at])
    value, error = _ratio_and_error([*sums, sums[worst]], [*sizes, sizes[worst]])
    return max(0.0, value - error), value + error


def _ratio_and_error(parts: Sequence[float], sizes: Sequence[float]) -> tuple[float, float]:
    """The ratio of the sums, and 1.96 times its standard error over questions (Taylor linearisation)."""
    n, total = len(parts), math.fsum(sizes)
    value = math.fsum(parts) / total
    squares = math.fsum((part - value * size) ** 2 for part, size in zip(parts, sizes, strict=True))
    return value, _NORMAL * math.sqrt(squares * n / (n - 1)) / total


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


_MORE = "These questions leave it open; ask more (--limit N, or --questions FILE.jsonl), a hundred or so."
CODEC_ADVICE: Mapping[Verdict, str] = {
    "good": "Loses bits, not answers.",
    "fair": "Changes some answers; take it where space matters more.",
    "poor": "Changes answers; ingest into a new index with --codec zstd or raw.",
    UNKNOWN: _MORE,
}
WEIGHTS_ADVICE: Mapping[Verdict, str] = {
    "good": "Loses bits, not answers.",
    "fair": "Changes some answers; take it where a decode step's time matters more.",
    "poor": 'Changes answers; set dtype = "auto" and ingest into a new index.',
    UNKNOWN: _MORE,
}


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
    """Questions after `turns` others in the prompt, compared with the same questions alone, by one engine.

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
class MetricValue:
    """One measured mean over the `n` judged questions, with its 95 % interval."""

    task: str
    engine: str
    metric: str
    value: float
    n: int
    ci95: tuple[float, float]
    seed: int


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
    """None if there were too few questions."""
    retrieval: tuple[MetricValue, ...] = ()
    """Recall and MRR of the modes of retrieval, if the questions name gold passages."""

    def to_json(self) -> dict[str, Any]:
        """The report in the form that `ragkv doctor --json` prints and the index keeps."""
        return asdict(self)


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
            settings = [f'default_engine = "{best.engine}"']
            tuning = {name: value for name, value in best.options.items() if name != "context"}
            if tuning:
                words = ", ".join(f"{name} = {json.dumps(value)}" for name, value in tuning.items())
                settings.append(f"{words} under [tuning.{best.engine}]")
            if "context" in best.options:
                settings.append(f"context = {best.options['context']} under [encoding] (then ingest again)")
            return (
                f"Proposed: {' and '.join(settings)} in ragkv.toml. Its answers are {verdict} beside full attention, "
                f"and its first token comes {full_first_token / best.first_token:.1f} times faster."
            )
    return "Proposed: --engine full, because no engine is shown to answer like it; more questions may show one."
