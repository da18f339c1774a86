"""What each engine makes of a request; configurations and arithmetic on logits are the product's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ragkv.attention.kv import ChunkKV, PlacedChunk
from ragkv.engines import Request
from ragkv.engines.block import BlockConfig, block_starts, sink_tokens
from ragkv.model.language_model import LanguageModel
from single.attention import Group
from single.causal import CausalStream, Stream
from single.expert import ExpertStream
from single.mapreduce import mapreduce

__all__ = ["ENGINES"]


def _full(model: LanguageModel, _config: Any, request: Request) -> Stream:
    chunks = [i for chunk in request.chunks for i in chunk.token_ids]
    return CausalStream(model, [*request.prefix_ids, *chunks, *request.suffix_ids], start=0)


def _single(model: LanguageModel, _config: Any, request: Request) -> Stream:
    best = [i for chunk in request.chunks[-1:] for i in chunk.token_ids]
    return CausalStream(model, [*request.prefix_ids, *best, *request.suffix_ids], start=0)


def _ape(model: LanguageModel, config: Any, request: Request) -> Stream:
    at = request.prefix_tokens
    chunks = tuple(PlacedChunk(kv=request.chunks[i].stored(), start=at) for i in request.filled)
    group = Group(segments=chunks, temperature=config.temperature, scale=config.scale, scale_mode=config.scale_mode)
    longest = max((segment.kv.tokens for segment in chunks), default=0)
    return CausalStream(model, request.suffix_ids, start=at + longest, groups=[Group(segments=request.before), group])


def _block(model: LanguageModel, config: BlockConfig, request: Request) -> Stream:
    sink = model.checkpoint.recommended.get("sink", "prefix") if config.sink == "auto" else config.sink
    blocks = [request.chunks[i].stored() for i in request.filled]
    if request.prefix is not None and (tokens := sink_tokens(sink, request.prefix.tokens)):
        keys = tuple(key[:, :tokens] for key in request.prefix.keys)
        values = tuple(value[:, :tokens] for value in request.prefix.values)
        blocks.insert(0, ChunkKV(keys=keys, values=values))
    lengths = [kv.tokens for kv in blocks]
    starts = block_starts(lengths, reencode=config.preset != "no-positions")
    segments = tuple(PlacedChunk(kv=kv, start=start) for kv, start in zip(blocks, starts, strict=True))
    return CausalStream(model, request.suffix_ids, start=sum(lengths), groups=[Group(segments=segments)])


ENGINES: dict[str, Callable[[LanguageModel, Any, Request], Stream]] = {
    "full": _full,
    "all": _full,
    "single": _single,
    "ape": _ape,
    "block": _block,
    "pced": ExpertStream,
    "mapreduce": mapreduce,
}
