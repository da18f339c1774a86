"""The proof on load sees what it vouches for: every fault planted here has to be refused, and each by its name."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch

import ragkv.attention.step
import ragkv.attention.visibility
from ragkv.attention.kv import Segment
from ragkv.attention.ownkv import OwnKV
from ragkv.attention.part import Part, merge_some
from ragkv.attention.reading import Plan
from ragkv.attention.rope import Rotary, Turning
from ragkv.attention.row import Group
from ragkv.attention.single import Singles
from ragkv.attention.slab import Slab
from ragkv.attention.step import Step, _Site
from ragkv.attention.visibility import Visible, require_neutral, require_rule, window_of
from ragkv.errors import ModelLoadError, UnsupportedModelError
from ragkv.model import small
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.language import LanguageModel
from ragkv.model.proof import check_model
from ragkv.model.twin import set_windows, twin

WINDOWED = ["mistral-sliding", "gemma2", "gemma3", "cohere2", "qwen2-moe-sliding", "phimoe-sliding"]


@pytest.fixture
def refused(make_model):
    """Check a model that was fine before the fault, on a copy: it, or every engine that meets the fault, is refused."""

    for family in ("llama", "gpt-oss", *WINDOWED):
        make_model(family)

    def check(family: str, match: str) -> None:
        model = copy.copy(make_model(family))
        try:
            check_model(model)
        except UnsupportedModelError as error:
            said = [str(error)]
            assert said[0].startswith(f"Model '{family}' ({model.config.model_type}) is not supported: ")
        else:
            said = list(model.lacks.values())
        assert any(re.search(match, sentence) for sentence in said), said

    return check


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_are_found_and_the_model_keeps_them(family, make_model):
    model = make_model(family)
    model.windows = []
    check_model(model)
    assert model.windows == [8]
    assert model.config.sliding_window == 8


@pytest.mark.parametrize("family", WINDOWED)
def test_long_windows_are_proved_too(family, make_model, monkeypatch, refused):
    """The window of a real model is far longer than the proof's prompt; it is shrunk on a copy."""
    model = make_model(family)
    long = model.with_windows({8: 4096})
    check_model(long)
    assert long.windows == [4096]
    assert long._model.config.sliding_window == 4096
    assert model.config.sliding_window == 8
    honest = Step.attend
    monkeypatch.setattr(Step, "attend", lambda *a, **k: honest(*a, **k | {"window": None}))
    with pytest.raises(UnsupportedModelError, match="causal pass"):
        check_model(long)


@pytest.mark.parametrize("family", WINDOWED)
def test_a_window_that_is_one_too_long(family, monkeypatch, refused):
    honest = Step.attend

    def longer(*args, window, **rest):
        return honest(*args, window=None if window is None else window + 1, **rest)

    monkeypatch.setattr(Step, "attend", longer)
    refused(family, "causal pass")


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_that_end_at_the_own_tokens(family, monkeypatch, refused):
    honest = Plan.readings
    monkeypatch.setattr(Plan, "readings", lambda self, window: honest(self, None))
    refused(family, "a question over")


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("by", [1, -1])
def test_a_mask_over_chunks_that_is_one_off(family, by, monkeypatch, refused):
    change_readings(monkeypatch, lambda r: r if r.mask is None else replace(r, mask=r.mask.roll(by, 1)))
    refused(family, "a question over")


@pytest.mark.parametrize("family", WINDOWED)
def test_keys_at_the_windows_edge_that_are_not_read(family, monkeypatch, refused):
    change_readings(
        monkeypatch,
        lambda r: replace(r, first=r.first + 1, mask=None if r.mask is None else r.mask[:, 1:]) if r.first else r,
    )
    refused(family, "a question over")


@pytest.mark.parametrize("family", WINDOWED)
def test_a_mask_of_another_row(family, monkeypatch, refused):
    change_readings(monkeypatch, lambda r: r if r.mask is None else replace(r, mask=r.mask.roll(1, 0)))
    refused(family, "a question over")


def change_readings(monkeypatch, change):
    honest = Plan.readings
    monkeypatch.setattr(Plan, "readings", lambda self, window: tuple(change(r) for r in honest(self, window)))


def test_group_weights(monkeypatch, refused):
    with monkeypatch.context() as fault:
        fault.setattr(Group, "weight", (1.0, 0.0))
        refused("llama", "weighted group")
    with monkeypatch.context() as fault:
        fault.setattr(Group, "weight", property(lambda self: (self.scale * self.temperature, 0.0)))
        refused("llama", "other mode")
    with monkeypatch.context() as fault:
        change_readings(fault, lambda r: replace(r, temperature=1.0))
        refused("llama", "weighted group")


