"""The self-check on load detects every fault planted here, and each refusal names it."""

import copy
import re
from dataclasses import replace

import pytest
import torch

import ragkv.attention.batch
from ragkv.attention import in_place
from ragkv.attention.batch import BatchPlan, DecodeBatch, Step, _DevicePlan
from ragkv.attention.kv import PlacedChunk
from ragkv.attention.partial import PartialAttention, merge_partials_of
from ragkv.attention.rope import QueryRotation
from ragkv.attention.sequence import ArenaBlock, ChunkGroup, KVCache
from ragkv.benchmarks.evaluation import families
from ragkv.errors import ModelLoadError, UnsupportedModelError
from ragkv.model.attention_hook import Visible, require_neutral, require_rule, visible, window_of
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.language_model import LanguageModel, set_windows, shallow_copy
from ragkv.model.self_check import check_model
from ragkv.types import Capability
from ragkv.util.plugins import kernel_module

WINDOWED = ["mistral-sliding", "gemma2", "gemma3", "cohere2", "qwen2-moe-sliding", "phimoe-sliding"]
NIGHTLY_WINDOWED = {"gemma2", "cohere2", "phimoe-sliding"}
"""Families whose windows only `make test-all` tests."""


def windowed(family, *more):
    return pytest.param(*more, family, marks=[pytest.mark.nightly] * (family in NIGHTLY_WINDOWED))


@pytest.fixture
def refused(make_model):
    """Check a copy of a model that passed without the fault: it, or every engine that meets the fault, is refused."""

    for family in ("llama", "gpt-oss", *WINDOWED):
        make_model(family)

    def check(family: str, match: str) -> None:
        model = copy.copy(make_model(family))
        try:
            check_model(model)
        except UnsupportedModelError as error:
            message = [str(error)]
            assert message[0].startswith(f"Model '{family}' ({model.config.model_type}) is not supported: ")
        else:
            message = list(model.missing_capabilities.values())
        assert any(re.search(match, sentence) for sentence in message), message

    return check


@pytest.mark.parametrize("family", [windowed(family) for family in WINDOWED])
def test_windows_are_found_and_long_ones_are_proved_too(family, make_model, monkeypatch):
    """A real model's window is far longer than the self-check's prompt, so it is shrunk on a copy."""
    model = make_model(family)
    model.windows = []
    check_model(model)
    assert model.windows == [8]
    long = model.with_windows({8: 4096})
    check_model(long)
    assert long.windows == [4096]
    assert long._model.config.sliding_window == 4096
    assert model.config.sliding_window == 8
    honest = Step.attend
    monkeypatch.setattr(Step, "attend", lambda run, call: honest(run, replace(call, window=None)))
    with pytest.raises(UnsupportedModelError, match="causal forward pass"):
        check_model(long)


READS, WEIGHTS, BY, ROTATED, OWN = (
    BatchPlan.reads,
    BatchPlan._weights,
    QueryRotation.by,
    QueryRotation._rotated,
    _DevicePlan.own,
)
MASK, WRITE, DECODE = DecodeBatch._mask, ArenaBlock.write, DecodeBatch.attend
POSITIONS, STEP = Step.positions.fget, LanguageModel.step


def calls(change):
    """Change every attention call of a pass."""
    honest = Step.attend
    return Step, "attend", lambda step, call: honest(step, change(call))


def reads(change):
    """Change every read of chunk KV."""
    return BatchPlan, "reads", lambda plan, window: tuple(change(read) for read in READS(plan, window))


def masks(change):
    return reads(lambda read: read if read.mask is None else replace(read, mask=change(read.mask)))


def merged(change):
    return ragkv.attention.batch, "merge_partials_of", change


def without_the_edge(read):
    mask = None if read.mask is None else read.mask[:, 1:]
    return replace(read, first=read.first + 1, mask=mask) if read.first else read


def of_one_row(read):
    """What is read once for several rows reaches only the first half of them."""
    if isinstance(read.tokens, slice):
        return read
    half = len(read.tokens) // 2
    offset = read.offset if isinstance(read.offset, int) else read.offset[:half]
    return replace(read, tokens=read.tokens[:half], offset=offset)


def of_another_row(read):
    return read if isinstance(read.tokens, slice) else replace(read, tokens=read.tokens.roll(1))


def rolled_weights(plan):
    """Two rows have their own groups: the weights go to other tokens."""
    half = plan.spans[0].n
    return [replace(w, factor=w.factor.roll(half), addend=w.addend.roll(half)) for w in WEIGHTS(plan)]


