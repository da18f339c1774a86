"""APE, adaptive parallel encoding (APE §4, Appendix C): chunks share positions, one softmax group at T and S."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ragkv.config import one_of
from ragkv.context import Context, ContextGroup
from ragkv.engines.base import CausalStream, Engine, Request
from ragkv.errors import ConfigError
from ragkv.kv import PlacedKV
from ragkv.types import Encoding

if TYPE_CHECKING:
    from ragkv.model import LanguageModel

__all__ = ["APE", "APEConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class APEConfig:
    """Temperature T and scale S (APE §4.4); T = S = 1 with an empty prefix is PCW.

    The default reweighs nothing; another pair is searched for a model and its documents (`ragkv tune`).
    `scale_mode` says how S enters the merge: `power` is S·T·lse, as the paper searches it; `log` is T·lse + log S.
    """

    temperature: float = 1.0
    scale: float = 1.0
    scale_mode: Literal["power", "log"] = "power"

    def __post_init__(self) -> None:
        if not 0 < self.temperature <= 2 or not 0 < self.scale <= 2:
            raise ConfigError("ape: temperature and scale must lie in (0, 2].")
        one_of("ape: scale_mode", self.scale_mode, ("power", "log"))


class APE(Engine):
    """Every chunk stands at position P, right after the shared prefix; the question at P + the longest chunk.

    The chunks are one softmax group (Eq. 5); prefix, question and generated tokens stay ordinary attention.
    """

    name = "ape"
    encoding = Encoding.PREFIXED
    Config = APEConfig

    def start(self, model: LanguageModel, request: Request) -> CausalStream:
        at = request.prefix_tokens
        groups = []
        if request.prefix is not None:
            groups.append(ContextGroup(chunks=(PlacedKV(kv=request.prefix, start=0),)))
        chunks = tuple(PlacedKV(kv=request.chunks[i].stored(), start=at) for i in request.filled)
        if chunks:
            config: APEConfig = self.config
            groups.append(
                ContextGroup(
                    chunks=chunks,
                    temperature=config.temperature,
                    scale=config.scale,
                    scale_mode=config.scale_mode,
                )
            )
        longest = max((placed.kv.tokens for placed in chunks), default=0)
        return CausalStream(model, request.suffix_ids, start=at + longest, context=Context(groups=tuple(groups)))
