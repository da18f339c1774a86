"""Block-Attention (Block-Attention §2): chunks are encoded alone and placed one after another; the question sees all of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ragkv.attention.kv import ChunkKV, PlacedChunk
from ragkv.attention.sequence import TokenSequence, join
from ragkv.config import require_types
from ragkv.engines.base import Engine, ModelFacts, Program, Request, answer_from
from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.types import Capability, Encoding

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel

SINKS = ("prefix", "bos", "none")


def sink_tokens(sink: str, prefix_tokens: int) -> int:
    """How many of the prefix's first tokens form the block before the first chunk.

    Fine-tuning uses this and `block_starts`, so that a tuned model reads prompts in the form of its training.
    """
    return {"prefix": prefix_tokens, "bos": min(1, prefix_tokens), "none": 0}[sink]


def block_starts(lengths: Sequence[int], *, reencode: bool = True) -> list[int]:
    """The position of each block's first token: one block after another (§2.3), or each from 0, as it was encoded."""
    return [sum(lengths[:index]) if reencode else 0 for index in range(len(lengths))]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """`sink` is the block before the first chunk: the whole prefix, its first token (BOS) alone, or nothing. A
    block-tuned checkpoint records the sink that it was trained with; `auto` uses it, else `prefix`.

    `preset` names the paper's rows: `block`; `prompt-cache`, the same computation on a model that was not tuned for it
    (§3.3); `no-positions`, the ablation without re-encoding: keys keep the positions at which they were encoded.

    `over` is the chunk KV that it reads: `standalone`, as in the paper, or `prefixed`, encoded after the prompt's
    prefix. The prefix is then an attention sink for every chunk, and the first chunk is exactly that of full attention
    ("Link0", arXiv 2603.20218). On models that were not tuned for blocks, answers over `prefixed` are closer to full
    attention (docs/engines.md).

    """

    sink: Literal["auto", "prefix", "bos", "none"] = "auto"
    preset: Literal["block", "prompt-cache", "no-positions"] = "block"
    over: Literal["standalone", "prefixed"] = "standalone"

    def __post_init__(self) -> None:
        require_types(self, "block: ")
        if (self.over, self.preset) == ("prefixed", "no-positions"):
            raise ConfigError('block: preset = "no-positions" reads standalone chunk KV; set over = "standalone".')


class BlockAttention(Engine):
    """Chunk b starts where block b-1 ends; rotating the query re-encodes its keys to that position (§2.3, Eq. 3)."""

    name = "block"
    Config = BlockConfig

    @property
    def encoding(self) -> Encoding:
        return Encoding(self.config.over)

    @property
    def needs(self) -> frozenset[Capability]:
        return (
            frozenset({Capability.MERGE})
            if self.config.preset == "no-positions"
            else frozenset({Capability.MERGE, Capability.MOVE})
        )

    def warning(self, model: ModelFacts) -> str | None:
        preset = self.config.preset
        keeps_positions = model.checkpoint.recommended.get("positions") == "kept"
        if keeps_positions and preset != "no-positions":
            return (
                f"Model {model.checkpoint.name!r} was tuned without position re-encoding; "
                'read it as it was tuned, with preset = "no-positions" under [tuning.block] in ragkv.toml.'
            )
        if preset == "no-positions" and not keeps_positions:
            return (
                "Engine block runs without position re-encoding, which the paper keeps for comparison only "
                "(68.4 to 63.9 %)."
            )
        if model.checkpoint.recommended.get("block_tuned"):
            tuned = model.checkpoint.block_over
            if self.config.over == tuned:
                return None
            return (
                f"Model {model.checkpoint.name!r} was tuned for blocks over {tuned} chunk KV; "
                f'read it as it was tuned, with over = "{tuned}" under [tuning.block] in ragkv.toml.'
            )
        if preset == "prompt-cache":
            return "Engine block runs as Prompt Cache: chunk KV is reused by a model that was not trained for it."
        better = "" if self.config.over == "prefixed" else 'set over = "prefixed" under [tuning.block] in ragkv.toml, '
        return (
            f"Model {model.checkpoint.name!r} was not trained for Block-Attention, so answers may be worse "
            f"(67.9 to 48.0 % in the paper); {better}compare with --engine full, or tune it: ragkv finetune block."
        )

    def program(self, request: Request, model: ModelFacts) -> Program:
        placed = self.placed(model, request)
        sequence = TokenSequence.over(placed, position=sum(chunk.kv.tokens for chunk in placed))
        return answer_from(sequence, request.suffix_ids)

    def placed(self, model: ModelFacts, request: Request) -> tuple[PlacedChunk, ...]:
        """The sink, if there is one, and the non-empty chunks, each at its place in the prompt."""
        return self._placed(self._blocks(model, request))

    def cache(self, model: LanguageModel, request: Request) -> dict[str, Any]:
        """Arguments for transformers' own `generate`, for callers with their own loop: the paper's §2.5, literally.

        `past_key_values` is a plain `DynamicCache`: every key rotated to its position, all blocks concatenated, a copy
        that the caller owns. `input_ids` and `attention_mask` are `(1, tokens)` over blocks and question; without the
        mask, `generate` would take chunk text that equals the pad token for padding. UnsupportedModelError for
        `no-positions` on a model with sliding windows: transformers counts them by places in the cache.
        """
        import torch

        if self.config.preset == "no-positions" and model.windows:
            raise UnsupportedModelError(
                f"Model {model.checkpoint.name!r} has sliding windows, which transformers' generate would count by "
                'places in the cache and not by the kept positions of "no-positions"; set another preset.'
            )
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

    def _placed(self, blocks: list[ChunkKV]) -> tuple[PlacedChunk, ...]:
        starts = block_starts([kv.tokens for kv in blocks], reencode=self.config.preset != "no-positions")
        return tuple(PlacedChunk(kv=kv, start=start) for kv, start in zip(blocks, starts, strict=True))

    def _sink(self, model: ModelFacts, request: Request) -> ChunkKV | None:
        sink = self.config.sink
        if sink == "auto":
            sink = model.checkpoint.recommended.get("sink", "prefix")
            if sink not in SINKS:
                raise ConfigError(
                    f"ragkv.json of model {model.checkpoint.name!r} names the sink {sink!r}; it must be one of "
                    f"{', '.join(SINKS)}."
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