def test_weights_of_another_row(monkeypatch, refused):
    """Two rows have a group of their own: its numbers are told token by token."""
    honest = Plan._weights

    def rolled(self):
        half = self.pieces[0].n
        return [replace(w, factor=w.factor.roll(half), addend=w.addend.roll(half)) for w in honest(self)]

    monkeypatch.setattr(Plan, "_weights", rolled)
    refused("llama", "weighted group")


def test_a_group_that_is_plain_attention(monkeypatch, refused):
    monkeypatch.setattr(Group, "plain", True)
    refused("llama", "weighted group")


def test_moved_chunks(monkeypatch, refused):
    for family in ("llama", "gemma2", "mistral-sliding"):
        with monkeypatch.context() as fault:
            fault.setattr(Segment, "offset", 0)
            refused(family, "moved chunks")


def test_rows_whose_offsets_are_mixed_up(monkeypatch, refused):
    """A turn by the next row's offset: visible only where rows at different distances are read together."""
    honest = Turning.by

    def mixed(self, offset, tokens):
        return honest(self, offset if isinstance(offset, int) else offset.flip(0), tokens)

    monkeypatch.setattr(Turning, "by", mixed)
    refused("llama", "moved chunks")


def test_turns_by_the_next_offset_of_the_table(monkeypatch, refused):
    honest = Turning.by

    def next_one(self, offset, tokens):
        last = len(self.rows) - 1
        if isinstance(offset, int):
            return honest(self, list(self.rows)[min(self.rows[offset] + 1, last)], tokens)
        return honest(self, (offset + 1).clamp_max(last), tokens)

    monkeypatch.setattr(Turning, "by", next_one)
    refused("llama", "moved chunks")


@pytest.mark.parametrize("fault", ["the other way", "not at all", "pairs for halves"])
def test_turns_that_are_wrong(fault, monkeypatch, refused):
    quarter = Rotary.quarter
    wrong = {
        "the other way": lambda self, states, kind: -quarter(self, states, kind),
        "not at all": lambda self, states, kind: states * 0,
        "pairs for halves": lambda self, states, kind: quarter(self, states.flip(-1), kind),
    }
    monkeypatch.setattr(Rotary, "quarter", wrong[fault])
    refused("llama", "moved chunks")


def test_queries_of_another_row(monkeypatch, refused):
    def other(reading):
        if isinstance(reading.tokens, slice):
            return reading
        return replace(reading, tokens=reading.tokens.roll(1))

    change_readings(monkeypatch, other)
    refused("llama", "a question over")


def test_a_chunk_that_is_read_for_one_row_alone(monkeypatch, refused):
    """What is read once for several rows reaches the first of them only."""

    def first_row(reading):
        if isinstance(reading.tokens, slice):
            return reading
        half = len(reading.tokens) // 2
        offset = reading.offset if isinstance(reading.offset, int) else reading.offset[:half]
        return replace(reading, tokens=reading.tokens[:half], offset=offset)

    change_readings(monkeypatch, first_row)
    refused("llama", "a group weighted by its other mode")


def test_a_chunk_that_is_lost(monkeypatch, refused):
    honest = Plan.readings
    monkeypatch.setattr(Plan, "readings", lambda self, window: honest(self, window)[:-1])
    refused("llama", "a question over")


def test_parts_of_some_tokens_that_overwrite_the_others(monkeypatch, refused):
    def overwriting(parts, tokens):
        found = merge_some(parts, tokens)
        for which, part in parts:
            if not isinstance(which, slice):
                found.out[:, :, which], found.lse[:, :, which] = part.out.float(), part.lse
        return found

    monkeypatch.setattr(ragkv.attention.step, "merge_some", overwriting)
    refused("llama", "a question over")


def test_parts_that_are_added_without_their_weights(monkeypatch, refused):
    def even(parts, tokens):
        return merge_some([(which, Part(part.out, part.lse * 0)) for which, part in parts], tokens)

    monkeypatch.setattr(ragkv.attention.step, "merge_some", even)
    refused("llama", "a question over")


def test_own_tokens_of_another_row(monkeypatch, refused):
    honest = _Site.own

    def swapped(self, *args, **rest):
        part = honest(self, *args, **rest)
        equal = {piece.n: piece.at for piece in self.plan.pieces}
        order = list(range(self.plan.tokens))
        for piece in self.plan.pieces:  # every row gets what the last row with as many tokens found
            order[piece.at : piece.at + piece.n] = range(equal[piece.n], equal[piece.n] + piece.n)
        return Part(part.out[:, :, order], part.lse[:, :, order])

    monkeypatch.setattr(_Site, "own", swapped)
    refused("llama", "a question over")


