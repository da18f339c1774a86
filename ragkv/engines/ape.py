"""APE, adaptive parallel encoding (APE §4, Appendix C): chunks share positions and one softmax group with T, S."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ragkv.attention.kv import PlacedChunk
from ragkv.attention.sequence import ChunkGroup, TokenSequence
from ragkv.config import require_types
from ragkv.engines.base import Engine, ModelFacts, Program, Request, answer_from
from ragkv.errors import ConfigError
from ragkv.types import Capability, Encoding


@dataclass(frozen=True, slots=True, kw_only=True)
class APEConfig:
    """Temperature T and scale S (APE §4.4); T = S = 1 with an empty prefix is PCW.

    The default does not reweight; `ragkv tune` searches T and S for a model and its documents. `scale_mode` says how S
    enters the merge: `power` is S·T·lse, as the paper searches it; `log` is T·lse + log S.
    """

    temperature: float = 1.0
    scale: float = 1.0
    scale_mode: Literal["power", "log"] = "power"

    def __post_init__(self) -> None:
        if not 0 < self.temperature <= 2 or not 0 < self.scale <= 2:
            raise ConfigError("ape: temperature and scale must be in (0, 2].")
        require_types(self, "ape: ")


class APE(Engine):
    """All chunks begin at position P, right after the shared prefix; the question begins at P + the longest chunk.

    The chunks are one softmax group (Eq. 5); prefix, question and generated tokens stay ordinary attention.
    """

    name = "ape"
    encoding = Encoding.PREFIXED
    Config = APEConfig
    needs = frozenset({Capability.MERGE})

    def program(self, request: Request, model: ModelFacts) -> Program:
        config: APEConfig = self.config
        start = request.prefix_tokens
        chunks = tuple(PlacedChunk(kv=request.chunks[i].stored(), start=start) for i in request.filled)
        groups = (
            ChunkGroup(segments=request.before),
            ChunkGroup(
                segments=chunks,
                temperature=config.temperature,
                scale=config.scale,
                scale_mode=config.scale_mode,
            ),
        )
        longest = max((chunk.kv.tokens for chunk in chunks), default=0)
        return answer_from(
            TokenSequence(tuple(group for group in groups if group.segments), start + longest), request.suffix_ids
        )
