"""What measured figures mean for the person who chooses an engine or a codec: a word and a sentence.

The interval decides, not the figure: "good" is what is good even at the worse end of its interval. The thresholds are
ragkv's own and are stated in docs/quality.md. With enough gold answers, right answers decide: an engine may put things
differently and be as right. Without, agreement with full attention has to stand in for it.
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
"""So many questions full attention must answer right before accuracy decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """95 % intervals over questions: KL in nats per token, the shares of first choices and of whole answers."""

    kl: Interval
    top1: Interval
    answers: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """What must be sure: shares at least, KL at most."""

    top1: float
    answers: float
    kl: float


_LOSS: dict[Verdict, float] = {"good": 0.05, "fair": 0.10}  # accuracy lost against full, at most
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
    """By the interval of full's accuracy less the engine's, over the same questions."""
    for verdict, most in _LOSS.items():
        if loss[1] <= most + _ROUNDING:
            return verdict
    return "poor" if loss[0] > _LOSS["fair"] else UNKNOWN


def engine_verdict(found: Agreement, *, joined: bool) -> Verdict:
    """By agreement with full attention.

    `joined` scores (PCED) are no model's distribution, so their KL is shown and not judged.
    """
    return _by_agreement(_ENGINE, found, judge_kl=not joined)


def codec_verdict(found: Agreement, *, exact: bool) -> Verdict:
    """By agreement with the same engine on KV as the model made it; a codec that gives every bit back is good."""
    return "good" if exact else _by_agreement(_CODEC, found, judge_kl=True)


def engine_advice(engine: str, verdict: Verdict, *, tuned_for_blocks: bool, other: str | None) -> str:
    """One sentence; `other` is an engine that did well here."""
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
    """One sentence."""
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
