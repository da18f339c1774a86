"""Linear layers that read few rows, against the ordinary ones."""

import copy
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ragkv.attention.sequence import TokenSequence
from ragkv.errors import UnsupportedModelError
from ragkv.model import linear
from ragkv.model.checkpoint import int8_levels, resolve
from ragkv.model.linear import (
    FEW,
    FEW_IN_FLOAT16,
    BesideFloat16Linear,
    FewRowsLinear,
    Float16Linear,
    Float16Weights,
    Int8Linear,
    _merged_int8,
    int8_weights,
    optimize_linear_layers,
    read_few_rows,
)
from ragkv.model.self_check import load_model


@pytest.fixture
def layers():
    """Layers as they are, and as they are made on a processor with matrix units."""
    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Linear(96, 40, bias=bias, dtype=torch.bfloat16) for bias in (True, False)])
    swift = copy.deepcopy(plain)
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
    read_few_rows(merged)
    ran, product = [], linear._of_few_rows

    def counted(weight, *others):
        ran.append(len(weight))
        return product(weight, *others)

    monkeypatch.setattr(linear, "_of_few_rows", counted)
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
def test_cross_attention_is_not_merged():
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


class _Packed(torch.Tensor):
    """Weights in a format of their own, as torchao's."""


def test_other_layers_keep_their_own():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    layers[1].weight = nn.Parameter(layers[1].weight.detach().as_subclass(_Packed), requires_grad=False)
    read_few_rows(layers)
    assert {type(layer) for layer in layers} == {nn.Linear}


def _int8(layer, levels=127):
    return Int8Linear([layer], levels)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("units", ["amx_bf16", "avx512_bf16"])
@pytest.mark.parametrize(
    "levels", [pytest.param(127, marks=pytest.mark.skipif(int8_levels() < 127, reason="no VNNI")), 63]
)
def test_int8_weights_are_all_that_is_rounded_much(bias, levels, units, monkeypatch):
    """Against the product with rounded weights: 13 bits of the largest state of a token at least; by either kernel."""
    monkeypatch.setattr(linear, "processor_units", lambda: frozenset({units}))
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
    assert (plain.int8, int8_mini.int8) == (False, True)
    assert int8_mini.packed_bytes == sum(each.weight.numel() + 4 * each.out_features for each in matrices)
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
    model = load_model(str(model_folder), dtype="float32", train=True)
    if broken == "device":
        monkeypatch.setattr(model, "device", torch.device("meta"))
    elif broken == "engine":
        monkeypatch.setattr(linear, "int8_levels", lambda: 63)
        monkeypatch.setattr(torch.backends, "quantized", SimpleNamespace(supported_engines=["qnnpack"]))
    else:  # the model's own code reads the weights
        monkeypatch.setattr(model.module.model.layers[0].mlp, "forward", lambda x: x @ model.module.lm_head.weight.T)
    with pytest.raises(UnsupportedModelError, match="int8 weights"):
        int8_weights(model)


# ---- float16

fbgemm = pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="no x86 processor")


def _matrix(dtype, size=1.0):
    """Rows of unlike sizes, with numbers of unlike sizes, and one of zeros."""
    made = torch.randn(300, 257, generator=torch.Generator().manual_seed(0)) * size
    made[:40] *= 2.0 ** torch.arange(-22, 18)[:, None]
    made[100:140] *= 2.0 ** -torch.arange(257)
    made[40] = 0
    return made.to(dtype)


