"""A greedy answer token by token, and how far another engine or codec diverges from it at every step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragkv.decoding import GREEDY, Decoding
from ragkv.errors import UnsupportedModelError

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel
    from ragkv.runtime import Stream

__all__ = ["Comparison", "Trace", "follow", "greedy", "next_token_kl"]

_LEAST = -100.0
"""Lower bound for log-probabilities, so that one impossible token leaves the mean finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A greedy answer: its tokens (with the end token), its text, and the distribution that each token came from.

    `log_probs[i]` is `(vocab,)` in fp32 and belongs to the token `ids[i]`.
    """

    ids: tuple[int, ...]
    text: str
    log_probs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run along a reference's tokens: for each, KL(reference ‖ run) in nats and whether the first choice agrees."""

    kl: tuple[float, ...]
    agreed: tuple[bool, ...]
    log_probs: tuple[Tensor, ...]

    @property
    def same_answer(self) -> bool:
        """Whether it chose every token of the reference, so that on its own it gives the same answer."""
        return all(self.agreed)


def greedy(model: LanguageModel, stream: Stream, *, max_new_tokens: int, decoding: Decoding = GREEDY) -> Trace:
    """The stream's own first choices, up to an end token, a stop of `decoding`, or `max_new_tokens`.

    Other settings of `decoding` are ignored, because the comparison is about the engine's unchanged scores.
    """
    ends = model.eos_ids.union(decoding.stop_ids)
    ids: list[int] = []
    log_probs = []
    while True:
        log_probs.append(_log_probs(model, stream.scores))
        ids.append(stream.best())
        text = model.tokens.decode([i for i in ids if i not in ends])
        cuts = [at for stop in decoding.stop if (at := text.find(stop)) >= 0]
        if cuts or ids[-1] in ends or len(ids) == max_new_tokens:
            break
        stream.advance(ids[-1])
    return Trace(ids=tuple(ids), text=text[: min(cuts, default=None)].strip(), log_probs=tuple(log_probs))


def follow(model: LanguageModel, stream: Stream, reference: Trace) -> Comparison:
    """Run the stream along the reference's tokens (teacher forcing), so that every step has the same past."""
    kl, agreed, log_probs = [], [], []
    for step, token_id in enumerate(reference.ids):
        if step:
            stream.advance(reference.ids[step - 1])
        log_probs.append(_log_probs(model, stream.scores))
        kl.append(next_token_kl(reference.log_probs[step], log_probs[-1]))
        agreed.append(stream.best() == token_id)
    return Comparison(kl=tuple(kl), agreed=tuple(agreed), log_probs=tuple(log_probs))


def next_token_kl(reference: Tensor, other: Tensor) -> float:
    """KL(reference ‖ other) in nats of two `(vocab,)` log-distributions in fp32."""
    terms = reference.exp() * (reference - other.clamp_min(_LEAST))
    return max(0.0, float(terms.where(reference.isfinite(), 0.0).sum()))  # 0·log 0 = 0


@torch.inference_mode()
def _log_probs(model: LanguageModel, scores: Tensor) -> Tensor:
    found = torch.log_softmax(scores.float(), -1)
    if math.isnan(float(found.sum())):
        raise UnsupportedModelError(
            f"Model {model.checkpoint.name!r} computes NaN scores in {str(model.dtype)[6:]}; "
            "use another dtype, such as float32 or bfloat16."
        )
    return found
