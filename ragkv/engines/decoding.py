"""Decoding of a stream into text: the loop that every engine's answer goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ragkv.decoding import GREEDY, Decoding
from ragkv.engines.base import Stream
from ragkv.engines.sampling import Sampler
from ragkv.engines.text import Detokenizer, StopGate

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel

__all__ = ["Token", "decode"]


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


def decode(
    model: LanguageModel,
    stream: Stream,
    *,
    max_new_tokens: int,
    decoding: Decoding = GREEDY,
    processors: Sequence[Any] = (),
    criteria: Sequence[Any] = (),
    cancelled: Callable[[], bool] | None = None,
) -> Iterator[Token]:
    """Tokens until an end token, a stop string, `max_new_tokens` or the model's last position, or until `cancelled()`
    says so before the next one.

    `processors` and `criteria` are transformers' logits processors and stopping criteria of the caller's own; they
    get the generated ids `(1, n)` and the scores `(1, vocab)`. End tokens, length and stop strings are judged here:
    transformers' `StopStringCriteria` tells that a string occurred, not which text to hold back until it is decided.
    """
    sampler, text, gate = Sampler(decoding, processors), Detokenizer(model.tokens), StopGate(decoding.stop)
    ends = model.eos_ids.union(decoding.stop_ids)
    ids: list[int] = []

    def room(stream: Stream) -> bool:
        return model.max_positions is None or stream.position < model.max_positions

    for step in range(1, max_new_tokens + 1):
        if cancelled is not None and cancelled():
            return
        token_id = sampler.choose(stream, ids)
        winner = stream.winner(token_id)
        ids.append(token_id)
        ended = token_id in ends
        piece = "" if ended else gate.push(text.push(token_id))
        ended = ended or gate.closed or _enough(criteria, ids, stream)
        last = ended or step == max_new_tokens or not room(stream)
        if last:
            piece += gate.push(text.flush()) + gate.flush()
        reason: Literal["stop", "length"] = "stop" if ended or gate.closed else "length"
        yield Token(token_id=token_id, text=piece, winner=winner, finish_reason=reason if last else None)
        if last or (cancelled is not None and cancelled()):
            return
        stream.advance(token_id)


@torch.inference_mode()
def _enough(criteria: Sequence[Any], ids: Sequence[int], stream: Stream) -> bool:
    if not criteria:
        return False
    scores = stream.scores[None]
    generated = torch.tensor([list(ids)], device=scores.device)
    return any(bool(torch.as_tensor(criterion(generated, scores)).all()) for criterion in criteria)
