"""Every family: what ragkv computes from cached, moved chunks is what transformers computes from the whole text."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ragkv.attention.kv import Segment
from ragkv.attention.ownkv import OwnKV
from ragkv.attention.row import Row
from ragkv.attention.slab import SlabKV, Slabs
from ragkv.engines import able_engines
from ragkv.errors import ModelLoadError, UnsupportedModelError, UsageError
from ragkv.model.checkpoint import resolve
from ragkv.model.language import LanguageModel, pick_device
from ragkv.model.proof import check_model
from ragkv.model.refusal import refuse_by_name
from ragkv.types import Need

PARTS = [5, 9, 3, 14, 6]  # prefix, three chunks, question; windows in the test models are 8 tokens


def sequence(seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in PARTS]


def starts() -> list[int]:
    return [sum(PARTS[:i]) for i in range(len(PARTS))]


def question_logits(model, parts, placed):
    return model.step([Row.over(placed, position=sum(PARTS[:-1]))], [parts[-1]], every=True)


def plain_logits(model, parts, mask=None):
    flat = torch.tensor([[i for part in parts for i in part]])
    with model.plain() as plain:
        return plain(input_ids=flat, attention_mask=mask, use_cache=False).logits[0, -PARTS[-1] :].float()


def block_masks(model):
    """The 4-D block mask (each part sees itself, the last part sees all), windowed where a layer type is."""
    n = sum(PARTS)
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    for start, length in zip(starts()[:-1], PARTS[:-1], strict=True):
        visible[start : start + length, :start] = False
    behind = torch.arange(n)[:, None] - torch.arange(n)

    def additive(allowed):
        return torch.zeros(n, n, dtype=model.dtype).masked_fill(~allowed, torch.finfo(model.dtype).min)[None, None]

    if not model.windows:
        return additive(visible)
    windowed = additive(visible & (behind < model.windows[0]))
    if len(set(getattr(model.config, "layer_types", None) or ["sliding_attention"])) == 1:
        return windowed
    return {"full_attention": additive(visible), "sliding_attention": windowed}


def assert_near(found, plain, dtype, exact):
    """fp32: within 1e-5 of transformers. bf16: as near to the fp32 result as transformers' own bf16 is."""
    if dtype == "float32":
        torch.testing.assert_close(found, plain, atol=1e-5 * float(plain.abs().max()), rtol=1e-5)
        return
    truth = exact()
    ours, theirs = (found - truth).norm() / truth.norm(), (plain - truth).norm() / truth.norm()
    assert ours < 1.5 * theirs + 0.005


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_context_and_own_tokens_equal_full_attention(family, dtype, make_model):
    model = make_model(family, dtype)
    parts = sequence()
    [whole] = model.encode([[i for part in parts[:-1] for i in part]])
    found = question_logits(model, parts, [Segment(kv=whole, start=0)])
    assert_near(found, plain_logits(model, parts), dtype, lambda: plain_logits(make_model(family, "rounded"), parts))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_layout_equals_one_forward_with_the_block_mask(family, dtype, make_model):
    model = make_model(family, dtype)
    parts = sequence()
    kvs = model.encode(parts[:-1])
    placed = [Segment(kv=kv, start=start) for kv, start in zip(kvs, starts(), strict=False)]
    found = question_logits(model, parts, placed)
    assert_near(
        found,
        plain_logits(model, parts, block_masks(model)),
        dtype,
        lambda: plain_logits(exact := make_model(family, "rounded"), parts, block_masks(exact)),
    )


