"""Blend: block placement, with some of the chunks' tokens recomputed over their context.

A setting selects the tokens: those that the question attends to (InfoFlow, ProphetKV, FusionRAG), those whose values
deviate most from the stored ones (CacheBlend), the first ones of every chunk (EPIC), or random ones, as the control.
docs/engines.md lists the differences from the papers and their authors' code.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ragkv.attention.kv import PlacedChunk
from ragkv.attention.sequence import AttentionProbe, DeviationProbe, KVCache, RecomputedSequence, TokenSequence
from ragkv.config import one_of, require_types
from ragkv.engines.base import (
    Argmax,
    Demand,
    Engine,
    Forward,
    Join,
    ModelFacts,
    Operation,
    Program,
    Request,
    answer_from,
)
from ragkv.engines.block import BlockAttention, BlockConfig
from ragkv.errors import ConfigError
from ragkv.types import Capability, Encoding

_MIDDLE = {"select": "question", "score": "norm", "layers": "middle", "ratio": 0.15}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "blend": _MIDDLE,
    "cacheblend": _MIDDLE | {"select": "deviation", "ratio": 0.16},
    "epic": _MIDDLE | {"select": "first"},
    "infoflow": _MIDDLE,
    "prophet": _MIDDLE | {"score": "sum", "layers": "all", "ratio": 0.20},
}
"""The values of a preset, for settings that are "auto"."""
PROBED = 1
"""The layer whose values give the `deviation`: the first in which they depend on other tokens (CacheBlend §4.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendConfig:
    """Which tokens are recomputed: `ratio` of the chunks' tokens, chosen by `select`; with "first", the first `first`
    tokens of every chunk, whatever the ratio. `charge` replaces both: as many tokens as can be recomputed at that
    charge, which includes the cost of selecting them (`Blend.charge`).

    `over` is the stored KV that it reads. "question" scores by attention in `layers` ("middle": four from .60 of the
    depth on; "all", "last", or their numbers, from 0), by `score`. `seed` is that of "random". A `preset` replaces the
    settings that are "auto".
    """

    preset: Literal["blend", "cacheblend", "epic", "infoflow", "prophet"] = "blend"
    over: Literal["standalone", "prefixed"] = "prefixed"
    select: Literal["auto", "question", "deviation", "first", "random"] = "auto"
    ratio: float | str = "auto"
    charge: float | None = None
    first: int = 16
    layers: str | tuple[int, ...] = "auto"
    score: Literal["auto", "norm", "sum"] = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        require_types(self, "blend: ")
        if self.ratio != "auto" and (isinstance(self.ratio, str) or not 0 <= self.ratio <= 1):
            raise ConfigError('blend: ratio must be between 0 and 1, or be "auto".')
        if self.charge is not None and not 0 <= self.charge <= 1:
            raise ConfigError("blend: charge must be between 0 and 1.")
        if self.charge is not None and self.ratio != "auto":
            raise ConfigError("blend: give ratio or charge, not both.")
        if self.first < 0:
            raise ConfigError("blend: first must be a number of tokens that is not negative.")
        if isinstance(self.layers, str):
            one_of("blend: layers", self.layers, ("auto", "middle", "all", "last"))
        elif not self.layers or min(self.layers) < 0:
            raise ConfigError("blend: layers must be numbers of layers, from 0, at least one.")

    def settled(self, name: str) -> Any:
        """A setting, or the preset's value if it is "auto"."""
        value = getattr(self, name)
        return PRESETS[self.preset][name] if value == "auto" else value

    def scoring_layers(self, layers: int) -> frozenset[int]:
        """The layers, out of `layers`, whose attention scores the tokens. ConfigError names one that does not exist."""
        wanted = self.settled("layers")
        if wanted == "all":
            return frozenset(range(layers))
        if wanted == "last":
            return frozenset({layers - 1})
        if wanted == "middle":
            first = round(0.6 * layers)
            return frozenset(range(min(first, layers - 1), min(first + 4, layers)))
        if max(wanted) >= layers:
            raise ConfigError(f"blend: layers names layer {max(wanted)}, but the model has {layers}, counted from 0.")
        return frozenset(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    """The placed blocks of one question, and their token ids.

    `first`: the position of the first candidate; all tokens from there up to `end` are candidates. `asked` is the
    number of the question's tokens.
    """

    blocks: tuple[PlacedChunk, ...]
    ids: tuple[int, ...]
    chunks: tuple[PlacedChunk, ...]
    asked: int

    @property
    def end(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """All tokens of the chunks."""
        return sum(chunk.kv.tokens for chunk in self.chunks)

    @property
    def layers(self) -> int:
        return self.chunks[0].kv.layers if self.chunks else 1

    @property
    def candidates(self) -> tuple[PlacedChunk, ...]:
        """The chunks whose tokens may be recomputed: all except a first one that was encoded at its place."""
        return self.chunks[1:] if self.chunks and self.chunks[0].offset == 0 else self.chunks

    @property
    def first(self) -> int:
        return self.candidates[0].start if self.candidates else self.end


class Blend(Engine):
    """Rows S of the context are recomputed in place, each over everything before it: rows in S as recomputed, the rest
    as stored. The question then reads the result as with `block`.
    """

    name = "blend"
    Config = BlendConfig

    @property
    def encoding(self) -> Encoding:
        return Encoding(self.config.over)

    needs = frozenset(Capability)

    def charge(self, request: Request, model: ModelFacts) -> float | None:
        context = self._context(request, model)
        if not context.tokens:
            return 0.0
        fresh = context.layers * self._recomputed(context) + self._selects(context) * self._choosing(context)
        return fresh / (context.layers * context.tokens)

    def demand(self, request: Request, max_new_tokens: int) -> Demand:
        return Demand(sequences=1, tokens=request.tokens + max_new_tokens)

    def program(self, request: Request, model: ModelFacts) -> Program:
        context, ids = self._context(request, model), request.suffix_ids
        if not self._recomputed(context):
            return answer_from(TokenSequence.over(context.blocks, position=context.end), ids)
        return self._blended(context, ids)

    def _blended(self, context: _Context, ids: Sequence[int]) -> Program:
        cache: KVCache = yield Join(context.blocks, len(ids))
        chosen = yield from self._chosen(context, cache, ids)
        fresh = RecomputedSequence((), chosen[0], context=cache, indices=chosen)
        yield Forward((fresh,), ([context.ids[place] for place in chosen],))
        yield from answer_from(TokenSequence((), context.end, cache), ids)

    def _chosen(self, context: _Context, cache: KVCache, ids: Sequence[int]) -> Generator[Operation, Any, list[int]]:
        """The positions of the tokens to recompute, ascending."""
        config: BlendConfig = self.config
        select, everything = config.settled("select"), range(context.first, context.end)
        if select == "first":
            most = self._heads(context)
            return [place for chunk in context.candidates for place in range(chunk.start, chunk.end)[:most]]
        k = self._recomputed(context)
        if not self._selects(context):
            return list(everything)
        if select == "random":
            return sorted(random.Random(config.seed).sample(everything, k))
        probe: AttentionProbe | DeviationProbe
        if select == "question":
            layers = config.scoring_layers(context.layers)
            rule = config.settled("score")
            probe = AttentionProbe((), context.end, cache, layers=layers, first=context.first, rule=rule)
            yield Forward((probe,), (ids,))
            cache.length = context.end  # drop the question, which reads the context again after the change
        else:
            layer = min(PROBED, context.layers - 1)
            probe = DeviationProbe((), context.first, context=cache, indices=everything, layer=layer)
            yield Forward((probe,), (context.ids[context.first :],))
        scores: Tensor = probe.scores
        found: list[int] = yield Argmax(scores[None], k)
        return sorted(context.first + place for place in found)

    def _recomputed(self, context: _Context) -> int:
        """How many tokens are recomputed."""
        config: BlendConfig = self.config
        if config.settled("select") == "first":
            most = self._heads(context)
            return sum(min(most, chunk.kv.tokens) for chunk in context.candidates)
        return min(self._budget(context), context.end - context.first)

    def _heads(self, context: _Context) -> int:
        """How many tokens at the beginning of each chunk are recomputed for `select = "first"`."""
        config: BlendConfig = self.config
        return config.first if config.charge is None else self._budget(context) // max(1, len(context.candidates))

    def _budget(self, context: _Context) -> int:
        """How many tokens the ratio or the charge allows; recomputing all candidates needs no selection."""
        config: BlendConfig = self.config
        k = int((config.settled("ratio") if config.charge is None else config.charge) * context.tokens + 1e-9)
        if config.charge is None or k >= context.end - context.first:
            return k
        return max(0, int(config.charge * context.tokens - self._choosing(context) / context.layers + 1e-9))

    def _choosing(self, context: _Context) -> int:
        """The cost of selecting: tokens times layers."""
        config: BlendConfig = self.config
        if config.settled("select") == "question":
            return context.asked * (max(config.scoring_layers(context.layers)) + 1)
        if config.settled("select") == "deviation":
            return (context.end - context.first) * min(PROBED + 1, context.layers)
        return 0

    def _selects(self, context: _Context) -> bool:
        """Whether it has to select: some candidates are recomputed, and some are not."""
        return 0 < self._recomputed(context) < context.end - context.first

    def _context(self, request: Request, model: ModelFacts) -> _Context:
        blocks = BlockAttention(BlockConfig(over=self.config.over)).placed(model, request)
        sinks = len(blocks) - len(request.filled)
        chunks, ids = blocks[sinks:], request.prefix_ids[: sum(block.kv.tokens for block in blocks[:sinks])]
        ids += tuple(i for index in request.filled for i in request.chunks[index].token_ids)
        return _Context(blocks=blocks, ids=ids, chunks=chunks, asked=len(request.suffix_ids))
