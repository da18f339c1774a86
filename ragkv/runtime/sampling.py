"""The next token from a request's scores: transformers' own logits processors, a generator of the request's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ragkv.decoding import Decoding
from ragkv.engines.program import Choose

__all__ = ["Sampler", "processors"]


class Sampler:
    """Chooses one request's tokens. It belongs to that request: neither threads nor engines share one.

    The order is that of transformers' `generate`: repetition penalty, processors of the caller's own, temperature,
    top-k, top-p, min-p; the draw is that of `torch.multinomial` from a `torch.Generator` seeded with
    `decoding.seed`, so that `full` draws what `generate(do_sample=True)` draws after `torch.manual_seed` of the same
    number. Where nothing changes the scores, the choice is the engine's own (`Choose.best`), which knows how it breaks
    ties. All choices stay on the device, so that one transfer tells those of all requests.
    """

    def __init__(self, decoding: Decoding, own: Sequence[Any] = ()) -> None:
        self._decoding = decoding.settled()
        self._chain = processors(self._decoding, own)
        self._generator: torch.Generator | None = None

    @torch.inference_mode()
    def choose(self, asked: Choose, ids: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """The token after `ids`, those generated so far, 0-dim; and, for a draw, whether all scores were finite."""
        if not self._chain and not self._decoding.heat:
            return asked.best(), None
        scores = asked.scores[None]  # (1, vocab)
        if self._chain:
            # a copy: a processor may write in place, and others still need the scores
            generated = torch.tensor([list(ids)], dtype=torch.long).to(scores.device, non_blocking=True)
            scores = self._chain(generated, scores.clone())
        if not self._decoding.heat:
            return scores[0].argmax(), None
        return self._draw(torch.softmax(scores, -1))

    def _draw(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        if self._generator is None:
            self._generator = torch.Generator(device=shares.device)
            self._generator.manual_seed(self._decoding.seed or 0)
        finite = shares.isfinite().all()
        # what is drawn from other numbers is not used, but the draw must not fail for the requests beside it
        shares = torch.where(finite, shares, torch.ones_like(shares))
        # what torch.multinomial does for one draw, but for its waiting to be told that these are probabilities
        times = torch.empty_like(shares).exponential_(generator=self._generator)
        return (shares / times).argmax(-1)[0], finite


def processors(decoding: Decoding, own: Sequence[Any] = ()) -> Any:
    """transformers' `LogitsProcessorList` for these settings; empty where the scores stay as they are.

    Its `input_ids` are the generated tokens alone: what `prompt_ignore_length` of transformers' penalty does.
    """
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    chain = LogitsProcessorList()
    if decoding.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(float(decoding.repetition_penalty)))
    chain.extend(own)
    if not decoding.heat:
        return chain
    if decoding.heat != 1:
        chain.append(TemperatureLogitsWarper(float(decoding.heat)))
    if decoding.top_k_tokens is not None:
        chain.append(TopKLogitsWarper(decoding.top_k_tokens))
    if decoding.top_p is not None and decoding.top_p < 1:
        chain.append(TopPLogitsWarper(float(decoding.top_p)))
    if decoding.min_p is not None:
        chain.append(MinPLogitsWarper(float(decoding.min_p)))
    return chain
