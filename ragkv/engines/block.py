"""Block-Attention (Block-Attention §2): chunks encoded alone, placed one after another, the question sees all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ragkv.config import one_of
from ragkv.context import Context, ContextGroup
from ragkv.engines.base import CausalStream, Engine, Request
from ragkv.kv import ChunkKV, PlacedKV
from ragkv.types import Encoding

if TYPE_CHECKING:
    from ragkv.model import LanguageModel

__all__ = ["BlockAttention", "BlockConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """`sink`: the block before the first chunk: the whole prefix, its first token (BOS) alone, or nothing.

    A block-tuned checkpoint records the sink that it was trained with; `auto` obeys it (`prefix` otherwise).
    """

    sink: Literal["auto", "prefix", "bos", "none"] = "auto"

    def __post_init__(self) -> None:
        one_of("block: sink", self.sink, ("auto", "prefix", "bos", "none"))


class BlockAttention(Engine):
    """Chunk b starts where block b-1 ends; its keys are re-encoded to that place by turning the query (§2.3, Eq. 3)."""

    name = "block"
    encoding = Encoding.STANDALONE
    Config = BlockConfig

    def warning(self, model: LanguageModel) -> str | None:
        if model.checkpoint.recommended.get("block_tuned"):
            return None
        return (
            f"Model {model.checkpoint.name!r} was not trained for Block-Attention, so answers may be worse "
            "(67.9 to 48.0 % in the paper); compare with --engine full."
        )

    def start(self, model: LanguageModel, request: Request) -> CausalStream:
        placed: list[PlacedKV] = []
        at = 0
        sink = self._sink(model, request)
        for kv in ([] if sink is None else [sink]) + [chunk.stored() for chunk in request.chunks]:
            placed.append(PlacedKV(kv=kv, start=at))
            at += kv.tokens
        context = Context(groups=(ContextGroup(chunks=tuple(placed)),) if placed else ())
        return CausalStream(model, request.suffix_ids, start=at, context=context)

    def _sink(self, model: LanguageModel, request: Request) -> ChunkKV | None:
        config: BlockConfig = self.config
        sink = model.checkpoint.recommended.get("sink", "prefix") if config.sink == "auto" else config.sink
        if sink == "none" or request.prefix is None:
            return None
        if sink == "bos":  # causal: the first token's KV does not depend on what follows it
            return ChunkKV(
                keys=tuple(k[:, :1] for k in request.prefix.keys),
                values=tuple(v[:, :1] for v in request.prefix.values),
            )
        return request.prefix