def test_own_tokens_of_earlier_steps(monkeypatch, refused):
    append, commit = OwnKV.append, OwnKV.commit
    for family in ("llama", "mistral-sliding"):
        with monkeypatch.context() as forgotten:
            forgotten.setattr(OwnKV, "append", lambda self, layer, k, v: append(self, layer, k, v) and (k, v))
            refused(family, "causal pass")
    with monkeypatch.context() as one_short:
        one_short.setattr(OwnKV, "append", lambda *a: tuple(t[:, :, min(1, a[0].length) :] for t in append(*a)))
        refused("llama", "causal pass")
    with monkeypatch.context() as miscounted:
        miscounted.setattr(OwnKV, "commit", lambda self, n: commit(self, n - (self.length == 0)))
        refused("llama", "chunk|causal pass|rotary|shape|size")


@pytest.mark.parametrize("fault", ["no mask", "one too many", "another slot", "another place", "other rows' results"])
def test_own_tokens_that_are_read_together(fault, monkeypatch, refused):
    """Rows that take one token each, of unequal length, in one slab."""
    mask, write, attend = Singles._mask, Slab.write, Singles.attend
    wrong = {
        "no mask": (Singles, "_mask", lambda self, window: None),
        "one too many": (Singles, "_mask", lambda self, window: longer(mask(self, window))),
        "another slot": (Slab, "write", lambda s, at, slots, *more: write(s, at, slots.roll(1), *more)),
        "another place": (Slab, "write", lambda s, at, slots, places, *more: write(s, at, slots, places * 0, *more)),
        "other rows' results": (Singles, "attend", lambda *a, **k: rolled(attend(*a, **k))),
    }

    def longer(seen):
        return None if seen is None else seen | seen.roll(1, -1)

    def rolled(part):
        return Part(part.out.roll(1, 2), part.lse.roll(1, 2))

    monkeypatch.setattr(*wrong[fault])
    refused("llama", "a question over")


def test_positions_that_begin_anew_in_every_step(monkeypatch, refused):
    honest = Step.positions.fget
    monkeypatch.setattr(
        Step, "positions", property(lambda self: [i - self.pieces[0].row.own.length for i in honest(self)])
    )
    refused("llama", "causal pass")


def test_rows_that_stand_where_another_row_does(monkeypatch, refused):
    honest = Step.positions.fget
    monkeypatch.setattr(Step, "positions", property(lambda self: sorted(honest(self))))
    refused("llama", "a question over")


def test_sinks_that_are_forgotten_or_counted_for_every_part(monkeypatch, refused):
    attend, merge = Step.attend, ragkv.attention.step.merge_some

    def forgotten(self, *args, sink, **rest):
        sink = None if any(piece.row.segments for piece in self.pieces) else sink
        return attend(self, *args, sink=sink, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(ragkv.attention.step, "beside", lambda sink, part: part.out)
        refused("gpt-oss", "causal pass")
    with monkeypatch.context() as patch:
        patch.setattr(Step, "attend", forgotten)
        refused("gpt-oss", "a question over")
    with monkeypatch.context() as patch:
        none = torch.zeros(4)  # the sinks of a part more, as if every group of chunks had them

        def twice(parts, tokens):
            part = merge(parts, tokens)
            return Part(part.out * torch.sigmoid(part.lse - none[:, None])[..., None], part.lse)

        patch.setattr(ragkv.attention.step, "merge_some", twice)
        refused("gpt-oss", "a question over")


def test_queries_that_are_scaled_from_some_position_on(make_model):
    """Chunks are moved no further than the scale is the same (Ministral 3), or nowhere (Beam)."""
    scaled = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    if "ministral3" not in small.families():
        pytest.skip("not in this version of transformers")
    for original, within in ((64, 64), (512, None)):
        parameters = {**scaled, "original_max_position_embeddings": original}
        transformers_own = small.small_model("ministral3", layers=2, rope_parameters=parameters)
        checkpoint = Checkpoint(name="small", location="small", local=True)
        model = LanguageModel(transformers_own, make_model("llama").tokens._tokenizer, checkpoint)
        check_model(model)
        assert (model.moves_within, dict(model.lacks)) == (within, {})


def test_key_heads_that_are_mixed_up(monkeypatch, refused):
    honest = Step.attend
    monkeypatch.setattr(Step, "attend", lambda run, at, q, k, v, **rest: honest(run, at, q, k, v.flip(1), **rest))
    refused("llama", "causal pass")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (RuntimeError("a kernel\nof many lines"), r"\(RuntimeError: a kernel\)\.$"),
        (AttributeError("'Visible' object has no attribute 'dtype'"), "computes with its attention masks"),
        (KeyError("full_attention"), "KeyError"),
    ],
)
def test_any_exception_is_a_refusal(fault, reason, monkeypatch, refused):
    def fail(*_, **__):
        raise fault

    monkeypatch.setattr(Step, "attend", fail)
    refused("llama", reason)


