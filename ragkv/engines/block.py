"""Block-Attention (Block-Attention §2): chunks encoded alone, placed one after another, the question sees all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ragkv.attention.join import join
from ragkv.attention.kv import ChunkKV, Segment
from ragkv.attention.row import Row
from ragkv.config import one_of
from ragkv.engines.base import Engine, ModelFacts, Request
from ragkv.engines.program import Program, answer_from
from ragkv.errors import ConfigError
from ragkv.types import Encoding, Need

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel

__all__ = ["SINKS", "BlockAttention", "BlockConfig", "block_starts", "sink_tokens"]

SINKS = ("prefix", "bos", "none")


def sink_tokens(sink: str, prefix_tokens: int) -> int:
    """How many of the prefix's first tokens are the block before the first chunk.

    Fine-tuning lays its samples out by this and by `block_starts`, so that a tuned model reads what it was taught.
    """
    return {"prefix": prefix_tokens, "bos": min(1, prefix_tokens), "none": 0}[sink]


def block_starts(lengths: Sequence[int], *, reencode: bool = True) -> list[int]:
    """Where each block's first token stands: one block after another (§2.3), or each from 0, as it was encoded."""
    return [sum(lengths[:index]) if reencode else 0 for index in range(len(lengths))]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """`sink`: the block before the first chunk: the whole prefix, its first token (BOS) alone, or nothing.

    A block-tuned checkpoint records the sink that it was trained with; `auto` obeys it (`prefix` otherwise).
    `preset` names the paper's rows: `block`; `prompt-cache`, the same computation on a model that nobody tuned for it
    (§3.3); `no-positions`, the ablation without re-encoding: keys keep the positions at which they were encoded.
    """

    sink: Literal["auto", "prefix", "bos", "none"] = "auto"
    preset: Literal["block", "prompt-cache", "no-positions"] = "block"

    def __post_init__(self) -> None:
        one_of("block: sink", self.sink, ("auto", *SINKS))
        one_of("block: preset", self.preset, ("block", "prompt-cache", "no-positions"))


class BlockAttention(Engine):
    """Chunk b starts where block b-1 ends; its keys are re-encoded to that place by turning the query (§2.3, Eq. 3)."""

    name = "block"
    encoding = Encoding.STANDALONE
    Config = BlockConfig

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.MERGE}) if self.config.preset == "no-positions" else frozenset({Need.MERGE, Need.MOVE})

    def warning(self, model: ModelFacts) -> str | None:
        preset = self.config.preset
        kept = model.checkpoint.recommended.get("positions") == "kept"
        if kept and preset != "no-positions":
            return (
                f"Model {model.checkpoint.name!r} was tuned without position re-encoding; "
                'read it as it was tuned, with preset = "no-positions" under [tuning.block] in ragkv.toml.'
            )
        if preset == "no-positions" and not kept:
            return (
                "Engine block runs without position re-encoding, which the paper keeps for comparison only "
                "(68.4 to 63.9 %)."
            )
        if model.checkpoint.recommended.get("block_tuned"):
            return None
        if preset == "prompt-cache":
            return "Engine block runs as Prompt Cache: chunk KV is reused by a model that was not trained for it."
        return (
            f"Model {model.checkpoint.name!r} was not trained for Block-Attention, so answers may be worse "
            "(67.9 to 48.0 % in the paper); compare with --engine full, or tune it: ragkv finetune block."
        )

    def program(self, request: Request, model: ModelFacts) -> Program:
        blocks = self._blocks(model, request)
        row = Row.over(self._placed(blocks), position=sum(kv.tokens for kv in blocks))
        return answer_from(row, request.suffix_ids)

    def cache(self, model: LanguageModel, request: Request) -> dict[str, Any]:
        """Arguments for transformers' own `generate`, for those who bring their own loop: the paper's §2.5, literally.

        `past_key_values` is a plain `DynamicCache`: every key rotated to its place, all blocks concatenated, a copy
        that is the caller's. `input_ids` and `attention_mask` are `(1, tokens)` over blocks and question; without
        the mask, `generate` would take chunk text that equals the pad token for padding.
        """
        blocks = self._blocks(model, request)
        cache = model.cache(join(self._placed(blocks), model.rotary) if blocks else None)
        ids = request.prefix_ids[: blocks[0].tokens] if self._sink(model, request) is not None else ()
        ids += tuple(i for chunk in request.chunks for i in chunk.token_ids) + request.suffix_ids
        tokens = torch.tensor([ids], device=model.device)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "past_key_values": cache}

    def _blocks(self, model: ModelFacts, request: Request) -> list[ChunkKV]:
        """All blocks before the question's, in prompt order."""
        sink = self._sink(model, request)
        return ([] if sink is None else [sink]) + [request.chunks[i].stored() for i in request.filled]

    def _placed(self, blocks: list[ChunkKV]) -> tuple[Segment, ...]:
        starts = block_starts([kv.tokens for kv in blocks], reencode=self.config.preset != "no-positions")
        return tuple(Segment(kv=kv, start=start) for kv, start in zip(blocks, starts, strict=True))

    def _sink(self, model: ModelFacts, request: Request) -> ChunkKV | None:
        sink = self.config.sink
        if sink == "auto":
            sink = model.checkpoint.recommended.get("sink", "prefix")
            if sink not in SINKS:
                raise ConfigError(
                    f"ragkv.json of model {model.checkpoint.name!r} names the sink {sink!r}; "
                    f"it must be one of {', '.join(SINKS)}."
                )
        if sink == "bos" and request.prompt is not None and request.prompt.bos == "none":
            raise ConfigError(
                'sink = "bos" of the engine block needs a BOS, but [prompt] bos is "none"; '
                'set the sink to "prefix" or "none" under [tuning.block] in ragkv.toml.'
            )
        if request.prefix is None:
            return None
        tokens = sink_tokens(sink, request.prefix.tokens)
        if tokens in (0, request.prefix.tokens):
            return request.prefix if tokens else None
        return request.prefix.head(tokens)
