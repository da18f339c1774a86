"""Linear layers and norms computed by ragkv's kernels, against torch's."""

import copy
import platform
import shutil
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ragkv.attention.sequence import TokenSequence
from ragkv.errors import UnsupportedModelError
from ragkv.model import language_model, linear
from ragkv.model.checkpoint import resolve
from ragkv.model.linear import HalfLinear, Int8Linear, KernelLinear, int8_weights, optimize_layers
from ragkv.model.self_check import load_model
from ragkv.util.plugins import kernel_module

layer_kernels = pytest.importorskip("ragkv.model.layer_kernels", exc_type=ImportError)
kernels = layer_kernels.kernels
needs_vnni = pytest.mark.skipif(not layer_kernels.kernels.has_dot("int8"), reason="no VNNI")
needs_dot = pytest.mark.skipif(not layer_kernels.kernels.has_dot("bfloat16"), reason="no AVX512-BF16")


def _layer(in_features, out_features, dtype, *, bias=True, held=None):
    """A layer in `dtype` whose weights are stored in another dtype."""
    layer = nn.Linear(in_features, out_features, bias=bias, dtype=dtype).requires_grad_(False)
    if held is not None:
        layer.weight = nn.Parameter(layer.weight.to(held), requires_grad=False)
        layer.__class__ = HalfLinear
    else:
        layer.__class__ = KernelLinear
    return layer


KINDS = [
    pytest.param((torch.bfloat16, None), id="bfloat16"),
    pytest.param((torch.float32, None), id="float32"),
    pytest.param((torch.float32, torch.bfloat16), id="held in bfloat16"),
    pytest.param((torch.float32, torch.float16), id="held in float16"),
]


@pytest.fixture(params=KINDS)
def kinds(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["dot", "no dot"])
def dot(request, monkeypatch):
    """With and without the processor's bfloat16 instructions."""
    if request.param and not layer_kernels.kernels.has_dot("bfloat16"):
        pytest.skip("no AVX512-BF16")
    if not request.param:
        monkeypatch.setattr(linear, "_has_dot", lambda kind: False)
    return request.param


def _off(layer, states, found):
    """The error against float64, in units in the last place of the largest partial sums."""
    weight = layer.float_weight() if isinstance(layer, HalfLinear) else layer.weight
    wide, rows = weight.double(), states.double()
    bias = torch.zeros(1).double() if layer.bias is None else layer.bias.double()
    exact = rows @ wide.T + bias
    room = 1e-6 * (rows.abs() @ wide.abs().T + bias.abs())
    if found.dtype == torch.bfloat16:
        room += 2.0**-8 * exact.abs()
    return float(((found.double() - exact).abs() / room).max())


@pytest.mark.parametrize(
    ("in_features", "out_features", "bias"),
    [(32, 4, False), (96, 43, True), (2048, 67, False), (14336, 36, True)],  # sums in one and in several parts
    ids=str,
)
@torch.no_grad()
def test_products_are_exact(kinds, dot, in_features, out_features, bias):
    """For one row, each number of rows in a tile, and more rows than are multiplied at a time."""
    if kinds[0] == torch.float32 and not dot:
        pytest.skip("no bfloat16 rows")
    torch.manual_seed(0)
    layer = _layer(in_features, out_features, kinds[0], bias=bias, held=kinds[1])
    states = torch.randn(101, in_features).to(kinds[0]) * torch.logspace(-3, 3, 101)[:, None].to(kinds[0])
    for count in (*range(1, 15), 64, 101):
        assert _off(layer, states[:count], layer(states[:count])) <= 1


@torch.no_grad()
def test_a_result_does_not_depend_on_other_rows(kinds, dot, monkeypatch):
    monkeypatch.setattr(linear, "most_rows", lambda dtype: 1000)
    layer, states = _layer(8192, 36, kinds[0], held=kinds[1]), torch.randn(120, 8192).to(kinds[0])
    together = layer(states)
    for first, last in ((0, 1), (3, 4), (5, 7), (8, 22), (1, 120), (50, 119)):
        assert torch.equal(layer(states[first:last]), together[first:last])
    assert torch.equal(layer(states[9]), together[9])