@fbgemm
@torch.no_grad()
@pytest.mark.parametrize("size", [1e-30, 0.02, 1e30], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_float16_keeps_what_a_checkpoint_in_16_bits_has(dtype, size, bias):
    weight = _matrix(dtype, size if dtype == torch.bfloat16 else 1e-4)
    added = torch.randn(300) * size if bias else None
    packed = Float16Weights.of(weight, added)
    assert packed is not None
    wide = weight.float()
    off, largest = (packed.unpacked() - wide).abs(), wide.abs().amax(1, keepdim=True)
    assert bool((off <= 2.0**-39 * largest).all())
    assert not off[wide.abs() >= 2.0**-29 * largest].any()
    states = torch.randn(2, 5, 257)
    exact = nn.functional.linear(states.double(), wide.double(), None if added is None else added.double())
    room = 2e-6 * (states.double().abs() @ wide.double().abs().T + (size if bias else 0))
    assert bool(((packed.product(states) - exact).abs() <= room).all())


@fbgemm
def test_float32_numbers_are_kept_in_two():
    weight, bias, states = _matrix(torch.float32, 0.02), torch.randn(300), torch.randn(3, 257)
    assert Float16Weights.of(weight, bias) is None
    packed = Float16Weights.of(weight, bias, most=2)
    assert packed is not None
    assert packed.nbytes == 4 * weight.numel()
    largest = weight.abs().amax(1, keepdim=True)
    assert bool(((packed.unpacked() - weight).abs() <= 2.0**-22 * weight.abs() + 2.0**-50 * largest).all())
    exact = nn.functional.linear(states.double(), weight.double(), bias.double())
    room = 2e-6 * (states.double().abs() @ weight.double().abs().T) + 1e-6
    assert bool(((packed.product(states) - exact).abs() <= room).all())
    half = Float16Weights.of(_matrix(torch.bfloat16), None, most=2)
    assert half is not None
    assert half.nbytes == 2 * weight.numel()
    weight[3, 3] = torch.inf
    assert Float16Weights.of(weight, bias, most=2) is None


@fbgemm
@pytest.mark.parametrize("row", ["digits", "small", "inf", "nan"])
def test_a_matrix_that_float16_would_change_is_left(row):
    weight = _matrix(torch.bfloat16, 0.02).float()
    assert Float16Weights.of(weight, None)
    if row == "digits":
        weight[-1, -1] *= 1 + 2**-12
    elif row == "small":
        weight[200, -1] = weight[200].abs().max() * 2**-18 * (1 + 2**-12)  # only among the first rows
    else:
        weight[7, 7] = float(row)
    assert Float16Weights.of(weight, None) is None
    if row in ("digits", "small"):
        packed = Float16Weights.of(weight, None, most=2)
        assert packed is not None
        off = (packed.unpacked() - weight).abs()
        assert bool((off <= 2.0**-50 * weight.abs().amax(1, keepdim=True)).all())


@fbgemm
def test_a_float16_result_does_not_depend_on_other_rows():
    packed, states = Float16Weights.of(_matrix(torch.bfloat16), None), torch.randn(40, 257)
    together = packed.product(states)
    for first, last in ((0, 1), (3, 4), (5, 7), (8, 22), (1, 40)):
        assert torch.equal(packed.product(states[first:last]), together[first:last])
    assert torch.equal(packed.product(states[9]), together[9])
    assert packed.product(states[:0]).shape == (0, 300)


@pytest.fixture
def half_folder(make_folder, tmp_path):
    """A checkpoint in bfloat16 of a small Llama whose matrices are large enough."""
    sizes = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 160, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_bias=True)
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    folder = shutil.copytree(make_folder("llama"), tmp_path / "model")  # for its tokenizer
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def _matrices(model):
    return [layer for layer in model.module.modules() if isinstance(layer, nn.Linear)]


def _logits(model, *texts):
    return model.step([TokenSequence.over((), position=0) for _ in texts], [model.tokens.encode(t) for t in texts])


TEXTS = "The sea is salt because of rivers.", "one"


@fbgemm
def test_a_float32_model_holds_the_weights_of_its_checkpoint_in_16_bits(half_folder):
    exact, model = (load_model(str(half_folder), dtype="float32", train=train) for train in (True, False))
    matrices = _matrices(exact)
    assert [type(layer) for layer in _matrices(model)] == [Float16Linear] * len(matrices) == [Float16Linear] * 15
    assert model.packed_bytes == sum(2 * layer.weight.numel() for layer in matrices)
    assert (model.parameters, model.precision, exact.packed_bytes) == (exact.parameters, "float32", 0)
    held = sum(each.numel() for each in model.module.parameters())
    assert held == exact.parameters - sum(layer.weight.numel() for layer in matrices)
    torch.testing.assert_close(_logits(model, *TEXTS), _logits(exact, *TEXTS), atol=1e-4, rtol=1e-4)
    right, saved = exact.module.state_dict(), model.module.state_dict()
    assert right.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in right.items())


