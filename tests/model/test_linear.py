"""Linear layers that read few rows, against the ordinary ones."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ragkv.model.language_model
from ragkv.attention.sequence import TokenSequence
from ragkv.errors import UnsupportedModelError
from ragkv.model.checkpoint import resolve
from ragkv.model.language_model import FEW, FewRowsLinear, Int8Linear, int8_weights, read_few_rows
from ragkv.model.self_check import load_model


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


def _int8(layer, levels=127):
    return Int8Linear(layer, levels)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("levels", [127, 63])
def test_int8_weights_are_all_that_is_rounded_much(bias, levels):
    """Against the product with rounded weights: 13 bits of the largest state of a token at least."""
    torch.manual_seed(0)
    layer = nn.Linear(768, 64, bias=bias)
    states = torch.randn(2, 5, 768) * torch.tensor([1.0, 1e-3, 10, 0, 1e4])[:, None]
    states[..., 7] *= 100  # trained models have such outliers
    scales = layer.weight.abs().amax(1, keepdim=True) / 127
    with torch.no_grad():
        expected = nn.functional.linear(states, (layer.weight / scales).round() * scales, layer.bias)
        found = _int8(layer, levels)(states)
    worst = states.abs().amax(-1, keepdim=True) / (4 * levels * levels) * layer.weight.abs().sum(1)
    sums = 1e-6 * (states.abs().amax(-1, keepdim=True) + 1) * layer.weight.abs().sum(1)  # of 768 numbers in float32
    assert bool(((found - expected).abs() <= worst + sums).all())


def test_an_int8_result_does_not_depend_on_other_tokens():
    layer, states = _int8(nn.Linear(256, 96)), torch.randn(6, 256) * torch.logspace(-2, 3, 6)[:, None]
    with torch.no_grad():
        together = layer(states)
        assert all(torch.equal(layer(states[at : at + 1])[0], together[at]) for at in range(6))


@pytest.fixture(scope="module")
def int8_mini():
    return load_model("mini", dtype="int8")


def test_a_model_with_int8_weights_names_them(int8_mini):
    plain = load_model("mini", dtype="float32")
    layers = [layer for layer in int8_mini.module.modules() if isinstance(layer, Int8Linear)]
    assert layers
    assert not any(type(layer) is nn.Linear for layer in int8_mini.module.modules())
    assert (int8_mini.precision, int8_mini.dtype, plain.precision) == ("int8", torch.float32, "float32")
    assert int8_mini.parameters == plain.parameters
    checkpoint = resolve("mini")
    assert checkpoint.fingerprint("int8") != checkpoint.fingerprint("float32")
    ids = plain.tokens.encode("The bakery in Harrow Lane opens at six.")
    exact, rounded = (m.step([TokenSequence.over((), position=0)], [ids]).log_softmax(-1) for m in (plain, int8_mini))
    assert 0 < float((exact.exp() * (exact - rounded)).sum()) < 0.05


def test_int8_requests_in_a_batch_are_those_alone(int8_mini):
    asked = [int8_mini.tokens.encode(text) for text in ("one", "The sea is salt because of rivers.", "a b c d e")]

    def step(*some):
        return int8_mini.step([TokenSequence.over((), position=0) for _ in some], some)

    together = step(*asked)
    for ids, logits in zip(asked, together, strict=True):
        torch.testing.assert_close(step(ids)[0], logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("broken", ["device", "engine", "code"])
def test_int8_weights_are_refused_where_they_cannot_be(model_folder, monkeypatch, broken):
    model = load_model(str(model_folder))
    if broken == "device":
        monkeypatch.setattr(model, "device", torch.device("meta"))
    elif broken == "engine":
        monkeypatch.setattr(ragkv.model.language_model, "int8_levels", lambda: 63)
        monkeypatch.setattr(torch.backends, "quantized", SimpleNamespace(supported_engines=["qnnpack"]))
    else:  # the model's own code reads the weights
        monkeypatch.setattr(model.module.model.layers[0].mlp, "forward", lambda x: x @ model.module.lm_head.weight.T)
    with pytest.raises(UnsupportedModelError, match="int8 weights"):
        int8_weights(model)
