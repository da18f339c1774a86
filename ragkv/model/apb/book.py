"""One long document that is encoded in blocks: the algorithm, wherever its blocks run (APB, Algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragkv.attention.kv import ChunkKV
from ragkv.model.apb.blockpass import BlockPass, Exchange, Kept, Seeing, gathered
from ragkv.model.apb.compressor import AttentionScore, Compressor
from ragkv.model.apb.layout import Layout

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel

__all__ = ["Block", "Book", "question_score"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """An encoded block: its KV, and by layer which of its tokens it passes on, `(kv_heads, p)`.

    A layer that reads another's keys passes nothing on.
    """

    kv: ChunkKV
    chosen: tuple[Tensor, ...]

    def kept(self, layer: int) -> Kept:
        """C_h in this layer, taken from the block's own KV."""
        return gathered(self.kv.keys[layer], self.kv.values[layer], self.chosen[layer], self.kv.encoded_at)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Book:
    """A document's tokens, how they are cut, and what encodes them.

    `prefix` is the KV of the `layout.start` tokens before the document; `question_ids` stand at the anchor's head.
    `anchor_kv` is the anchor, where it is there already.
    """

    model: LanguageModel
    layout: Layout
    ids: tuple[int, ...]
    compressor: Compressor
    prefix: ChunkKV | None = None
    question_ids: tuple[int, ...] = ()
    anchor_kv: ChunkKV | None = None

    def __post_init__(self) -> None:
        prefix = 0 if self.prefix is None else self.prefix.tokens
        if (self.layout.tokens, self.layout.start, self.layout.question) != (
            len(self.ids),
            prefix,
            len(self.question_ids),
        ):
            raise ValueError("the layout is of another document, prefix or question")

    def anchor(self) -> ChunkKV | None:
        """The anchor's KV, which sees the prefix and itself: an ordinary chunk after the prefix, equal for all blocks.

        None where no block sees any of it. Every process that runs blocks makes it, in the same way.
        """
        head = (*self.question_ids, *self.ids[: self.layout.anchor_head])
        if self.anchor_kv is not None or self.layout.blocks < 2 or not head:
            return self.anchor_kv
        [made] = self.model.encode([head], prefix=self.prefix)
        return made

    def encode(self, block: int, anchor: ChunkKV | None, exchange: Exchange) -> Block:
        """Encode one block; `exchange` gets and gives what is passed on, once per layer."""
        layout, model = self.layout, self.model
        seen = (self.prefix, anchor if block else None)
        span = layout.span(block)
        one = BlockPass(
            block,
            [kv for kv in seen if kv is not None],
            layout.position(block),
            exchange,
            self.compressor,
            candidates=layout.candidates(block),
            most=layout.passed(block),
            rotary=model.rotary,
            last=model.last_own,
            shared=model.shared,
        )
        model.through(self.ids[span.start : span.stop], layout.position(block), one)
        nothing = torch.empty((0, layout.passed(block)), dtype=torch.long)
        chosen = tuple(one.chosen.get(layer, nothing) for layer in range(model.layers))
        return Block(kv=one.done(len(span)), chosen=chosen)


class _Listening(Seeing):
    """Remembers the queries of every layer."""

    def __init__(self, before: Sequence[ChunkKV], position: int, *, last: int, shared: dict[int, int]) -> None:
        super().__init__(before, position, last=last, shared=shared)
        self.queries: dict[int, Tensor] = {}

    def layer_known(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        self.queries[layer] = query


def question_score(
    model: LanguageModel, question_ids: tuple[int, ...], prefix: ChunkKV | None, *, position: int
) -> AttentionScore:
    """The compressor that asks with this question, standing at `position`: one short pass over prefix and question."""
    start = 0 if prefix is None else prefix.tokens
    heard = _Listening([] if prefix is None else [prefix], start, last=model.last_own, shared=dict(model.shared))
    model.through(question_ids, start, heard)
    turned = {}
    for layer, query in heard.queries.items():
        further = torch.full((1, query.shape[2]), position - start, device=query.device)
        turned[layer] = model.rotary.rotate(query, layer, further)[0]
    return AttentionScore(turned, " ".join(map(str, question_ids)))