@fbgemm
def test_layers_whose_weights_are_read_are_ordinary_ones(half_folder):
    model = load_model(str(half_folder), dtype="float32", train=True)
    layer = model.module.model.layers[1].mlp
    own = layer.down_proj.forward
    layer.down_proj.forward = lambda x: own(x) + 0 * layer.up_proj.weight.sum()
    optimize_linear_layers(model)
    kinds = [type(layer.up_proj), type(layer.gate_proj)]
    assert kinds == [nn.Linear, Float16Linear]
    assert layer.up_proj.weight.dtype == torch.float32


@fbgemm
def test_a_float32_checkpoint_has_its_weights_beside_in_two(half_folder):
    with safe_open(half_folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1 + 1e-6
    save_file(tensors, half_folder / "model.safetensors", {"format": "pt"})
    exact, model = (load_model(str(half_folder), dtype="float32", train=train) for train in (True, False))
    mlp = model.module.model.layers[0].mlp
    kinds = [type(layer) for layer in (mlp.up_proj, mlp.gate_proj, mlp.down_proj)]
    assert kinds == [BesideFloat16Linear, BesideFloat16Linear, Float16Linear]
    every = sum(layer.weight.numel() for layer in _matrices(exact))
    assert model.packed_bytes == 2 * (every + 2 * mlp.gate_proj.weight.numel())
    torch.testing.assert_close(_logits(model, *TEXTS), _logits(exact, *TEXTS), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        for rows in (FEW_IN_FLOAT16, FEW_IN_FLOAT16 + 1):
            states = torch.randn(rows, 256)
            torch.testing.assert_close(mlp.up_proj(states), nn.functional.linear(states, mlp.up_proj.weight))


@fbgemm
def test_weights_in_a_format_of_their_own_are_left(half_folder):
    model = load_model(str(half_folder), dtype="float32", train=True)
    layer = model.module.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(_Packed), requires_grad=False)
    optimize_linear_layers(model)
    assert (type(layer), type(layer.weight.data)) == (nn.Linear, _Packed)
    assert type(model.module.model.layers[1].mlp.down_proj) is Float16Linear


@fbgemm
@pytest.mark.parametrize("why", ["amx", "memory", "train"])
def test_a_second_copy_is_made_where_it_is_of_use(half_folder, monkeypatch, why):
    monkeypatch.setattr(linear, "processor_units", lambda: frozenset({"amx_bf16" if why == "amx" else "avx512_bf16"}))
    if why == "memory":
        monkeypatch.setattr(linear, "device_memory", lambda device: 1 << 20)
    model = load_model(str(half_folder), dtype="bfloat16", train=why == "train")
    kinds = {type(layer) for layer in model.module.modules() if isinstance(layer, nn.Linear)}
    assert kinds == {FewRowsLinear if why == "amx" else nn.Linear}
    assert not model.packed_bytes


@fbgemm
def test_few_rows_in_bfloat16_are_computed_from_the_second_copy(half_folder, monkeypatch):
    monkeypatch.setattr(linear, "processor_units", lambda: frozenset({"avx512_bf16"}))
    exact, model = (load_model(str(half_folder), dtype="bfloat16", train=train) for train in (True, False))
    layer = model.module.lm_head
    assert type(layer) is BesideFloat16Linear
    assert model.packed_bytes == sum(layer.weight.nbytes for layer in _matrices(exact))
    torch.testing.assert_close(_logits(model, *TEXTS), _logits(exact, *TEXTS), atol=0.02, rtol=0.02)
    layer(torch.randn(2, 256).bfloat16()).sum().backward()
    assert layer.weight.grad is not None
    plain, states = exact.module.lm_head, torch.randn(FEW_IN_FLOAT16 + 1, 256).bfloat16()
    ran, product = [], Float16Weights.product
    monkeypatch.setattr(Float16Weights, "product", lambda self, rows: ran.append(len(rows)) or product(self, rows))
    with torch.no_grad():
        right = nn.functional.linear(states.float(), plain.weight.float()).bfloat16()
        assert torch.equal(layer(states), plain(states))
        assert torch.equal(layer(states[:-1]), right[:-1]), "rounded once"
        assert ran == [FEW_IN_FLOAT16]
        others = model.module.model.layers[0].mlp.up_proj, model.module.model.layers[1].mlp.up_proj
        others[0].weight.mul_(2)  # as an optimiser does
        others[1].weight.data = others[1].weight * 2  # as a merge of adapters may do
        for other in others:
            assert torch.equal(other(states[:1]), nn.functional.linear(states[:1], other.weight))
    assert ran == [FEW_IN_FLOAT16]
