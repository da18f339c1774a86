"""One request at a time, as it was before there was a batch runtime: what batches of requests are held against.

    stream = single.stream(model, "ape", {"temperature": 0.9}, request)   # the engine's own tuning table
    stream.scores, stream.position                                        # of the next token
    stream.best(), stream.winner(token_id)
    stream.advance(token_id)
    ids, winners = single.greedy(stream, steps)                           # end tokens not heeded
    tokens = list(single.decode(model, stream, Generation(max_new_tokens=9)))

A chunk is read where it lies, in a call of its own, the experts of PCED are rows of one padded batch, own KV is
concatenated, and nothing is joined, packed, planned or shared. Of the product it uses `partial_attention` and
`merge_parts`, the model's own rotation, PCED's arithmetic on logits, and the sampler and detokeniser of one request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ragkv.engines import Request, Sample, make_engine
from ragkv.model.language_model import LanguageModel
from ragkv.runtime import Generation, Token
from ragkv.runtime.decoding import Decoder
from single.causal import Stream
from single.engine import ENGINES

__all__ = ["Stream", "decode", "greedy", "stream"]


def stream(model: LanguageModel, name: str, tuning: Mapping[str, Any] | None, request: Request) -> Stream:
    """The request after its question was read by engine `name`."""
    return ENGINES[name](model, make_engine(name, {name: tuning or {}}).config, request)


def greedy(stream: Stream, steps: int) -> tuple[list[int], list[int | None]]:
    """Greedy ids and winners, end tokens not heeded."""
    ids: list[int] = []
    winners: list[int | None] = []
    for _ in range(steps):
        ids.append(stream.best())
        winners.append(stream.winner(ids[-1]))
        stream.advance(ids[-1])
    return ids, winners


def decode(model: LanguageModel, stream: Stream, generation: Generation) -> Iterator[Token]:
    """The request's answer with its settings, token by token."""
    decoder = Decoder(model, generation)
    while True:
        asked = Sample(stream.scores, stream.winners, stream.order)
        chosen, finite = decoder.choose(asked)
        token_id, full = int(chosen), model.max_positions is not None and stream.position >= model.max_positions
        winner = stream.winner(token_id)
        token = decoder.take(asked, token_id, winner, finite=finite is None or bool(finite), full=full)
        yield token
        if token.finish_reason is not None:
            return
        stream.advance(token_id)