def next_offset(rotation, offset, tokens):
    last = len(rotation.rows) - 1
    if isinstance(offset, int):
        return BY(rotation, list(rotation.rows)[min(rotation.rows[offset] + 1, last)], tokens)
    return BY(rotation, (offset + 1).clamp_max(last), tokens)


def by_other_partners(change):
    """Queries are rotated with wrong partner elements."""

    def rotated(rotation, row, at):
        wide, partner = rotation.table.widened(rotation.query)
        return ROTATED(replace(rotation, _wide=(wide, change(partner))), row, at)

    return rotated


def mixed_offsets(rotation, offset, tokens):
    """Only visible if rows at different offsets are read together."""
    return BY(rotation, offset if isinstance(offset, int) else offset.flip(0), tokens)


def overwriting(parts, tokens):
    found = merge_partials_of(parts, tokens)
    for which, part in parts:
        if not isinstance(which, slice):
            found.out[:, :, which], found.lse[:, :, which] = part.out.float(), part.lse
    return found


def unweighted(parts, tokens):
    return merge_partials_of([(which, PartialAttention(part.out, part.lse * 0)) for which, part in parts], tokens)


def swapped_own(self, *args, **rest):
    """Every row gets the result of the last row with the same number of tokens."""
    part, weighed = OWN(self, *args, **rest)
    equal = {span.n: span.start for span in self.plan.spans}
    order = list(range(self.plan.tokens))
    for span in self.plan.spans:
        order[span.start : span.start + span.n] = range(equal[span.n], equal[span.n] + span.n)
    return PartialAttention(part.out[:, :, order], part.lse[:, :, order]), weighed


def one_key_too_many(batch, window):
    seen = MASK(batch, window)
    return None if seen is None else seen | seen.roll(1, -1)


def of_the_next_row(*given, **more):
    part = DECODE(*given, **more)
    return PartialAttention(part.out.roll(1, 2), part.lse.roll(1, 2))


def a_percent_more(self, *args, **rest):
    return STEP(self, *args, **rest) * 1.01


def begun_anew(step):
    return [i - step.spans[0].sequence.cache.length for i in POSITIONS(step)]


QUESTION, MOVED, WEIGHTED = "a question over", "moved chunks", "weighted group"
OTHER_MODE = property(lambda group: (group.scale * group.temperature, 0.0))
LLAMA = ["llama"]
FAULTS = {
    "a window that is one too long": (
        WINDOWED,
        "causal forward pass",
        calls(lambda c: replace(c, window=c.window and c.window + 1)),
    ),
    "windows that end at the own tokens": (WINDOWED, QUESTION, (BatchPlan, "reads", lambda plan, _: READS(plan, None))),
    "a mask over chunks that is one too late": (WINDOWED, QUESTION, masks(lambda mask: mask.roll(1, 1))),
    "a mask over chunks that is one too early": (WINDOWED, QUESTION, masks(lambda mask: mask.roll(-1, 1))),
    "a mask of another row": (WINDOWED, QUESTION, masks(lambda mask: mask.roll(1, 0))),
    "keys at the window's edge that are not read": (WINDOWED, QUESTION, reads(without_the_edge)),
    "groups without a weight": (LLAMA, WEIGHTED, (ChunkGroup, "weight", (1.0, 0.0))),
    "a weight of the other mode": (LLAMA, "other mode", (ChunkGroup, "weight", OTHER_MODE)),
    "groups without a temperature": (LLAMA, WEIGHTED, reads(lambda read: replace(read, temperature=1.0))),
    "weights of another row": (LLAMA, WEIGHTED, (BatchPlan, "_weights", rolled_weights)),
    "a group that is plain attention": (LLAMA, WEIGHTED, (ChunkGroup, "plain", True)),
    "chunks read where they were made": (["llama", "gemma2", "mistral-sliding"], MOVED, (PlacedChunk, "offset", 0)),
    "rows whose offsets are mixed up": (LLAMA, MOVED, (QueryRotation, "by", mixed_offsets)),
    "rotation by the next offset of the table": (LLAMA, MOVED, (QueryRotation, "by", next_offset)),
    "rotation the other way": (LLAMA, MOVED, (QueryRotation, "_rotated", by_other_partners(torch.neg))),
    "no rotation": (LLAMA, MOVED, (QueryRotation, "_rotated", by_other_partners(torch.zeros_like))),
    "pairs for halves": (LLAMA, MOVED, (QueryRotation, "_rotated", by_other_partners(lambda q: q.flip(-1)))),
    "queries of another row": (LLAMA, QUESTION, reads(of_another_row)),
    "a chunk that is read for one row alone": (LLAMA, "a group weighted by its other mode", reads(of_one_row)),
    "a chunk that is lost": (LLAMA, QUESTION, (BatchPlan, "reads", lambda plan, window: READS(plan, window)[:-1])),
    "parts of some tokens that overwrite the others": (LLAMA, QUESTION, merged(overwriting)),
    "parts that are added without their weights": (LLAMA, QUESTION, merged(unweighted)),
    "own tokens of another row": (LLAMA, QUESTION, (_DevicePlan, "own", swapped_own)),
    # of rows that take one token each, of unequal length, in one arena block
    "own tokens that no mask hides": (LLAMA, QUESTION, (DecodeBatch, "_mask", lambda batch, window: None)),
    "an own token too many": (LLAMA, QUESTION, (DecodeBatch, "_mask", one_key_too_many)),
    "own tokens in the slot of another": (
        LLAMA,
        QUESTION,
        (ArenaBlock, "write", lambda block, at, slots, *more: WRITE(block, at, slots.roll(1), *more)),
    ),
    "own tokens at the place of another": (
        LLAMA,
        QUESTION,
        (ArenaBlock, "write", lambda block, at, slots, places, *more: WRITE(block, at, slots, places * 0, *more)),
    ),
    "results of the next row": (LLAMA, QUESTION, (DecodeBatch, "attend", of_the_next_row)),
    "positions that begin anew in every step": (
        LLAMA,
        "causal forward pass",
        (Step, "positions", property(begun_anew)),
    ),
    "rows that stand where another row does": (
        LLAMA,
        QUESTION,
        (Step, "positions", property(lambda step: sorted(POSITIONS(step)))),
    ),
    "logits of one percent more": (LLAMA, "differs from transformers", (LanguageModel, "step", a_percent_more)),
    "key heads that are mixed up": (
        LLAMA,
        "causal forward pass",
        calls(lambda call: replace(call, value=call.value.flip(1))),
    ),
}
CASES = [
    windowed(family, name) if families_ is WINDOWED else (name, family)
    for name, (families_, *_) in FAULTS.items()
    for family in families_
]


