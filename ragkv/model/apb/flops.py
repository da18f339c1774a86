"""The cost of a prefill in floating-point operations, multiplications and additions counted apart (APB, Table 6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ragkv.model.apb.layout import Layout

__all__ = ["Shape", "apb_flops", "full_flops", "passing_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a decoder with gated feed-forward layers that its cost depends on."""

    layers: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a transformers configuration."""
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            q_heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )

    @property
    def width(self) -> int:
        """Of all query heads together: d of the formulas for attention."""
        return self.q_heads * self.head_dim

    @property
    def keys(self) -> int:
        """For the keys and values of one token in one layer."""
        return 4 * self.hidden * self.kv_heads * self.head_dim

    @property
    def token(self) -> int:
        """c: for one token in one layer, attention left out; 4d²(1+1/g) + 6dI where q_heads·head_dim is d."""
        return 4 * self.hidden * self.width + self.keys + 6 * self.hidden * self.inner


def _layers(shape: Shape, tokens: int, pairs: float) -> float:
    """A pass for keys and values alone, with `pairs` of a query and a key it sees: the last layer makes only these."""
    return (shape.layers - 1) * (tokens * shape.token + 4 * shape.width * pairs) + tokens * shape.keys


def full_flops(shape: Shape, tokens: int) -> float:
    """Plain causal attention over one sequence: L[n·c + 2d·n²], the last layer as in `apb_flops`."""
    return _layers(shape, tokens, tokens * tokens / 2)


def apb_flops(
    shape: Shape, layout: Layout, *, anchors: int = 1, compressor: float = 0, only: Iterable[int] | None = None
) -> float:
    """All blocks together, or `only` these: L[(n + a·l_a)·c + 2d(Σ l_b² + a·l_a²) + 4d·Σ_h l_b·(l_a + passing) + R].

    `anchors` a: how often the anchor is computed. One process does it once; machines that share nothing but what is
    passed on do it H-1 times, which is the paper's formula, with (H-1)(l_a + l_b)². `compressor` R is what it costs per
    layer. The last layer makes keys and values and nothing else.
    """
    anchor = layout.anchor if layout.blocks > 1 else 0
    lengths = {block: len(layout.span(block)) for block in (range(layout.blocks) if only is None else only)}
    seen = sum(
        tokens * (layout.start + (anchor if block else 0) + layout.passing(block)) for block, tokens in lengths.items()
    )
    own = sum(tokens**2 for tokens in lengths.values()) / 2
    beside = anchors * anchor * (anchor / 2 + layout.start)
    tokens = sum(lengths.values()) + anchors * anchor
    return _layers(shape, tokens, seen + own + beside) + shape.layers * compressor


def passing_bytes(shape: Shape, layout: Layout, itemsize: int) -> int:
    """Bytes that one block passes on in all layers, keys and values, at most: 2·L·l_p·kv_heads·head_dim·itemsize."""
    return 2 * shape.layers * layout.lengths.passing * shape.kv_heads * shape.head_dim * itemsize
