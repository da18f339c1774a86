"""One request's answer as it grows: which token comes next, what text may be shown, when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ragkv.decoding import GREEDY, Decoding
from ragkv.engines.program import Choose
from ragkv.errors import UnsupportedModelError
from ragkv.runtime.sampling import Sampler
from ragkv.runtime.text import Detokenizer, StopGate

if TYPE_CHECKING:
    from ragkv.engines import ModelFacts

__all__ = ["Decoder", "Generation", "Token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How one request's tokens are chosen, and when they end.

    `processors` and `criteria` are transformers' logits processors and stopping criteria of the caller's own; they
    get the generated ids `(1, n)` and the scores `(1, vocab)`.
    """

    max_new_tokens: int
    decoding: Decoding = GREEDY
    processors: Sequence[Any] = ()
    criteria: Sequence[Any] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token. `text` is what may be shown now; it is empty while a character is incomplete or the text
    may yet become a stop string.

    `winner` is the index of the chunk whose expert proposed it (PCED). `finish_reason` is set on the last one, which
    may be an end token without text; it never is when decoding was cancelled.
    """

    token_id: int
    text: str
    winner: int | None = None
    finish_reason: Literal["stop", "length"] | None = None


class Decoder:
    """Sampler, text and end of one request. End tokens, length and stop strings are judged here.

    transformers' `StopStringCriteria` tells that a string occurred, not which text to hold back until it is decided.
    """

    def __init__(self, model: ModelFacts, generation: Generation) -> None:
        self._generation = generation
        self._sampler = Sampler(generation.decoding, generation.processors)
        self._text = Detokenizer(model.tokens)
        self._gate = StopGate(generation.decoding.stop)
        self._ends = model.eos_ids.union(generation.decoding.stop_ids)
        self._ids: list[int] = []

    @property
    def remaining(self) -> int:
        """How many tokens may still come."""
        return self._generation.max_new_tokens - len(self._ids)

    def choose(self, asked: Choose) -> tuple[Tensor, Tensor | None]:
        """The next token, 0-dim, and whether the scores could be drawn from (None: nothing was drawn)."""
        return self._sampler.choose(asked, self._ids)

    def take(self, asked: Choose, token_id: int, winner: int | None, *, finite: bool, full: bool) -> Token:
        """The token that was chosen, with its text; `full`: the model has no position for another.

        Raises UnsupportedModelError when the scores were no numbers, and whatever a stopping criterion raises.
        """
        if not finite:
            raise UnsupportedModelError(
                "The model's scores are not finite numbers, so no token can be drawn; load it in float32 or bfloat16."
            )
        self._ids.append(token_id)
        ended = token_id in self._ends
        piece = "" if ended else self._gate.push(self._text.push(token_id))
        ended = ended or self._gate.closed or self._enough(asked.scores)
        last = ended or full or not self.remaining
        if last:
            piece += self._gate.push(self._text.flush()) + self._gate.flush()
        reason: Literal["stop", "length"] = "stop" if ended or self._gate.closed else "length"
        return Token(token_id=token_id, text=piece, winner=winner, finish_reason=reason if last else None)

    @torch.inference_mode()
    def _enough(self, scores: Tensor) -> bool:
        criteria = self._generation.criteria
        if not criteria:
            return False
        generated = torch.tensor([self._ids]).to(scores.device, non_blocking=True)
        return any(bool(torch.as_tensor(criterion(generated, scores[None])).all()) for criterion in criteria)