@pytest.mark.usefixtures("without_kernel")
@pytest.mark.parametrize(("fault", "family"), CASES)
def test_a_fault_is_refused_by_its_name(fault, family, monkeypatch, refused):
    _, reason, (owner, name, value) = FAULTS[fault]
    monkeypatch.setattr(owner, name, value)
    refused(family, reason)


def test_own_tokens_of_earlier_steps(monkeypatch, refused):
    append, commit = KVCache.append, KVCache.commit
    for family in ("llama", "mistral-sliding"):
        with monkeypatch.context() as forgotten:
            forgotten.setattr(KVCache, "append", lambda self, layer, k, v: append(self, layer, k, v) and (k, v))
            refused(family, "causal forward pass")
    with monkeypatch.context() as one_short:
        one_short.setattr(KVCache, "append", lambda *a: tuple(t[:, :, min(1, a[0].length) :] for t in append(*a)))
        refused("llama", "causal forward pass")
    with monkeypatch.context() as miscounted:
        miscounted.setattr(KVCache, "commit", lambda self, n: commit(self, n - (self.length == 0)))
        refused("llama", "chunk|causal forward pass|rotary|shape|size")


def test_keys_that_are_read_in_place(monkeypatch, refused):
    """Addresses, rotations and results; the self-check reads a question at once, and token by token."""
    row, compute, within = in_place.table_row, in_place._compute, in_place._Group.within
    many = in_place._compute_many
    wrong = {
        "one key too few": ("table_row", lambda *a: (*row(*a)[:2], row(*a)[2] - 1, *row(*a)[3:])),
        "keys that are the values": ("table_row", lambda *a: (row(*a)[1], *row(*a)[1:])),
        "chunks where they were encoded": ("table_row", lambda key, value, rotation: row(key, value, -1)),
        "other heads' results": ("_compute", lambda *a: (compute(*a), a[3].copy_(a[3].roll(1, 1)))),
        "weights of other tokens": ("_compute", lambda *a: (compute(*a), a[4].copy_(a[4] + 1))),
    }
    wrong_many = {
        "many other heads' results": ("_compute_many", lambda *a: (many(*a), a[3].copy_(a[3].roll(1, 1)))),
        "results of other tokens": ("_compute_many", lambda *a: (many(*a), a[3].copy_(a[3].roll(1, 2)))),
        "weights of many other tokens": ("_compute_many", lambda *a: (many(*a), a[4].copy_(a[4] + 1))),
    }
    if kernel_module("ragkv.attention.flash_kernel"):  # AVX-512
        wrong |= wrong_many
    for name, replacement in wrong.values():
        with monkeypatch.context() as fault:
            fault.setattr(in_place, name, replacement)
            refused("llama", "a question over|causal forward pass|rotary|weight")
    monkeypatch.setattr(in_place._Group, "within", lambda part, at, _, others: within(part, at, None, others))
    refused("mistral-sliding", "a question over|causal forward pass|window")