@pytest.mark.parametrize("shape", [(), (1, 1), (2, 3), (1, 0), (0,)], ids=str)
@torch.no_grad()
def test_results_have_the_layout_of_an_ordinary_layer(kinds, dot, shape):
    layer, states = _layer(64, 40, kinds[0], held=kinds[1]), torch.randn(*shape, 64).to(kinds[0])
    found, right = layer(states), nn.functional.linear(states, layer.weight.to(kinds[0]), layer.bias)
    assert (found.shape, found.stride(), found.dtype) == (right.shape, right.stride(), right.dtype)
    torch.testing.assert_close(found, right, atol=1e-2, rtol=1e-2)


@torch.no_grad()
def test_rows_and_weights_may_lie_apart(kinds):
    layer, states = _layer(64, 40, kinds[0], held=kinds[1]), torch.randn(5, 128).to(kinds[0])[:, ::2]
    assert torch.equal(layer(states), layer(states.contiguous()))
    if kinds[1] is None:
        wide = torch.randn(40, 128).to(kinds[0])
        layer.weight.data = wide[:, ::2]
        torch.testing.assert_close(
            layer(states), nn.functional.linear(states, wide[:, ::2], layer.bias), atol=0, rtol=0
        )


@torch.no_grad()
def test_all_threads_compute_the_same(kinds, monkeypatch):
    layer, states = _layer(512, 999, kinds[0], held=kinds[1]), torch.randn(70, 512).to(kinds[0])
    monkeypatch.setattr(linear, "most_rows", lambda dtype: 1000)
    monkeypatch.setattr(kernels, "threads_for", lambda numbers, each: 1)
    alone = [layer(states[:count]) for count in (1, 70)]
    monkeypatch.setattr(kernels, "threads_for", lambda numbers, each: 3)
    for _ in range(20):
        assert all(torch.equal(layer(states[: len(right)]), right) for right in alone)


@torch.no_grad()
def test_bfloat16_rows_need_the_processors_products(dot, monkeypatch):
    layer, ran, honest = _layer(64, 40, torch.bfloat16), [], linear._multiply
    monkeypatch.setattr(
        linear, "_multiply", lambda out, rows, *more: ran.append(rows.dtype) or honest(out, rows, *more)
    )
    layer(torch.randn(3, 64).bfloat16())
    assert ran == [torch.bfloat16 if dot else torch.float32]


@needs_dot
@torch.no_grad()
def test_many_rows_in_bfloat16_are_computed_by_torch(monkeypatch):
    layer, ran = _layer(64, 40, torch.bfloat16), []
    honest, rule = linear._multiply, linear.most_rows.__wrapped__
    monkeypatch.setattr(linear, "_multiply", lambda *given: ran.append(given[4]) or honest(*given))
    for units, most in ((["avx512_bf16"], 64), (["avx512_bf16", "amx_bf16"], 16), ([], 500)):
        monkeypatch.setattr(linear, "most_rows", rule)
        monkeypatch.setattr(linear, "processor_units", lambda units=units: frozenset(units))
        for count in (most, most + 1):
            layer(torch.randn(count, 64).bfloat16())
        assert ran == ([most] if units else [most, most + 1])
        ran.clear()


def test_a_trained_layer_has_its_gradients():
    plain = nn.Linear(64, 40)
    swift, states = copy.deepcopy(plain), torch.randn(2, 64)
    swift.__class__ = KernelLinear
    for layer in (plain, swift):
        layer(states).square().sum().backward()
    torch.testing.assert_close(swift.weight.grad, plain.weight.grad, atol=0, rtol=0)