def test_prefixed_encoding_equals_a_slice_of_the_whole(family, make_model):
    model = make_model(family)
    prefix, chunk, *_ = sequence()
    [prefix_kv] = model.encode([prefix])
    [found] = model.encode([chunk], prefix=prefix_kv)
    [whole] = model.encode([prefix + chunk])
    assert found.encoded_at == len(prefix)
    for layer in range(model.layers):
        torch.testing.assert_close(found.keys[layer], whole.keys[layer][:, len(prefix) :], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(found.values[layer], whole.values[layer][:, len(prefix) :], atol=2e-5, rtol=2e-5)


def test_decoding_token_by_token_equals_one_pass(family, make_model):
    model = make_model(family)
    ids = [i for part in sequence() for i in part]
    whole = model.step([Row((), 0)], [ids], every=True)
    row = Row((), 0, OwnKV(reserve=2))
    model.step([row], [ids[:20]])
    for at in range(20, len(ids)):
        [step] = model.step([row], [[ids[at]]])
        torch.testing.assert_close(step, whole[at], atol=1e-5 * float(whole.abs().max()), rtol=1e-5)
    assert row.position == row.own.length == len(ids)


def test_rows_of_one_step_equal_those_rows_alone(family, make_model):
    """A long read, a short one at another place, one token over tokens of its own, and one over nothing at all."""
    model = make_model(family)
    parts = sequence()
    kvs = model.encode(parts[:-1])
    placed = tuple(Segment(kv=kv, start=start) for kv, start in zip(kvs, starts(), strict=False))
    ids = [[*parts[3], *parts[4]], parts[1], [parts[2][0]], parts[4]]

    def rows():
        before = Row((), 0)
        model.step([before], [parts[3]])
        return [Row.over(placed[:3], position=starts()[3]), Row.over(placed[1:2], position=40), before, Row((), 17)]

    together = rows()
    found = model.step(together, ids, every=True).split([len(each) for each in ids])
    last = model.step(together, [[9], [8, 7], [6], [5, 4, 3]])
    for index, row in enumerate(rows()):
        alone = model.step([row], [ids[index]], every=True)
        torch.testing.assert_close(found[index], alone, atol=1e-5 * float(alone.abs().max()), rtol=1e-5)
        again = model.step([row], [[[9], [8, 7], [6], [5, 4, 3]][index]])
        torch.testing.assert_close(last[index : index + 1], again, atol=1e-5 * float(again.abs().max()), rtol=1e-5)
        assert (together[index].position, together[index].own.length) == (row.position, row.own.length)


def test_rows_in_a_slab_equal_those_rows_alone(family, make_model):
    """Their own tokens lie side by side: rows come, differ in length, skip a step, outgrow their slab and leave it."""
    model = make_model(family)
    ids = [i for part in sequence() for i in part]
    slabs = Slabs()
    together = [Row((), at, slabs.place(10, 60, 5)) for at in (0, 5, 40, 2, 7)]
    alone = [Row((), row.position) for row in together]
    assert sum(isinstance(row.own, SlabKV) for row in together) == 5
    lengths = [20, 9, 3, 14, 1]

    def same(rows, asked):
        found = model.step([together[i] for i in rows], asked)
        for index, i in enumerate(rows):
            [expected] = model.step([alone[i]], [asked[index]])
            torch.testing.assert_close(found[index], expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)

    same(range(5), [ids[:n] for n in lengths])
    for step in range(12):
        rows = [i for i in range(5) if (i + step) % 4]
        same(rows, [[ids[(i + step) % len(ids)]] * (3 if (i, step) == (2, 5) else 1) for i in rows])
    same(range(5), [ids * 4 if i == 1 else [7] for i in range(5)])  # more than the slab has room for
    same(range(5), [[8]] * 5)
    for row, other in zip(together, alone, strict=True):
        assert (row.own.length, row.position) == (other.own.length, other.position)
    cut = together[1].own.chunk_kv()
    torch.testing.assert_close(cut.values[0], alone[1].own.chunk_kv().values[0], atol=1e-5, rtol=1e-4)


def test_a_slab_s_place_is_taken_again_by_the_next_row(make_model):
    model = make_model("llama")
    slabs = Slabs()
    rows = [Row((), 0, slabs.place(8, 8, 2)) for _ in range(2)]
    model.step(rows, [[5] * 8, [6] * 3])
    slab = rows[0].own.slab
    del rows[0]
    rows.insert(0, Row((), 0, slabs.place(2, 8, 2)))
    assert rows[0].own.slab is slab
    other = [Row((), 0), Row((), 0)]
    model.step(other[1:], [[6] * 3])
    for asked in ([[9, 9], [1]], [[4], [2]]):
        expected = torch.cat([model.step([row], [each]) for row, each in zip(other, asked, strict=True)])
        torch.testing.assert_close(model.step(rows, asked), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tokens", [63, 64])
def test_a_chunk_cut_from_a_slab_is_its_own_memory(tokens, make_model):
    """Also where it fills its place, which the next row takes."""
    model = make_model("llama")
    slabs = Slabs()
    rows = [Row((), 0, slabs.place(tokens, 0, 2)) for _ in range(2)]
    model.step(rows, [[5] * tokens, [6] * tokens])
    kv = rows[0].own.chunk_kv()
    kept = [key.clone() for key in kv.keys]
    del rows[0]
    rows.append(Row((), 0, slabs.place(tokens, 0, 2)))
    model.step(rows[1:], [[9] * tokens])
    assert all(torch.equal(key, before) for key, before in zip(kv.keys, kept, strict=True))


def test_a_pass_that_fails_appends_nothing(make_model, monkeypatch):
    model = make_model("llama")
    ids = [i for part in sequence() for i in part]
    row, other = Row((), 0), Row((), 0)
    for each in (row, other):
        model.step([each], [ids[:20]])
    mlp = model.module.get_decoder().layers[4].mlp

    def fail(*_):
        raise RuntimeError("no memory left")

    with monkeypatch.context() as fault:
        fault.setattr(mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="no memory left"):
            model.step([row], [ids[20:25]])
    assert (row.position, row.own.length) == (20, 20)
    assert torch.equal(model.step([row], [ids[20:]]), model.step([other], [ids[20:]]))


def test_chunks_of_one_step_equal_one_by_one(make_model):
    model = make_model("llama")
    chunks = [
        [5] * 3,
        [7, 1, 2, 9],
        [4] * 11,
        [6],
    ]  # 1 is the eos token, 2 the pad token: text like any other
    together = model.encode(chunks, batch_tokens=14)
    for ids, kv in zip(chunks, together, strict=True):
        [alone] = model.encode([ids])
        assert kv.tokens == len(ids)
        for a, b in zip((*kv.keys, *kv.values), (*alone.keys, *alone.values), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_chunks_of_one_step_hold_no_more_tokens_than_told(make_model, monkeypatch):
    model = make_model("llama")
    honest, taken = model.step, []

    def watched(rows, ids, **rest):
        taken.append([len(each) for each in ids])
        return honest(rows, ids, **rest)

    monkeypatch.setattr(model, "step", watched)
    model.encode([[5] * n for n in (3, 4, 11, 1, 20, 2)], batch_tokens=14)
    assert taken == [[3, 4], [11, 1], [20], [2]]
    with pytest.raises(ValueError, match="without tokens"):
        model.encode([[5], []])


def test_one_chunk_kv_serves_two_places_and_is_not_changed(make_model):
    model = make_model("llama-yarn")
    parts = sequence()
    kvs = model.encode(parts[:-1])
    before = [k.clone() for k in kvs[1].keys]
    first = question_logits(model, parts, [Segment(kv=kvs[1], start=0), Segment(kv=kvs[2], start=30)])
    question_logits(model, parts, [Segment(kv=kvs[1], start=12)])
    again = question_logits(model, parts, [Segment(kv=kvs[1], start=0), Segment(kv=kvs[2], start=30)])
    assert torch.equal(first, again)
    for a, b in zip(before, kvs[1].keys, strict=True):
        assert torch.equal(a, b)


def test_layers_without_rope_are_found(make_model):
    assert None in make_model("smollm3").rotary.kinds
    assert None in make_model("cohere2").rotary.kinds
    assert None not in make_model("gemma3").rotary.kinds
    assert len(set(make_model("gemma3").rotary.kinds)) == 2


def test_the_self_check_moves_no_chunk_by_a_wrong_rotation(make_model):
    model = copy.copy(make_model("qwen2", "float32"))
    good = model.rotary
    model.rotaries = (replace(good, angles=lambda p, kind: good.angles(p * 2, kind)),)
    check_model(model)
    assert "layer 0 do not follow" in model.lacks[Need.MOVE]
    assert "block" not in able_engines(model)
    assert {"ape", "full", "pced"} <= set(able_engines(model))


def test_the_self_check_refuses_wrong_logits(make_model, monkeypatch):
    model = make_model("llama")
    honest = model.step
    monkeypatch.setattr(model, "step", lambda *a, **k: honest(*a, **k) * 1.01)
    with pytest.raises(UnsupportedModelError, match="differs from transformers"):
        check_model(model)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2}, "recurrent"),
        ({"index_topk": 8}, "choose by an index"),
    ],
)
def test_models_that_cannot_be_exact_are_refused_by_name(changes, reason, make_model):
    config = SimpleNamespace(model_type="strange", **changes)
    with pytest.raises(UnsupportedModelError, match=reason):
        refuse_by_name("some/model", config)