def test_sinks_that_are_forgotten_or_counted_for_every_part(monkeypatch, refused):
    attend, merge = Step.attend, ragkv.attention.batch.merge_partials_of

    def forgotten(self, call):
        sink = None if any(span.sequence.segments for span in self.spans) else call.sink
        return attend(self, replace(call, sink=sink))

    with monkeypatch.context() as patch:
        patch.setattr(ragkv.attention.batch, "beside_sink", lambda sink, part: part.out)
        refused("gpt-oss", "causal forward pass")
    with monkeypatch.context() as patch:
        patch.setattr(Step, "attend", forgotten)
        refused("gpt-oss", "a question over")
    with monkeypatch.context() as patch:
        none = torch.zeros(4)  # adds the sinks once more, as if every group of chunks had them

        def twice(parts, tokens):
            part = merge(parts, tokens)
            return PartialAttention(part.out * torch.sigmoid(part.lse - none[:, None])[..., None], part.lse)

        patch.setattr(ragkv.attention.batch, "merge_partials_of", twice)
        refused("gpt-oss", "a question over")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", [0.01, 0.1])
def test_queries_that_are_scaled_from_some_position_on(beta, dtype, make_model):
    """Chunks are moved only as far as the scale is the same (Ministral 3), or not at all (Beam)."""
    scaled = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": beta}
    if "ministral3" not in families.families():
        pytest.skip("not in this version of transformers")
    for original, within in ((64, 64), (300, 300), (500, 500), (512, None)):
        parameters = {**scaled, "original_max_position_embeddings": original}
        transformers_own = families.small_model("ministral3", layers=2, rope_parameters=parameters).to(dtype)
        checkpoint = Checkpoint(name="small", location="small", local=True)
        model = LanguageModel(transformers_own, make_model("llama").tokens._tokenizer, checkpoint)
        check_model(model)
        assert (model.moves_within, dict(model.missing_capabilities)) == (within, {}), original


@pytest.mark.parametrize("what", ["queries", "keys"])
def test_what_is_scaled_far_away_alone(what, make_model, monkeypatch):
    """By a thousandth, from a position that no configuration names."""
    from transformers.models.llama import modeling_llama

    honest = modeling_llama.apply_rotary_pos_emb
    model = copy.copy(make_model("llama"))
    embedding = modeling_llama.LlamaRotaryEmbedding.forward
    far = {"factor": torch.ones(1)}

    def noted(self, x, position_ids):
        far["factor"] = torch.where(position_ids > 200, 1.001, 1.0)[:, None, :, None]
        return embedding(self, x, position_ids)

    def scaled(q, k, cos, sin, **more):
        q, k = honest(q, k, cos, sin, **more)
        factor = far["factor"] if far["factor"].shape[-2] == q.shape[-2] else 1.0
        return (q * factor, k) if what == "queries" else (q, k * factor)

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", noted)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", scaled)
    check_model(model)
    assert Capability.MOVE in model.missing_capabilities
    assert "scales queries by position" in model.missing_capabilities[Capability.MOVE]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (RuntimeError("a kernel\nof many lines"), r"ragkv cannot run its attention \(a kernel\)\.$"),
        (AttributeError("'Visible' object has no attribute 'dtype'"), "uses its attention mask as a tensor"),
        (KeyError("full_attention"), r"\(the key 'full_attention' is missing\)\.$"),
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
    with pytest.raises(UnsupportedModelError, match="do not get the masks"):
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
    """transformers builds such masks and then attends to everything; dense attention gave NaN."""
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

    assert visible(mask_function=rule, batch_size=1, dtype=torch.float32, local_size=4).window == 4
    for more in ({"use_vmap": True}, {"attention_mask": torch.ones(1, 3)}, {"surprise": 1}):
        with pytest.raises(UnsupportedModelError):
            visible(mask_function=rule, **more)


def test_a_twin_shares_every_tensor_and_nothing_else(make_model):
    model = make_model("gemma3").module
    other = shallow_copy(model)
    for one, two in ((model.parameters(), other.parameters()), (model.buffers(), other.buffers())):
        assert [id(t) for t in one] == [id(t) for t in two]
    set_windows(other, {8: 5})
    other.set_attn_implementation("eager")
    assert model.config.sliding_window == 8
    assert model.config._attn_implementation == "ragkv"
    found = {getattr(m, "sliding_window", None) for m in other.modules()} - {None}
    assert found == {5}
