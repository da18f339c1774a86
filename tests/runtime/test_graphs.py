"""Forward passes captured in pieces: recorded on the CPU (`support/recordedgraph.py`), and on a GPU."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import recordedgraph
import torch

from ragkv.attention.kv import PlacedChunk
from ragkv.attention.sequence import ChunkGroup, TokenSequence
from ragkv.benchmarks.speed.inference import SHAPE, random_llama
from ragkv.model.linear import HalfLinear, KernelLinear, ordinary_layers
from ragkv.runtime import graphs
from ragkv.runtime.graphs import PiecewiseGraphs


@pytest.fixture
def stand_in(monkeypatch):
    recordedgraph.use(monkeypatch)


def passes(model):
    """Rows and their tokens, pass by pass: questions over chunks, and steps of several rows; some sizes recur."""
    chunks = model.encode([range(5, 14), range(20, 41), (7, 8)])

    def over(*which, start=3, temperature=1.0):
        placed, place = [], start
        for chunk in which:
            placed.append(PlacedChunk(kv=chunks[chunk], start=place))
            place += chunks[chunk].tokens
        return TokenSequence((ChunkGroup(segments=tuple(placed), temperature=temperature),), place)

    first, other = over(0, 1, 2), over(2, 1, start=9)
    yield [over(1, 0)], [range(40, 51)]
    yield [first], [range(60, 74)]
    yield [other], [range(30, 39)]
    yield [first, other], [(3,), (4,)]
    yield [first, other], [(5,), (6,)]
    yield [over(0, temperature=0.7), first], [(9, 8), (7,)]
    yield [other, first], [(1,), (2,)]
    third = over(1, temperature=0.7)
    yield [third], [range(50, 66)]
    yield [first, other, third], [(1,), (2,), (3,)]
    yield [other, third, first], [(4,), (5,), (6,)]


@pytest.fixture
def soon(monkeypatch):
    """Record the second pass of a size."""
    monkeypatch.setattr(graphs, "RECORDED_PASSES", 2)


def compared(model, monkeypatch, close, *, recorded=False):
    """For each pass, whether it ran in pieces; its logits must equal those of the model's kernels."""
    pieces, replays, replayed = PiecewiseGraphs(None if recorded else cache(graphs.Capture)), [], graphs._Captured.run
    monkeypatch.setattr(graphs._Captured, "run", lambda *given: replays.append(1) or replayed(*given))
    in_pieces, results, expected = [], [], []
    for (rows, ids), (others, _) in zip(passes(model), passes(model), strict=True):
        replays.clear()
        results.append(model.step(rows, ids, run=pieces.logits))
        expected.append(model.step(others, ids))
        in_pieces.append(bool(replays))
    torch.testing.assert_close(results, expected, **close)  # at the end, to see that later passes do not overwrite them
    return in_pieces


IN_PIECES = [False, True, True, False, True, False, True, True, False, True]
CLOSE, EXACT = {"atol": 1e-5, "rtol": 1e-5}, {"atol": 0.0, "rtol": 0.0}


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek3"])  # recorded passes have the other mechanisms
def test_a_pass_in_pieces_computes_what_its_kernels_do(family, make_model, stand_in, monkeypatch):
    assert compared(make_model(family), monkeypatch, CLOSE) == IN_PIECES


def test_a_pass_of_many_tokens_is_not_captured(make_model, stand_in, monkeypatch):
    monkeypatch.setattr(graphs, "SIZES", (1, 2, 4, 8))
    assert compared(make_model("llama"), monkeypatch, {}) == [False] * 4 + [True, False, True, False, False, True]


def test_layers_share_what_attention_is_given_unless_they_are_recorded(make_model, stand_in, soon):
    model = make_model("llama")
    for pieces, memories in (PiecewiseGraphs(cache(graphs.Capture)), 1), (PiecewiseGraphs(None), model.layers):
        for _ in range(2):
            model.step([TokenSequence((), 0)], [(1,)], run=pieces.logits)
        assert len({piece.call.key.data_ptr() for piece in pieces._captured[1, 1].pieces}) == memories


def refusals(caplog):
    found = [record.getMessage() for record in caplog.records if record.name == graphs.__name__]
    return [message.partition("captured: ")[2] for message in found if "kernel by kernel" in message]


def test_a_model_that_cannot_be_captured_runs_as_before(make_model, stand_in, monkeypatch, caplog):
    def refused(self):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recordedgraph.RecordedCapture, "begin", refused)
    caplog.set_level("INFO")
    assert not any(compared(make_model("llama"), monkeypatch, {}))
    assert refusals(caplog) == ["operation not permitted when stream is capturing"]  # once


# ---- recorded on the processor