def test_no_memory_is_no_refusal(monkeypatch, make_model):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(Step, "attend", fail)
    with pytest.raises(ModelLoadError, match="does not fit into memory"):
        check_model(make_model("llama"))


def test_a_window_that_the_mask_does_not_have(make_model, monkeypatch, refused):
    seen = Visible(window=8, rule=lambda *_: torch.tensor(True))
    assert window_of(seen, 8) == window_of(seen, None) == 8
    with pytest.raises(UnsupportedModelError, match="window of 9 tokens, but its mask has 8 tokens"):
        window_of(seen, 9)
    with pytest.raises(UnsupportedModelError, match="its mask has none"):
        window_of(replace(seen, window=None), 8)
    with pytest.raises(UnsupportedModelError, match="not given the masks"):
        window_of(None, 8)
    monkeypatch.setattr(make_model("gemma2").module.config, "sliding_window", 9)
    refused("gemma2", "names a window of 8 tokens")


@pytest.mark.parametrize("window", [None, 3, 24, 4096])
def test_rules_of_masks(window):
    def causal(_b, _h, q, k):
        return (k <= q) & (True if window is None else k > q - window)

    require_rule(Visible(window=window, rule=causal))
    others = {
        "both ways": lambda b, h, q, k: q >= 0,
        "chunks": lambda b, h, q, k: causal(b, h, q, k) & (q // 8192 == k // 8192),
        "small chunks": lambda b, h, q, k: causal(b, h, q, k) & (q // 3 == k // 3),
        "a longer window": lambda b, h, q, k: (k <= q) & (k >= q - (window or 4096)),
        "a sink": lambda b, h, q, k: causal(b, h, q, k) | (k == 0),
        "not itself": lambda b, h, q, k: causal(b, h, q, k) & (k < q),
        "types of tokens": lambda b, h, q, k: causal(b, h, q, k) & torch.zeros(4)[q].bool(),
    }
    for name, rule in others.items():
        if window is None and name in ("a sink",):
            continue
        with pytest.raises(UnsupportedModelError, match="mask"):
            require_rule(Visible(window=window, rule=rule))


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_shows_nothing_is_named(window):
    """transformers builds such masks, and attends to everything under them; dense attention gave NaN."""
    rule = Visible(window=window, rule=lambda b, h, q, k: (k <= q) & (k > q - window))
    with pytest.raises(UnsupportedModelError, match=f"window of {window} tokens"):
        require_rule(rule)


def test_arguments_of_the_attention_call():
    require_neutral({"position_ids": torch.arange(3), "use_cache": False, "new": None, "other": 0.0})
    with pytest.raises(UnsupportedModelError, match=r"does not know \(a, b\)"):
        require_neutral({"b": 1, "a": torch.zeros(2)})
    with pytest.raises(UnsupportedModelError, match="pair of positions"):
        require_neutral({"position_bias": torch.zeros(2)})


def test_masks_with_functions_of_their_own_are_refused():
    def rule(*_):
        return torch.tensor(True)

    assert (
        ragkv.attention.visibility.visible(mask_function=rule, batch_size=1, dtype=torch.float32, local_size=4).window
        == 4
    )
    for more in ({"use_vmap": True}, {"attention_mask": torch.ones(1, 3)}, {"surprise": 1}):
        with pytest.raises(UnsupportedModelError):
            ragkv.attention.visibility.visible(mask_function=rule, **more)


def test_a_twin_shares_every_tensor_and_nothing_else(make_model):
    model = make_model("gemma3").module
    other = twin(model)
    for one, two in ((model.parameters(), other.parameters()), (model.buffers(), other.buffers())):
        assert [id(t) for t in one] == [id(t) for t in two]
    set_windows(other, {8: 5})
    other.set_attn_implementation("eager")
    assert model.config.sliding_window == 8
    assert model.config._attn_implementation == "ragkv"
    found = {getattr(m, "sliding_window", None) for m in other.modules()} - {None}
    assert found == {5}
