"""Lengths, layouts, and the formula for the cost against what a pass really multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ragkv.errors import ConfigError
from ragkv.model.apb import Book, KeyNorm, Layout, Lengths, Sequential, lengths_for, star
from ragkv.model.apb.flops import Shape, apb_flops, full_flops, passing_bytes

K = 1024


def test_the_papers_lengths() -> None:
    assert lengths_for(32 * K - 1) is None
    assert lengths_for(32 * K) == Lengths(block=4 * K, anchor=K, passing=K // 2)
    assert lengths_for(100_000) == Lengths(block=16 * K, anchor=4 * K, passing=2 * K)
    assert lengths_for(10**7) == Lengths(block=64 * K, anchor=8 * K, passing=8 * K)
    for wrong in ({"block": 0}, {"block": 4, "anchor": 5}, {"block": 4, "passing": -1}):
        with pytest.raises(ConfigError):
            Lengths(**{"anchor": 0, "passing": 0, **wrong})


def test_blocks_cover_the_document_once() -> None:
    for n in range(1, 40):
        layout = Layout(tokens=n, lengths=Lengths(block=7, anchor=3, passing=6), start=5)
        spans = [layout.span(block) for block in range(layout.blocks)]
        assert [i for span in spans for i in span] == list(range(n))
        assert all(len(span) == 7 for span in spans[:-1])
        for block, span in enumerate(spans):
            assert layout.position(block) == 5 + span.start
            assert layout.passed(block) == min(6, len(span) - (0 if block else min(3, n)))
        assert layout.passing(layout.blocks - 1) <= 4 + 6 * max(0, layout.blocks - 2)


def test_the_papers_formula_is_that_of_machines_that_share_nothing() -> None:
    """Table 6, for H equal blocks: L[(n+(H−1)l_a)c + 2d(l_b²+(H−1)(l_a+l_b)²) + 2d·l_p·l_b·H(H−1)]."""
    shape = Shape(layers=400, hidden=4096, inner=14336, q_heads=32, kv_heads=8, head_dim=128)
    n, h, cut = 128 * K, 8, Lengths(block=16 * K, anchor=4 * K, passing=2 * K)
    d, c = 4096, 4 * 4096**2 * (1 + 1 / 4) + 6 * 4096 * 14336
    b, a, p = cut.block, cut.anchor, cut.passing
    paper = 400 * ((n + (h - 1) * a) * c + 2 * d * (b**2 + (h - 1) * (a + b) ** 2) + 2 * d * p * b * h * (h - 1))
    found = apb_flops(shape, Layout(tokens=n, lengths=cut), anchors=h - 1)
    assert found == pytest.approx(paper, rel=0.004)  # the last layer makes keys and values alone
    assert full_flops(shape, n) == pytest.approx(400 * (n * c + 2 * d * n**2), rel=0.004)
    assert passing_bytes(shape, Layout(tokens=n, lengths=cut), 2) == 400 * 2 * p * 8 * 128 * 2


def _flash(query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, **_: Any) -> int:
    """Two products of queries and keys that they see; of a causal square a half."""
    batch, heads, n, head_dim = query
    return int(4 * batch * heads * n * key[2] * head_dim / (2 if causal else 1))


@pytest.mark.parametrize(
    "cut", [Lengths(block=256, anchor=64, passing=32), star(256), Lengths(block=2048, anchor=0, passing=0)]
)
def test_counted_operations_are_those_of_the_formula(make_model: Any, cut: Lengths) -> None:
    model = make_model("llama")
    layout = Layout(tokens=1200, lengths=cut)
    book = Book(model=model, layout=layout, ids=(7,) * 1200, compressor=KeyNorm())

    def flash(*shapes: Any, out_shape: Any = None, is_causal: bool = False, **_: Any) -> int:
        causal = is_causal or any(each is True for each in shapes)
        return _flash(*shapes[:3], causal=causal)

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={kernel: flash}) as counter:
        list(Sequential().run(book))
    assert counter.get_total_flops() == pytest.approx(apb_flops(Shape.of(model.config), layout), rel=0.03)