SMALL = SHAPE | {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
RECORDED = [False, False, False, False, True, False, True, False, False, True]  # of 11, 14, 9, 2, 2, 3, 2, 16, 3, 3


def test_a_recorded_pass_computes_what_its_kernels_do(unlike_family, make_model, soon, monkeypatch):
    assert compared(make_model(unlike_family), monkeypatch, EXACT, recorded=True) == RECORDED


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_recording_has_the_kernels_of_linear_layers(dtype, soon, monkeypatch):
    model = random_llama(dtype, "cpu", SMALL)
    assert compared(model, monkeypatch, EXACT, recorded=True) == RECORDED


def test_recordings_are_made_anew_for_another_number_of_threads(soon, monkeypatch):
    kernels = pytest.importorskip("ragkv.util.kernels", exc_type=ImportError)
    model, pieces = random_llama("float32", "cpu", SMALL), PiecewiseGraphs(None)
    before, seen, launch = torch.get_num_threads(), [], kernels._launch
    monkeypatch.setattr(kernels, "_launch", lambda *given: seen.append(given[3]) or launch(*given))
    monkeypatch.setattr("ragkv.model.linear._THREAD", 1)  # enough work per product for all threads
    try:
        for threads in (2, 1, 3):
            torch.set_num_threads(threads)
            for _ in range(4):
                seen.clear()
                model.step([TokenSequence((), 0)], [(1,)], run=pieces.logits)
                assert max(seen) == threads
            assert list(pieces._captured) == [(1, 1)]
    finally:
        torch.set_num_threads(before)


def _value(model):
    return model.module.model.layers[0].self_attn.v_proj


def _scaled(module, **how):
    return module.load_state_dict({key: 1.5 * value for key, value in module.state_dict().items()}, **how)


def _vector(model):
    parameters = [*model.module.parameters()]
    torch.nn.utils.vector_to_parameters(1.5 * torch.nn.utils.parameters_to_vector(parameters), parameters)


def _data(model):
    _value(model).weight.data = -_value(model).weight.data


def _replaced(model):
    _value(model).weight = torch.nn.Parameter(-_value(model).weight.detach())


def _other_layer(model):
    old = _value(model)
    model.module.model.layers[0].self_attn.v_proj = new = torch.nn.Linear(old.in_features, old.out_features, bias=False)
    new.to(old.weight.dtype)


def _hook(model):
    _value(model).register_forward_hook(lambda module, args, out: 2 * out)


def _forward(model):
    layer, own = _value(model), _value(model).forward
    layer.forward = lambda x: 2 * own(x)


def _attribute(model):
    norm = model.module.model.norm
    norm.epsilon = norm.variance_epsilon = 0.5


@torch.no_grad()
def _in_place(model):
    for parameter in model.module.parameters():
        parameter.mul_(1.5)


def _adapter(model):
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=4, target_modules=["v_proj", "up_proj"], init_lora_weights=False), model.module
    )


def _adapters(call):
    def change(model):
        for module in [*model.module.modules()]:
            if hasattr(module, "lora_A"):
                call(module)

    return change


