"""Judge measured figures for someone who chooses an engine or a codec, with a word and a sentence.

The interval decides, not the figure: "good" means good even at the worse end of the interval. docs/quality.md states
the thresholds, which are ragkv's own. If there are enough gold answers, accuracy decides, because an engine may word
an answer differently and still be right. Otherwise agreement with full attention stands in for accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ragkv.evaluation.interval import Interval

__all__ = [
    "ENOUGH",
    "UNKNOWN",
    "VERDICTS",
    "Agreement",
    "Verdict",
    "codec_advice",
    "codec_verdict",
    "engine_advice",
    "engine_verdict",
    "loss_verdict",
]

Verdict = Literal["good", "fair", "poor", "not enough to tell"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
UNKNOWN: Verdict = "not enough to tell"

ENOUGH = 10
"""Accuracy decides only if full attention answers at least so many questions right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """95 % intervals over questions: KL in nats per token, the shares of first choices and of whole answers."""

    kl: Interval
    top1: Interval
    answers: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """The lower bounds of the shares, and the upper bound of KL."""

    top1: float
    answers: float
    kl: float


_LOSS: dict[Verdict, float] = {"good": 0.05, "fair": 0.10}  # the most accuracy that may be lost, compared with full
_ENGINE: dict[Verdict, _Limit] = {
    "good": _Limit(top1=0.95, answers=0.8, kl=0.05),
    "fair": _Limit(top1=0.85, answers=0.0, kl=0.5),
}
_CODEC: dict[Verdict, _Limit] = {
    "good": _Limit(top1=0.95, answers=0.8, kl=0.01),
    "fair": _Limit(top1=0.85, answers=0.0, kl=0.1),
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


def engine_verdict(found: Agreement, *, joined: bool) -> Verdict:
    """Judge by agreement with full attention.

    `joined` scores (PCED) are not the distribution of a model, so their KL is reported but not judged.
    """
    return _by_agreement(_ENGINE, found, judge_kl=not joined)


def codec_verdict(found: Agreement, *, exact: bool) -> Verdict:
    """Judge by agreement with the same engine on unchanged KV. A lossless codec is good."""
    return "good" if exact else _by_agreement(_CODEC, found, judge_kl=True)


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


_MORE = "These questions leave it open; ask more (--limit N, or --questions FILE.jsonl), a hundred or so."


def _by_agreement(limits: dict[Verdict, _Limit], found: Agreement, *, judge_kl: bool) -> Verdict:
    for verdict, limit in limits.items():
        same = found.top1[0] >= limit.top1 and found.answers[0] >= limit.answers
        if same and (not judge_kl or found.kl[1] <= limit.kl):
            return verdict
    least = limits["fair"]
    poor = found.top1[1] < least.top1 or (judge_kl and found.kl[0] > least.kl)
    return "poor" if poor else UNKNOWN
