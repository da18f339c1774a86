"""Models whose rows resume one state: exact beside whole forwards, alone and side by side, and after a fault."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

from ragkv.attention.kv import Segment
from ragkv.attention.ownkv import OwnKV
from ragkv.attention.row import Group, Row
from ragkv.attention.stack import Stack
from ragkv.engines import able_engines
from ragkv.errors import UnsupportedModelError
from ragkv.model import small
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.proven import proven
from ragkv.model.resumed import ResumedModel, Ways

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own about its default configurations

PREFIX, FIRST, SECOND, QUESTION = [7, 9, 4, 30], [11, 5, 80, 6, 7, 44, 9], [3, 17, 51], [8, 8, 60, 14]


@pytest.fixture(scope="module")
def tokenizer(make_model):
    return make_model("llama").tokens._tokenizer


@pytest.fixture(scope="module")
def load(tokenizer):
    def made(family: str, **changes) -> ResumedModel:
        if family not in small.families():
            pytest.skip("not in this version of transformers")
        here = Checkpoint(name=family, location=family, local=True)
        return proven(small.small_model(family, **changes), tokenizer, here)

    return made


@pytest.fixture(scope="module")
def hybrid(load) -> ResumedModel:
    return load("falcon_h1", layers=3)


def whole(model, *parts) -> torch.Tensor:
    ids = [i for part in parts for i in part]
    with torch.inference_mode():
        return model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def experts(model) -> list[Row]:
    """The amateur and an expert for each chunk, as PCED has them."""
    [prefix] = model.encode([PREFIX])
    before = Segment(kv=prefix, start=0)
    chunks = [Segment(kv=kv, start=len(PREFIX)) for kv in model.encode([FIRST, SECOND], prefix=prefix)]
    return [Row.over(seen, position=seen[-1].end) for seen in ((before,), *((before, chunk) for chunk in chunks))]


def expected(model, *more) -> torch.Tensor:
    return torch.stack([whole(model, PREFIX, part, QUESTION, more)[-1] for part in ([], FIRST, SECOND)])


def close(found, right) -> bool:
    return bool((found - right).abs().max() <= 2e-5 * right.abs().max())


@pytest.mark.parametrize("family", ["falcon_h1", "mamba", "rwkv", "bloom"])
def test_experts_go_on_from_what_is_stored(load, family):
    model = load(family, layers=4)
    assert isinstance(model, ResumedModel)
    rows = experts(model)
    assert close(model.step(rows, [QUESTION] * 3), expected(model))
    assert close(model.step(rows, [[5]] * 3), expected(model, 5))
    assert close(model.step(rows[1:], [[6]] * 2), expected(model, 5, 6)[1:])
    assert [row.position for row in rows] == [
        len(PREFIX) + n + len(QUESTION) for n in (1, len(FIRST) + 2, len(SECOND) + 2)
    ]
    assert [row.own.length for row in rows] == [5, 6, 6]


def test_which_engines_it_bears(hybrid):
    able = able_engines(hybrid)
    assert {"full", "single", "pced", "ippd", "mapreduce"} <= set(able)
    assert not {"ape", "block", "ippd-stacked"} & set(able)
    assert "recurrent layers" in next(iter(hybrid.lacks.values()))


def test_one_cache_serves_any_number_of_rows(hybrid):
    rows = experts(hybrid)
    again = [Row(row.groups, row.position) for row in rows]
    first = hybrid.step(rows, [QUESTION] * 3)
    hybrid.step(rows, [[9]] * 3)
    assert torch.equal(hybrid.step(again, [QUESTION] * 3), first)


@pytest.mark.parametrize("way", ["several", "ragged", "ragged_several", "together"])
def test_every_way_gives_the_same(hybrid, way):
    ways = Ways(**{name: name == way or way == "together" for name in ("several", "ragged", "together")})
    rows = experts(hybrid)
    other = hybrid.with_ways(ways)
    assert close(other.step(rows, [QUESTION] * 3), expected(hybrid))
    assert close(other.step(rows, [[5]] * 3), expected(hybrid, 5))


def test_rows_read_as_many_tokens_as_each_wants(hybrid):
    rows = [*experts(hybrid), Row((), 0)]
    found = hybrid.step(rows, [QUESTION, QUESTION[:1], QUESTION[:3], PREFIX], every=True)
    right = [
        whole(hybrid, PREFIX, QUESTION)[-4:],
        whole(hybrid, PREFIX, FIRST, QUESTION[:1])[-1:],
        whole(hybrid, PREFIX, SECOND, QUESTION[:3])[-3:],
        whole(hybrid, PREFIX),
    ]
    assert close(found, torch.cat(right))


def test_rows_that_go_on_together_are_not_copied(hybrid):
    rows = experts(hybrid)
    hybrid.step(rows, [QUESTION] * 3)
    held = {id(row.own.held) for row in rows}
    assert len(held) == 1
    before = rows[0].own.held
    hybrid.step(rows, [[5]] * 3)
    after = rows[0].own.held
    assert after is not before
    assert all(row.own.held is after for row in rows)
    assert after.lengths == tuple(length + 1 for length in before.lengths)


def test_a_pass_that_fails_changes_nothing(hybrid, monkeypatch):
    rows = experts(hybrid)
    hybrid.step(rows, [QUESTION] * 3)
    kept = [[tensor.clone() for tensor in row.own.held.row(row.own.index)] for row in rows]
    places = [(row.position, row.own.length) for row in rows]
    head = hybrid.module.lm_head

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(head), "forward", fail)
        with pytest.raises(MemoryError):
            hybrid.step(rows, [[5]] * 3)
    assert [(row.position, row.own.length) for row in rows] == places
    for row, tensors in zip(rows, kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row.own.held.row(row.own.index), tensors, strict=True))
    assert close(hybrid.step(rows, [[5]] * 3), expected(hybrid, 5))


def test_a_row_resumes_one_state_and_sees_it_first(hybrid):
    first, second = experts(hybrid)[1:]
    both = (*first.segments, Segment(kv=second.segments[1].kv, start=first.position))
    with pytest.raises(ValueError, match="resumes one state"):
        hybrid.step([Row.over(both, position=both[-1].end)], [QUESTION])
    with pytest.raises(ValueError, match="resumes one state"):
        hybrid.step([Row.over(first.segments[1:], position=first.position)], [QUESTION])
    with pytest.raises(ValueError, match="ends at"):
        hybrid.step([Row.over(first.segments, position=first.position + 1)], [QUESTION])
    with pytest.raises(UnsupportedModelError, match="weighs"):
        hybrid.step([Row((Group(segments=first.segments, temperature=0.5),), first.position)], [QUESTION])
    with pytest.raises(UnsupportedModelError, match="several questions"):
        hybrid.step([Stack((), 0)], [QUESTION])


def test_a_row_for_its_kv_alone_gives_no_logits(hybrid):
    row, asked = Row.for_kv((), position=0), Row((), 0)
    found = hybrid.step([row, asked], [PREFIX, FIRST])
    assert len(found) == 1
    assert isinstance(row.own, OwnKV)
    assert row.own.chunk_kv().tokens == len(PREFIX)


def test_the_kv_is_cut_free_of_other_rows(hybrid):
    rows = [Row.for_kv((), position=0) for _ in range(2)]
    hybrid.step(rows, [PREFIX, PREFIX])
    kv = rows[1].own.chunk_kv()
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in kv.tensors if t.numel())


@pytest.mark.parametrize("family", ["jamba", "mamba"])
def test_what_goes_on_token_by_token_alone_is_found_out(load, family):
    assert not load(family).ways.several


def test_a_model_that_remembers_beside_its_cache_is_refused(tokenizer, monkeypatch):
    model = small.small_model("bloom", layers=2)
    forward, memory = type(model).forward, {"last": 0.0}

    def remembers(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        cached = kwargs.get("use_cache")
        out.logits = out.logits + memory["last"]
        memory["last"] = float(out.logits[0, -1, 0]) if cached else 0.0
        return out

    remembers.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(model), "forward", remembers)
    with pytest.raises(UnsupportedModelError, match="and it cannot go on from its own cache: a token"):
        proven(model, tokenizer, Checkpoint(name="bloom", location="bloom", local=True))


def test_a_model_that_looks_ahead_is_refused(tokenizer, monkeypatch):
    model = small.small_model("bloom", layers=2)
    forward = type(model).forward

    def ahead(self, input_ids, *args, **kwargs):
        out = forward(self, input_ids, *args, **kwargs)
        out.logits = out.logits + input_ids[:, -1:, None]
        return out

    ahead.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(model), "forward", ahead)
    with pytest.raises(UnsupportedModelError, match="tokens after it"):
        proven(model, tokenizer, Checkpoint(name="bloom", location="bloom", local=True))


def test_a_rope_that_depends_on_the_length_ends_where_it_changes(load):
    long = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "factor": 2.0,
    }
    model = load("phi3", rope_parameters=long, original_max_position_embeddings=64, layers=2)
    if isinstance(model, ResumedModel):
        assert model.max_positions == 64


def test_windows_are_proved_although_they_are_long(load, monkeypatch):
    """llama4 cuts its attention at fixed positions, thousands of tokens apart: the proof has to see that."""
    from transformers.models.llama4 import modeling_llama4

    right = modeling_llama4.create_chunked_causal_mask
    assert isinstance(load("llama4_text", layers=4, attention_chunk_size=4096), ResumedModel)

    def whole_when_cached(**given):
        cache = given.get("past_key_values")
        held = cache is not None and cache.get_seq_length()
        return modeling_llama4.create_causal_mask(**given) if held else right(**given)

    monkeypatch.setattr(modeling_llama4, "create_chunked_causal_mask", whole_when_cached)
    with pytest.raises(UnsupportedModelError, match="cannot go on"):
        load("llama4_text", layers=4, attention_chunk_size=4096)


def test_the_model_is_copied_by_the_proof_alone(hybrid):
    assert copy.copy(hybrid).module is hybrid.module


def test_rows_are_not_padded_where_an_index_counts_blocks_of_keys(load):
    """At real sizes a block is longer than the proof's rows, so that it could not see what padding does."""
    model = load("minimax_m3_vl_text", layer_types=["full_attention", "minimax_m3_sparse"], layers=2)
    assert (model.ways.ragged, model.ways.ragged_several, model.ways.together) == (False, False, True)
    rows = experts(model)
    assert close(model.step(rows, [QUESTION] * 3), expected(model))