CHANGES = {
    "weight.data = …": [_data],
    "vector_to_parameters": [_vector],
    "another parameter": [_replaced],
    "load_state_dict": [lambda model: _scaled(model.module)],
    "load_state_dict(assign=True)": [lambda model: _scaled(model.module, assign=True)],
    "another layer": [_other_layer],
    "a forward hook": [_hook],
    "forward replaced": [_forward],
    "an attribute": [_attribute],
    "an optimizer's step": [_in_place],
    "an adapter injected, disabled and enabled": [
        _adapter,
        _adapters(lambda layer: layer.enable_adapters(False)),
        _adapters(lambda layer: layer.enable_adapters(True)),
    ],
    "an adapter scaled and merged": [
        _adapter,
        _adapters(lambda layer: layer.scale_layer(3.0)),
        _adapters(lambda layer: layer.merge()),
    ],
    "an adapter merged safely and unmerged": [
        _adapter,
        _adapters(lambda layer: layer.merge(safe_merge=True)),
        _adapters(lambda layer: layer.unmerge()),
    ],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float32 in 16 bits"])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES.keys())
def test_a_model_that_is_changed_from_outside_is_not_replayed(changes, dtype, soon, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_PASSES", 2)
    model = random_llama(dtype.split()[0], "cpu", SMALL)
    if "in" in dtype:  # as of a checkpoint in bfloat16
        for layer in [*model.module.modules()]:
            if type(layer) is KernelLinear:
                layer.weight.data = layer.weight.data.bfloat16()
                layer.__class__ = HalfLinear
    pieces = PiecewiseGraphs(None)

    def logits(**how):
        row = TokenSequence((), 0)
        return torch.cat([model.step([row], [(token,)], **how) for token in (5, 9, 7)])

    for change in changes:
        before = logits(run=pieces.logits)
        assert pieces._captured
        change(model)
        found, expected = logits(run=pieces.logits), logits()
        torch.testing.assert_close(found, expected, **EXACT)
        assert not torch.equal(found, before)


def test_the_captures_of_a_model_that_was_changed_are_dropped(stand_in):
    model, pieces = random_llama("float32", "cpu", SMALL), PiecewiseGraphs(cache(graphs.Capture))
    ordinary_layers(model.module)
    for change in (lambda model: None, _replaced, _hook, _vector):
        change(model)
        for _ in range(3):
            found, expected = (
                model.step([TokenSequence((), 0)], [(1,)], **how) for how in ({"run": pieces.logits}, {})
            )
            torch.testing.assert_close(found, expected, **CLOSE)


def test_the_oldest_recordings_make_room(make_model, soon, monkeypatch):
    model, pieces = make_model("llama"), PiecewiseGraphs(None)
    monkeypatch.setattr(graphs, "MAX_RECORDED_TOKENS", 9)

    def run(*counts):
        for count in counts:
            rows = [TokenSequence((), 0) for _ in range(count)]
            model.step(rows, [(each,) for each in range(count)], run=pieces.logits)
        return list(pieces._captured)

    assert run(4, 4, 4, 5, 5, 4, 1, 1, 4) == [(5, 5), (1, 1)]
    assert run(4, 16, 16) == [(16, 16)]


def test_a_recording_that_computes_something_else_is_not_used(make_model, soon, monkeypatch, caplog):
    caplog.set_level("INFO")
    model, again = make_model("llama"), graphs._again
    monkeypatch.setattr(graphs, "_again", lambda op, *rest: (lambda: None) if "silu" in str(op) else again(op, *rest))
    assert not any(compared(model, monkeypatch, EXACT, recorded=True)[:4])
    assert refusals(caplog) == ["a recording of it computes something else"]


def launches(work, *values):
    """The result of `work`, and a function that computes it again."""
    recording = graphs.Recording()
    with recording.aside():
        recording.begin()
        return work(*values), recording.end()


def _many_operations(x, places):
    memory = torch.empty_like(x).copy_(x)
    memory.mul_(2)
    best, where = (x + memory).topk(2, dim=-1)
    rows = torch.nn.functional.embedding(places, x).clone()
    parts = torch.split(torch.softmax(rows, -1), 2, dim=-1)
    return memory, best, where, torch.cat(parts[::-1], -1).to(torch.bfloat16), x[places], torch.full_like(x, 3).add_(x)


@torch.inference_mode()
def test_operations_are_computed_again_into_the_same_memory():
    x, places = torch.randn(5, 4), torch.tensor([3, 1, 1])
    results, again = launches(_many_operations, x, places)
    for _ in range(2):
        x.copy_(torch.randn(5, 4))
        places.copy_(torch.randint(5, (3,)))
        again()
        torch.testing.assert_close(results, _many_operations(x, places), **EXACT)


def test_a_function_of_torch_that_computes_something_else_is_not_called_again(monkeypatch):
    class Op:
        overloadpacket = SimpleNamespace(__name__="one_more")
        _op = staticmethod(lambda x: x + 1)

    monkeypatch.setattr(torch, "one_more", lambda x, *, out: out.fill_(7), raising=False)
    x, output = torch.zeros(3), torch.ones(3)
    again = graphs._again(Op, (x,), {}, [output])
    assert output.tolist() == [1, 1, 1]
    x.fill_(4)
    again()
    assert output.tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda x: x * x.sum().item(), "computed numbers"),
        (lambda x: x.nonzero(), "computed numbers"),
        (lambda x: x[x > 0], "computed numbers"),
        (lambda x: torch.rand_like(x), "computed numbers"),
        (lambda x: x * len(x.tolist()), "reads the numbers"),
        (lambda x: torch.from_numpy(x.numpy()), "reads the numbers"),
        (lambda x: x if x.any() else -x, "computed numbers"),
    ],
)
@torch.inference_mode()
def test_what_depends_on_computed_numbers_is_not_recorded(work, reason):
    with pytest.raises(RuntimeError, match=reason):
        launches(work, torch.randn(4))
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert torch.arange(3).tolist() == [0, 1, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek3"])
def test_a_pass_in_pieces_on_a_gpu_computes_what_its_kernels_do(family, make_model, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = make_model(family, "float32", "cuda")
    assert compared(model, monkeypatch, {"atol": 1e-3, "rtol": 1e-3}) == IN_PIECES
