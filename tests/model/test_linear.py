"""Linear layers that read few rows, against the ordinary ones."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ragkv.model.language_model
from ragkv.attention.sequence import TokenSequence
from ragkv.errors import UnsupportedModelError
from ragkv.model.checkpoint import int8_levels, resolve
from ragkv.model.language_model import (
    FEW,
    FewRowsLinear,
    Int8Linear,
    _merged_int8,
    int8_weights,
    read_few_rows,
)
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


class _Attention(nn.Module):
    def __init__(self, *, bias=True, dtype=torch.bfloat16):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(256, out, bias, dtype=dtype) for out in (192, 64, 64))

    def forward(self, states):
        return [layer(states) for layer in (self.q_proj, self.k_proj, self.v_proj)]


@pytest.fixture(params=[True, False], ids=["bias", "plain"])
def attention(request, monkeypatch):
    """Three layers that are given the same input, as they are and merged; and how often the merged product ran."""
    torch.manual_seed(0)
    plain = _Attention(bias=request.param)
    merged = copy.deepcopy(plain)
    monkeypatch.setattr(ragkv.model.language_model, "processor_units", lambda: frozenset({"amx_bf16"}))
    read_few_rows(merged)
    ran, product = [], ragkv.model.language_model._of_few_rows

    def counted(weight, *others):
        ran.append(len(weight))
        return product(weight, *others)

    monkeypatch.setattr(ragkv.model.language_model, "_of_few_rows", counted)
    return plain, merged, ran


@pytest.mark.parametrize("rows", [1, 3, FEW + 1])
@torch.no_grad()
def test_layers_with_the_same_input_are_computed_as_one(attention, rows):
    plain, merged, ran = attention
    for _ in range(2):
        states = torch.randn(1, rows, 256).bfloat16()
        for found, expected in zip(merged(states), plain(states), strict=True):
            assert (found.shape, found.is_contiguous()) == (expected.shape, True)
            torch.testing.assert_close(found, expected, atol=2**-7, rtol=2**-7)
    assert ran == ([] if rows > FEW else [320, 320])


@torch.no_grad()
def test_cross_attention_is_not_merged(monkeypatch):
    monkeypatch.setattr(ragkv.model.language_model, "processor_units", lambda: frozenset({"amx_bf16"}))
    layer = nn.ModuleDict({"self_attn": _Attention(), "encoder_attn": _Attention()})
    read_few_rows(layer)
    assert [each.q_proj.merged is None for each in layer.values()] == [False, True]


@torch.no_grad()
def test_merged_layers_answer_each_input_however_they_are_asked(attention):
    """In any order, with another's input between (a pass of another thread), and alone."""
    plain, merged, _ = attention
    one, two = torch.randn(2, 1, 256).bfloat16()
    for name, states in (("v", one), ("q", one), ("q", two), ("k", one), ("v", two), ("k", two)):
        found, expected = (getattr(module, f"{name}_proj")(states) for module in (merged, plain))
        torch.testing.assert_close(found, expected, atol=2**-7, rtol=2**-7)


@pytest.mark.parametrize("how", ["in place", "data", "copy"])
@torch.no_grad()
def test_a_merged_layer_follows_its_weights(attention, how):
    _, merged, _ = attention
    states = torch.randn(1, 256).bfloat16()
    before = merged(states)
    if how == "copy":  # its weights are its own
        merged = copy.deepcopy(merged)
    for parameter in merged.k_proj.parameters():
        if how == "data":  # as a merge of adapters may do
            parameter.data = parameter * 2
        else:  # as an optimiser does
            parameter.mul_(2)
    after = merged(states)
    torch.testing.assert_close(after[1], before[1] * 2, atol=2**-6, rtol=2**-6)
    for place in (0, 2):
        torch.testing.assert_close(after[place], before[place], atol=0, rtol=0)


def test_other_layers_and_processors_keep_their_own(monkeypatch):
    wide = nn.Sequential(nn.Linear(4, 4))
    half = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16))
    monkeypatch.setattr(ragkv.model.language_model, "processor_units", lambda: frozenset({"amx_bf16"}))
    read_few_rows(wide)
    monkeypatch.setattr(ragkv.model.language_model, "processor_units", lambda: frozenset({"avx512_bf16"}))
    read_few_rows(half)
    assert type(wide[0]) is type(half[0]) is nn.Linear


def _int8(layer, levels=127):
    return Int8Linear([layer], levels)


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


@torch.no_grad()
def test_int8_layers_with_the_same_input_are_those_alone():
    apart, states = _Attention(dtype=torch.float32), torch.randn(2, 3, 256)
    found = [part(states) for part in _merged_int8([apart.q_proj, apart.k_proj, apart.v_proj])]
    for layer, together in zip((apart.q_proj, apart.k_proj, apart.v_proj), found, strict=True):
        assert torch.equal(together, Int8Linear([layer], int8_levels())(states))


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
    matrices = [layer for layer in plain.module.modules() if isinstance(layer, nn.Linear)]
    assert (plain.int8, int8_mini.int8) == (0, sum(each.weight.numel() + 4 * each.out_features for each in matrices))
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