def test_an_arm_processor_keeps_the_layers_of_torch(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.delitem(sys.modules, "ragkv.model.layer_kernels")
    monkeypatch.delattr(sys.modules["ragkv.model"], "layer_kernels")
    assert kernel_module.__wrapped__("ragkv.model.layer_kernels") is None


class _Packed(torch.Tensor):
    """Weights in a special format, such as torchao's."""


@pytest.mark.parametrize("vnni", [pytest.param(True, marks=needs_vnni), False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_features", [768, 100, 4097])
def test_int8_weights_are_all_that_is_rounded_much(in_features, bias, vnni, monkeypatch):
    """Compared with the product of rounded weights: activations have 14 bits of a token's largest, with VNNI."""
    if not vnni:
        monkeypatch.setattr(linear, "int8_levels", lambda: 0)
    torch.manual_seed(0)
    layer = nn.Linear(in_features, 67, bias=bias)
    states = torch.randn(2, 5, in_features) * torch.tensor([1.0, 1e-3, 10, 0, 1e4])[:, None]
    states[..., 7] *= 100  # trained models have such outliers
    scales = layer.weight.abs().amax(1, keepdim=True) / 127
    with torch.no_grad():
        expected = nn.functional.linear(states, (layer.weight / scales).round() * scales, layer.bias)
        found = Int8Linear(layer)(states)
    worst = states.abs().amax(-1, keepdim=True) / (4 * 127 * 127) * layer.weight.abs().sum(1)
    sums = 1e-6 * (states.abs().amax(-1, keepdim=True) + 1) * layer.weight.abs().sum(1)
    assert bool(((found - expected).abs() <= (worst if vnni else 0) + sums).all())


def test_an_int8_result_does_not_depend_on_other_tokens():
    layer, states = Int8Linear(nn.Linear(256, 96)), torch.randn(20, 256) * torch.logspace(-2, 3, 20)[:, None]
    with torch.no_grad():
        together = layer(states)
        assert all(torch.equal(layer(states[at : at + 1])[0], together[at]) for at in range(20))
        states[3, 5] = torch.nan
        assert torch.equal(layer(states).isnan().any(1), torch.arange(20) == 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@torch.inference_mode()
def test_an_int8_layer_has_float32_whatever_torchs_default_is(dtype):
    """Another thread's transformers changes the default for all threads while it builds a model."""
    layer, states = Int8Linear(nn.Linear(256, 96)), torch.randn(20, 256)
    right = layer(states)
    torch.set_default_dtype(dtype)
    try:
        found = layer(states)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, right)


@torch.inference_mode()
def test_states_of_another_dtype_are_not_read_as_the_layers_own():
    """As with `torch.autocast`."""
    layer, norm, states = (
        Int8Linear(nn.Linear(256, 96)),
        _norm(*NORMS["rounded"], 256, torch.float32),
        torch.randn(3, 256),
    )
    half, right = states.bfloat16(), copy.deepcopy(norm)
    assert torch.equal(layer(half), layer(half.float()))
    assert torch.equal(_with_kernels(norm, torch.float32)(half), right(half))


@pytest.fixture(scope="module")
def int8_mini():
    return load_model("mini", dtype="int8")


def test_a_model_with_int8_weights_names_them(int8_mini):
    plain = load_model("mini", dtype="float32")
    layers = [layer for layer in int8_mini.module.modules() if isinstance(layer, Int8Linear)]
    assert layers
    assert not any(isinstance(layer, nn.Linear) for layer in int8_mini.module.modules())
    assert (int8_mini.precision, int8_mini.dtype, plain.precision) == ("int8", torch.float32, "float32")
    assert int8_mini.parameters == plain.parameters
    assert (plain.int8, int8_mini.int8) == (False, True)
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


def test_layers_of_fewer_outputs_than_kernels_compute_at_a_time_stay():
    module = nn.Sequential(nn.Linear(linear.LEAST_WEIGHTS, 3), nn.Linear(linear.LEAST_WEIGHTS, 4))
    assert [layer.out_features for *_, layer in linear._large_layers(module)] == [4]


def test_int8_weights_are_refused_where_they_cannot_be(model_folder, monkeypatch):
    model = load_model(str(model_folder), dtype="float32", train=True)
    for fault in (
        (model, "device", torch.device("meta")),
        (linear, "_kernels", lambda: None),
        # the model's own code reads the weights
        (model.module.model.layers[0].mlp, "forward", lambda x: x @ model.module.lm_head.weight.T),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*fault)
            with pytest.raises(UnsupportedModelError, match="int8 weights"):
                int8_weights(model)


# ---- models


@pytest.fixture(scope="module")
def half_folder(make_folder, tmp_path_factory):
    """A bfloat16 checkpoint of a small Llama whose matrices are large enough for the kernels."""
    sizes = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 160, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_bias=True)
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    folder = shutil.copytree(make_folder("llama"), tmp_path_factory.mktemp("half") / "model")  # for its tokenizer
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def half(request, half_folder):
    """For that checkpoint and some dtype, a model with torch's layers, and one with ragkv's."""
    return request.param, *(load_model(str(half_folder), dtype=request.param, train=train) for train in (True, False))


def _matrices(model):
    return [layer for layer in model.module.modules() if isinstance(layer, nn.Linear)]


def _logits(model, *texts):
    return model.step([TokenSequence.over((), position=0) for _ in texts], [model.tokens.encode(t) for t in texts])


TEXTS = "The sea is salt because of rivers.", "one"


def test_a_model_holds_the_weights_of_its_checkpoint_in_16_bits(half):
    """Read in place for bfloat16, and kept in bfloat16 for float32."""
    dtype, exact, model = half
    wide = dtype == "float32"
    assert [type(layer) for layer in _matrices(model)] == [HalfLinear if wide else KernelLinear] * 15
    assert {type(layer) for layer in _matrices(exact)} == {nn.Linear}
    assert (model.kernels_alone, exact.kernels_alone) == (True, False)
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16, getattr(torch, dtype)}
    assert (model.parameters, model.precision) == (exact.parameters, dtype)
    assert sum(each.numel() for each in model.module.parameters()) == exact.parameters
    close = 1e-4 if wide else 0.02
    torch.testing.assert_close(_logits(model, *TEXTS), _logits(exact, *TEXTS), atol=close, rtol=close)
    right, saved = exact.module.state_dict(), model.module.state_dict()
    assert right.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in right.items())
    assert {tensor.dtype for tensor in saved.values()} == {getattr(torch, dtype)}


