"""Focus: read only the chunks that matter. Chunks of less than `share` of the best one's relevance are left out."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.attention.context import Context, ContextGroup
from ragkv.attention.kv import PlacedKV
from ragkv.engines import Engine, Request, Stream
from ragkv.engines.base import CausalStream
from ragkv.errors import ConfigError
from ragkv.model.language import LanguageModel
from ragkv.types import Encoding


@dataclass(frozen=True, slots=True, kw_only=True)
class FocusConfig:
    """`share` 0 reads every chunk, 1 the best one alone; `[tuning.focus]` in ragkv.toml."""

    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError("focus: share must lie in [0, 1].")


class Focus(Engine):
    """Chunks encoded after the prefix (so `--engines ape` at ingest serves it too), the best one right before
    the question, each at a place of its own, under ordinary attention."""

    name = "focus"
    encoding = Encoding.PREFIXED
    Config = FocusConfig

    def start(self, model: LanguageModel, request: Request) -> Stream:
        best = max((request.chunks[i].score for i in request.filled), default=0.0)
        placed = [] if request.prefix is None else [PlacedKV(kv=request.prefix, start=0)]
        at = request.prefix_tokens
        for index in request.filled:  # ascending relevance
            chunk = request.chunks[index]
            if chunk.score >= self.config.share * best:
                placed.append(PlacedKV(kv=chunk.stored(), start=at))
                at = placed[-1].end
        context = Context(groups=(ContextGroup(chunks=tuple(placed)),)) if placed else Context()
        return CausalStream(model, request.suffix_ids, start=at, context=context)