def test_loading_a_folder(model_folder):
    model = LanguageModel.load(str(model_folder), dtype="float32", device="cpu")
    assert model.eos_ids == {1}
    assert model.revision is None


@pytest.mark.parametrize(
    "file",
    [
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",  # absent in the original: a new file counts
        "added_tokens.json",
        "tokenizer.model",
        "merges.txt",
        "unheard_of.json",
    ],
)
def test_a_changed_file_is_another_model(file, model_folder, tmp_path):
    first = resolve(str(model_folder)).fingerprint("float32")
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    assert resolve(str(copy)).fingerprint("float32") == first  # where it lies does not matter
    data = bytearray((copy / file).read_bytes()) if (copy / file).exists() else bytearray(1)
    data[-1] ^= 1
    (copy / file).write_bytes(data)
    assert resolve(str(copy)).fingerprint("float32") != first


@pytest.mark.parametrize("file", ["generation_config.json", "ragkv.json", "README.md"])
def test_files_that_no_key_depends_on_are_not_the_model(file, model_folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    (copy / file).write_text("{}")
    assert resolve(str(copy)).fingerprint("auto") == resolve(str(model_folder)).fingerprint("auto")


def test_dtype_revision_and_adapter_are_part_of_the_fingerprint(model_folder, monkeypatch):
    local, hub = resolve(str(model_folder)), resolve("some/model")
    facts = [local.fingerprint("float32"), local.fingerprint("bfloat16"), local.fingerprint("auto")]
    facts += [hub.fingerprint("auto", "c0ffee"), hub.fingerprint("auto", "decade")]
    facts += [resolve("other/model").fingerprint("auto", "c0ffee")]
    monkeypatch.setattr("ragkv.model.checkpoint._ADAPTER_VERSION", 0)
    facts += [local.fingerprint("float32")]
    assert len(set(facts)) == len(facts)
    with pytest.raises(ModelLoadError, match="without a revision"):
        hub.fingerprint("auto")


def test_kv_that_was_made_without_a_family_s_windows_is_not_read_again(model_folder, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "qwen2_moe"}))
    now, other = resolve(str(copy)).fingerprint("auto"), resolve(str(model_folder)).fingerprint("auto")
    monkeypatch.setattr("ragkv.model.checkpoint._ADAPTER_VERSIONS", {})
    assert resolve(str(copy)).fingerprint("auto") != now
    assert resolve(str(model_folder)).fingerprint("auto") == other


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "  ", "./none"])
def test_a_model_that_is_not_there(name):
    with pytest.raises(ModelLoadError, match=r"No model folder|name is empty"):
        resolve(name)


def test_broken_checkpoints_are_one_sentence(tmp_path, model_folder):
    with pytest.raises(ModelLoadError, match=r"config\.json is missing"):
        resolve(str(tmp_path))
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    (broken / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        LanguageModel.load(str(broken))


def test_prompts_beyond_the_positions_are_refused(make_model):
    model = make_model("llama")
    model.require_positions(512)
    with pytest.raises(UsageError, match="lower --top-k"):
        model.require_positions(513)


def test_a_device_that_is_not_there():
    with pytest.raises(ModelLoadError, match="not available"):
        pick_device("cuda:77")
    with pytest.raises(ModelLoadError, match="not available"):
        pick_device("abacus")