def test_layers_whose_weights_are_read_have_them_in_float32(half_folder):
    model = load_model(str(half_folder), dtype="float32", train=True)
    layer = model.module.model.layers[1].mlp
    own, right = layer.down_proj.forward, layer.up_proj.weight.clone()
    layer.down_proj.forward = lambda x: own(x) + 0 * layer.up_proj.weight.sum()
    optimize_layers(model)
    assert [type(each) for each in (layer.up_proj, layer.gate_proj)] == [KernelLinear, HalfLinear]
    assert torch.equal(layer.up_proj._parameters["weight"], right)


@pytest.mark.parametrize("rows", [1, 17, 300])
def test_a_pass_of_any_size_leaves_the_weights_in_16_bits(rows, half_folder, monkeypatch):
    monkeypatch.setattr(linear, "most_rows", lambda dtype: 16)  # as where the processor has matrix units
    model = load_model(str(half_folder), dtype="float32")
    model.encode([(5,) * rows])
    assert all(type(layer) is HalfLinear for layer in _matrices(model))


def test_a_checkpoint_of_any_type_is_held_without_loss(half_folder, tmp_path):
    folder = shutil.copytree(half_folder, tmp_path / "model")
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    place = "model.layers.0.mlp.{}_proj.weight"
    tensors[place.format("up")][-1, -1] *= 1 + 1e-6
    tensors[place.format("gate")] = tensors[place.format("gate")] * (1 + 2**-10)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    exact, model = (load_model(str(folder), dtype="float32", train=train) for train in (True, False))
    mlp = model.module.model.layers[0].mlp
    found = [(type(each), each._parameters["weight"].dtype) for each in (mlp.up_proj, mlp.gate_proj, mlp.down_proj)]
    assert found[0] == (KernelLinear, torch.float32)
    assert found[2] == (HalfLinear, torch.bfloat16)
    torch.testing.assert_close(_logits(model, *TEXTS), _logits(exact, *TEXTS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_that_16_bits_have_are_held_in_them(dtype):
    layer = nn.Linear(64, 600)
    layer.weight.data = layer.weight.data.to(dtype).float()
    right = layer.weight.detach().clone()
    linear._halve(layer, torch.empty(layer.weight.numel(), dtype=torch.int16))
    assert (type(layer), layer._parameters["weight"].dtype) == (HalfLinear, dtype)
    assert torch.equal(layer.float_weight(), right)
    for wrong in (right[0, 0] * (1 + 2**-12), torch.nan):
        other = nn.Linear(64, 600)
        other.weight.data = right.clone()
        other.weight.data[599, 63] = wrong
        linear._halve(other, torch.empty(other.weight.numel(), dtype=torch.int16))
        assert type(other) is nn.Linear


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_pass_of_kernels_leaves_the_threads_to_them(half_folder, dtype, monkeypatch):
    """torch's threads would spin for work meanwhile; other computations of the model still use all of them."""
    model, seen, before = load_model(str(half_folder), dtype=dtype), [], torch.get_num_threads()
    assert model.kernels_alone
    model.module.model.norm.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    torch.set_num_threads(3)
    try:
        expected = _logits(model, *TEXTS)
        assert set(seen) == {1}
        assert torch.get_num_threads() == 3
        if dtype != "int8":
            seen.clear()
            with monkeypatch.context() as patch:  # a row count for which torch's product is faster
                patch.setattr(linear, "most_rows", lambda _: 0)
                plain = nn.functional.linear
                patch.setattr(
                    nn.functional, "linear", lambda *args: seen.append(torch.get_num_threads()) or plain(*args)
                )
                _logits(model, *TEXTS)
            assert set(seen) == {1, 3}
        for name, value in (("FEW", 2), ("FEW", 1000)):
            seen.clear()
            monkeypatch.setattr(language_model, name, value)
            assert torch.equal(_logits(model, *TEXTS), expected)
            assert set(seen) == {3 if value == 2 else 1}
        seen.clear()
        model.kernels_alone = False
        assert torch.equal(_logits(model, *TEXTS), expected)
        assert set(seen) == {3}
    finally:
        torch.set_num_threads(before)
    model.module.model.extra = nn.Parameter(torch.zeros(linear.LEAST_WEIGHTS))
    assert not linear._by_kernels(model)
    del model.module.model.extra
    assert linear._by_kernels(model)
    model.config.attn_logit_softcapping = 30.0
    assert not linear._by_kernels(model)


@pytest.mark.parametrize("why", ["packed", "kernel", "size"])
def test_other_layers_keep_their_own(half_folder, monkeypatch, why):
    model = load_model(str(half_folder), dtype="float32", train=True)
    layer = model.module.model.layers[0].mlp.down_proj
    if why == "packed":
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(_Packed), requires_grad=False)
    elif why == "kernel":
        monkeypatch.setattr(linear, "_kernels", lambda: None)
    elif why == "size":
        for each in model.module.model.layers:
            each.mlp.down_proj = nn.Linear(161, 256, bias=False)
        layer = model.module.model.layers[0].mlp.down_proj
        monkeypatch.setattr(linear, "_try_once", lambda model: None)
    optimize_layers(model)
    assert type(layer) is nn.Linear
    assert not model.kernels_alone
    assert type(model.module.lm_head) is (nn.Linear if why == "kernel" else HalfLinear)


def test_ordinary_layers_have_the_same_weights_and_transformers_own_norms(half):
    dtype, exact, model = half
    module = copy.deepcopy(model.module)
    norms = [each for each in module.modules() if isinstance(each, linear.KernelNorm)]
    made = linear.ordinary_layers(module)
    layers = [layer for layer in made.modules() if isinstance(layer, nn.Linear)]
    assert {type(layer) for layer in layers} == {nn.Linear}
    assert all(torch.equal(layer.weight, right.weight) for layer, right in zip(layers, _matrices(exact), strict=True))
    if dtype == "float32":  # in bfloat16 not every processor has kernels for norms
        plain = [each for each in made.modules() if "RMSNorm" in type(each).__name__]
        assert (len(norms), {type(each) for each in plain}) == (5, {LlamaRMSNorm})
        assert all(a.weight is b.weight for a, b in zip(plain, norms, strict=True))


# ---- norms

NORMS = {
    "rounded": ("llama", "LlamaRMSNorm"),
    "whole": ("olmo2", "Olmo2RMSNorm"),
    "one more": ("gemma2", "Gemma2RMSNorm"),
}
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_dot)]


