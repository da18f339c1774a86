"""Linear layers that read few rows, against the ordinary ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ragkv.model.language_model
from ragkv.model.language_model import FEW, FewRowsLinear, read_few_rows


@pytest.fixture
def layers(monkeypatch):
    """Layers as they are, and as they are made on a processor with matrix units."""
    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Linear(96, 40, bias=bias, dtype=torch.bfloat16) for bias in (True, False)])
    swift = copy.deepcopy(plain)
    monkeypatch.setattr(ragkv.model.language_model, "processor_units", lambda: frozenset({"amx_bf16"}))
    read_few_rows(swift)
    assert {type(layer) for layer in swift} == {FewRowsLinear}
    return list(zip(plain, swift, strict=True))


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 3), (1, FEW), (1, FEW + 1), (1, 0)], ids=str)
def test_few_rows_give_the_same_as_many(layers, shape):
    """In the shape, layout and dtype of an ordinary layer, and rounded once from the same sum."""
    states = torch.randn(*shape, 96).bfloat16()
    with torch.no_grad():
        for plain, swift in layers:
            expected, found = plain(states), swift(states)
            assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
            torch.testing.assert_close(found, expected, atol=2**-7, rtol=2**-7)


def test_a_trained_layer_has_its_gradients(layers):
    for plain, swift in layers:
        states = torch.randn(2, 96).bfloat16()
        for layer in (plain, swift):
            layer(states).float().square().sum().backward()
        torch.testing.assert_close(swift.weight.grad, plain.weight.grad, atol=0, rtol=0)


def test_other_layers_and_processors_keep_their_own(monkeypatch):
    wide = nn.Sequential(nn.Linear(4, 4))
    half = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16))
    monkeypatch.setattr(ragkv.model.language_model, "processor_units", lambda: frozenset({"amx_bf16"}))
    read_few_rows(wide)
    monkeypatch.setattr(ragkv.model.language_model, "processor_units", lambda: frozenset({"avx512_bf16"}))
    read_few_rows(half)
    assert type(wide[0]) is type(half[0]) is nn.Linear
