"""What measured figures mean for the person who chooses an engine or a codec: a word and a sentence.

The thresholds are ragkv's own and are stated in docs/quality.md. With enough gold answers, right answers decide:
an engine may put things differently and be as right. Without, agreement with full attention has to stand in for it.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["ENOUGH", "Verdict", "codec_advice", "codec_verdict", "engine_advice", "engine_verdict"]

Verdict = Literal["good", "fair", "poor"]

ENOUGH = 10
"""So many questions full attention must answer right before accuracy decides."""

_LOSS: dict[Verdict, float] = {"good": 0.03, "fair": 0.10}  # accuracy lost against full
_ENGINE: dict[Verdict, tuple[float, float]] = {"good": (0.95, 0.05), "fair": (0.85, 0.5)}  # top-1 at least, KL at most
_CODEC: dict[Verdict, tuple[float, float]] = {"good": (0.99, 0.01), "fair": (0.95, 0.1)}

_ROUNDING = 1e-9

_REMEDY = {
    "ape": "search its temperature, scale and prefix on questions of yours: `ragkv tune FILE.jsonl`",
    "block": "use a model that was trained to read blocks",
    "pced": "give it better scores or fewer chunks (--top-k): retrieval decides which expert it believes",
}


def engine_verdict(*, kl: float, top1: float, loss: float | None, joined: bool) -> Verdict:
    """By `loss`, full's accuracy less the engine's, where it is known; else by agreement.

    `joined` scores (PCED) are no model's distribution, so their KL is shown and not judged.
    """
    if loss is not None:
        return next((verdict for verdict, most in _LOSS.items() if loss <= most + _ROUNDING), "poor")
    return _by_agreement(_ENGINE, top1, 0.0 if joined else kl)


def codec_verdict(*, exact: bool, kl: float, top1: float) -> Verdict:
    """By agreement with the same engine on KV as the model made it."""
    return "good" if exact else _by_agreement(_CODEC, top1, kl)


def engine_advice(engine: str, verdict: Verdict, *, tuned_for_blocks: bool, other: str | None) -> str:
    """One sentence; `other` is an engine that did well here."""
    if verdict == "good":
        return "Answers like full attention here; use it."
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
    }[verdict]


def _by_agreement(limits: dict[Verdict, tuple[float, float]], top1: float, kl: float) -> Verdict:
    for verdict, (least, most) in limits.items():
        if top1 >= least and kl <= most:
            return verdict
    return "poor"