def _norm(module, name, width, dtype, epsilon=1e-6):
    norm = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)(width, eps=epsilon)
    nn.init.normal_(norm.weight)
    return norm.to(dtype).requires_grad_(False)


def _with_kernels(module, dtype):
    linear._optimize_norms(SimpleNamespace(device=torch.device("cpu"), dtype=dtype, network=module))
    return module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("form", "norm"), NORMS.items(), ids=NORMS)
@torch.inference_mode()
def test_a_norm_is_what_transformers_computes(form, norm, dtype, monkeypatch):
    monkeypatch.setattr(linear, "_NUMBERS", 1 << 12)  # use several threads
    torch.manual_seed(0)
    norms = [_norm(*norm, width, dtype, epsilon) for width in (16, 48, 768) for epsilon in (1e-6, 1e-2)]
    made = _with_kernels(copy.deepcopy(nn.ModuleList(norms)), dtype)
    for right, found in zip(norms, made, strict=True):
        assert isinstance(found, linear.KernelNorm)
        assert isinstance(found, type(right))
        assert found.form == ("rounded" if (form, dtype) == ("whole", torch.float32) else form)  # equal in float32
        states = torch.randn(2, 150, len(right.weight)).to(dtype) * torch.logspace(-4, 4, 150)[:, None].to(dtype)
        states[0, 3], states[1, 4, 5] = 0, torch.nan
        expected = right(states)
        off = (found(states).float() - expected.float()).abs() > 1e-6 * expected.float().abs()
        assert off.float().mean() < (0.01 if dtype == torch.bfloat16 else 1e-9)
        torch.testing.assert_close(found(states), expected, rtol=2**-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_of_another_kind_keep_their_own(dtype):
    gated = _norm("qwen3_next", "Qwen3NextRMSNormGated", 64, dtype)
    shifted = import_module("transformers.models.nemotron.modeling_nemotron").NemotronLayerNorm1P(64).to(dtype)
    wider = type(
        "RMSNormOfMore", (nn.Module,), {"forward": lambda self, x: 2 * x, "weight": shifted.weight, "eps": 1e-6}
    )
    others = [gated, shifted, wider(), _norm("llama", "LlamaRMSNorm", 40, dtype), nn.LayerNorm(64).to(dtype)]
    others.append(_norm("llama", "LlamaRMSNorm", 64, torch.float64))
    types = [type(each) for each in others]
    assert [type(each) for each in _with_kernels(nn.ModuleList(others), dtype)] == types


def test_a_norm_that_learns_or_lies_apart_is_computed_by_torch():
    norm = _norm("llama", "LlamaRMSNorm", 64, torch.float32)
    right = copy.deepcopy(norm)
    _with_kernels(norm, torch.float32)
    states = torch.randn(3, 128)
    norm.weight.requires_grad_(True)
    norm(states[:, :64].contiguous()).sum().backward()
    assert norm.weight.grad is not None
    with torch.inference_mode():
        assert torch.equal(norm(states[:, ::2]), right(states[:, ::2]))


@pytest.mark.parametrize(("pages", "moved"), [("always [madvise] never", True), ("always madvise [never]", False)])
def test_weights_are_moved_into_huge_pages_where_there_are_some(pages, moved, tmp_path, monkeypatch):
    allowed = tmp_path / "enabled"
    allowed.write_text(pages)
    monkeypatch.setattr(linear, "_ALLOWED", allowed)
    weights = [nn.Parameter(torch.randn(rows, 768).bfloat16(), requires_grad=False) for rows in (1500, 40, 1500)]
    before, places = [each.clone() for each in weights], [each.data_ptr() for each in weights]
    layer, same = nn.Linear(768, 1500, bias=False), nn.Embedding(1500, 768)
    layer.weight = same.weight = weights[0]
    linear._gather(weights)
    assert all(torch.equal(*pair) for pair in zip(weights, before, strict=True))
    assert layer.weight is same.weight is weights[0]
    assert ([each.data_ptr() for each in weights] != places) == moved
    if moved:
        assert weights[2].data_ptr() == weights[0].data_ptr() + weights[0].nbytes + weights[1].nbytes


@pytest.mark.parametrize("why", ["few", "many", "no file", "no memory"])
def test_weights_stay_where_they_are_otherwise(why, tmp_path, monkeypatch):
    def none(*_, **__):
        raise MemoryError("no room")

    allowed = tmp_path / "enabled"
    if why != "no file":
        allowed.write_text("[always] madvise never")
    monkeypatch.setattr(linear, "_ALLOWED", allowed)
    weight = nn.Parameter(torch.randn(64 if why == "few" else 1500, 768), requires_grad=False)
    place = weight.data_ptr()
    with monkeypatch.context() as patch:
        if why == "many":
            patch.setattr(linear, "device_memory", lambda _: 4 * weight.nbytes - 1)
        if why == "no memory":
            patch.setattr(linear, "huge_memory", none)
        linear._gather([weight])
    assert weight.data_ptr() == place


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_rows_give_no_rows(shape, capfd):
    for layer in (nn.Linear(64, 32), _layer(64, 32, torch.float32), _layer(64, 32, torch.bfloat16)):
        made = Int8Linear(layer) if type(layer) is nn.Linear else layer
        with torch.inference_mode():
            assert made(torch.empty(shape, dtype=layer.weight.dtype)).shape == (*shape[:-1], 32)
    assert capfd.readouterr().err == ""  # an error in a kernel is only printed
