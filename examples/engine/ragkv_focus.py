"""Focus: read only the chunks that matter. Chunks of less than `share` of the best one's relevance are left out."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.engines import Engine, ModelFacts, PlacedChunk, Program, Request, TokenSequence, answer_from
from ragkv.errors import ConfigError
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

    def program(self, request: Request, model: ModelFacts) -> Program:
        best = max((request.chunks[i].score for i in request.filled), default=0.0)
        seen, at = list(request.before), request.prefix_tokens
        for index in request.filled:  # ascending relevance
            chunk = request.chunks[index]
            if chunk.score >= self.config.share * best:
                seen.append(PlacedChunk(kv=chunk.stored(), start=at))
                at = seen[-1].end
        return answer_from(TokenSequence.over(seen, position=at), request.suffix_ids)
