"""Models whose sequences resume from a state: equal to whole forward passes, alone and batched, also after a fault."""

import inspect
from dataclasses import dataclass, field

import pytest
import torch

from ragkv.attention.kv import PlacedChunk
from ragkv.attention.sequence import ChunkGroup, KVCache, TokenSequence
from ragkv.benchmarks.evaluation import families
from ragkv.engines import supported_engines
from ragkv.errors import UnsupportedModelError
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.self_check import load_checked
from ragkv.model.stateful import CacheLayout, CachePacking, ResumeOptions, StatefulModel

pytestmark = pytest.mark.filterwarnings("ignore")  # from transformers, about its default configurations
PREFIX, FIRST, SECOND, QUESTION = [7, 9, 4, 30], [11, 5, 80, 6, 7, 44, 9], [3, 17, 51], [8, 8, 60, 14]


@pytest.fixture(scope="module")
def tokenizer(make_model):
    return make_model("llama").tokens._tokenizer


@pytest.fixture(scope="module")
def load(tokenizer):
    def made(family: str, **changes) -> StatefulModel:
        if family not in families.families():
            pytest.skip("not in this version of transformers")
        here = Checkpoint(name=family, location=family, local=True)
        return load_checked(families.small_model(family, **changes), tokenizer, here)

    return made


@pytest.fixture(scope="module")
def hybrid(load) -> StatefulModel:
    return load("falcon_h1", layers=3)


def whole(model, *parts) -> torch.Tensor:
    ids = [i for part in parts for i in part]
    with torch.inference_mode():
        return model.module(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def experts(model) -> list[TokenSequence]:
    """The amateur and an expert per chunk, as in PCED."""
    [prefix] = model.encode([PREFIX])
    before = PlacedChunk(kv=prefix, start=0)
    chunks = [PlacedChunk(kv=kv, start=len(PREFIX)) for kv in model.encode([FIRST, SECOND], prefix=prefix)]
    return [
        TokenSequence.over(seen, position=seen[-1].end) for seen in ((before,), *((before, chunk) for chunk in chunks))
    ]


def expected(model, *more) -> torch.Tensor:
    return torch.stack([whole(model, PREFIX, part, QUESTION, more)[-1] for part in ([], FIRST, SECOND)])


def close(found, right) -> bool:
    return bool((found - right).abs().max() <= 2e-5 * right.abs().max())


@pytest.mark.parametrize("family", ["falcon_h1", "mamba", "rwkv", "bloom"])
def test_experts_go_on_from_what_is_stored(load, family, request):
    model = request.getfixturevalue("hybrid") if family == "falcon_h1" else load(family, layers=2)
    assert isinstance(model, StatefulModel)
    assert family != "mamba" or not model.resume_options.several
    rows = experts(model)
    assert close(model.step(rows, [QUESTION] * 3), expected(model))
    assert close(model.step(rows, [[5]] * 3), expected(model, 5))
    assert close(model.step(rows[1:], [[6]] * 2), expected(model, 5, 6)[1:])
    assert [row.position for row in rows] == [
        len(PREFIX) + n + len(QUESTION) for n in (1, len(FIRST) + 2, len(SECOND) + 2)
    ]
    assert [row.cache.length for row in rows] == [5, 6, 6]


def test_which_engines_it_bears(hybrid):
    able = supported_engines(hybrid)
    assert {"full", "single", "pced", "ippd"} <= set(able)
    assert not {"ape", "block"} & set(able)
    assert "recurrent layers" in next(iter(hybrid.missing_capabilities.values()))


def test_one_cache_serves_any_number_of_rows(hybrid):
    rows = experts(hybrid)
    again = [TokenSequence(row.groups, row.position) for row in rows]
    first = hybrid.step(rows, [QUESTION] * 3)
    hybrid.step(rows, [[9]] * 3)
    assert torch.equal(hybrid.step(again, [QUESTION] * 3), first)


@pytest.mark.parametrize("way", ["several", "ragged", "ragged_several", "together"])
def test_every_way_gives_the_same(hybrid, way):
    options = ResumeOptions(**{name: name == way or way == "together" for name in ("several", "ragged", "together")})
    rows = experts(hybrid)
    other = hybrid.with_resume_options(options)
    assert close(other.step(rows, [QUESTION] * 3), expected(hybrid))
    assert close(other.step(rows, [[5]] * 3), expected(hybrid, 5))


def test_rows_read_as_many_tokens_as_each_wants(hybrid):
    rows = [*experts(hybrid), TokenSequence((), 0)]
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
    held = {id(row.cache.held) for row in rows}
    assert len(held) == 1
    before = rows[0].cache.held
    hybrid.step(rows, [[5]] * 3)
    after = rows[0].cache.held
    assert after is not before
    assert all(row.cache.held is after for row in rows)
    assert after.lengths == tuple(length + 1 for length in before.lengths)


def test_a_pass_that_fails_changes_nothing(hybrid, monkeypatch):
    rows = experts(hybrid)
    hybrid.step(rows, [QUESTION] * 3)
    kept = [[tensor.clone() for tensor in row.cache.held.row(row.cache.index)] for row in rows]
    places = [(row.position, row.cache.length) for row in rows]
    head = hybrid.module.lm_head

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(head), "forward", fail)
        with pytest.raises(MemoryError):
            hybrid.step(rows, [[5]] * 3)
    assert [(row.position, row.cache.length) for row in rows] == places
    for row, tensors in zip(rows, kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row.cache.held.row(row.cache.index), tensors, strict=True))
    assert close(hybrid.step(rows, [[5]] * 3), expected(hybrid, 5))


def test_a_row_resumes_one_state_and_sees_it_first(hybrid):
    first, second = experts(hybrid)[1:]
    both = (*first.segments, PlacedChunk(kv=second.segments[1].kv, start=first.position))
    with pytest.raises(ValueError, match="resumes one state"):
        hybrid.step([TokenSequence.over(both, position=both[-1].end)], [QUESTION])
    with pytest.raises(ValueError, match="resumes one state"):
        hybrid.step([TokenSequence.over(first.segments[1:], position=first.position)], [QUESTION])
    with pytest.raises(ValueError, match="ends at"):
        hybrid.step([TokenSequence.over(first.segments, position=first.position + 1)], [QUESTION])
    with pytest.raises(UnsupportedModelError, match="weights its segments"):
        hybrid.step(
            [TokenSequence((ChunkGroup(segments=first.segments, temperature=0.5),), first.position)], [QUESTION]
        )


def test_a_row_for_its_kv_alone_gives_no_logits(hybrid):
    row, asked = TokenSequence.for_kv((), position=0), TokenSequence((), 0)
    found = hybrid.step([row, asked], [PREFIX, FIRST])
    assert len(found) == 1
    assert isinstance(row.cache, KVCache)
    assert row.cache.chunk_kv().tokens == len(PREFIX)


def test_the_kv_is_cut_free_of_other_rows(hybrid):
    rows = [TokenSequence.for_kv((), position=0) for _ in range(2)]
    hybrid.step(rows, [PREFIX, PREFIX])
    kv = rows[1].cache.chunk_kv()
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in kv.tensors if t.numel())


@pytest.mark.parametrize(
    ("seed", "least", "dtype"),
    [
        (5, 0.001, torch.bfloat16),
        pytest.param(0, 0.3, torch.float32, marks=pytest.mark.nightly),
        pytest.param(0, 0.3, torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param(5, 0.001, torch.float32, marks=pytest.mark.nightly),
    ],
)
def test_bounds_of_time_steps_that_single_tokens_do_not_have_are_a_refusal(seed, least, dtype, tokenizer):
    """Nemotron-H applies `time_step_min` only in passes over several tokens; few tokens of a trained model reach it."""
    sizes = {"chunk_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
    sizes |= {"moe_shared_expert_intermediate_size": 96}
    model = families.small_model("nemotron_h", seed=seed, time_step_min=least, **sizes).to(dtype)
    with pytest.raises(UnsupportedModelError, match="and it cannot resume from its own cache: logits computed"):
        load_checked(model, tokenizer, Checkpoint(name="small", location="small", local=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)])
def test_rounding_does_not_hide_in_which_ways_a_model_goes_on(dtype, load, tokenizer):
    """The error of padding before a shorter row is smaller than the difference of two half-precision forward passes."""
    exact = load("blenderbot-small", layers=2, decoder_layers=2)
    assert not exact.resume_options.ragged
    model = families.small_model("blenderbot-small", layers=2, decoder_layers=2).to(dtype)
    again = load_checked(model, tokenizer, Checkpoint(name="small", location="small", local=True))
    assert again.resume_options == exact.resume_options


@pytest.mark.parametrize("layers", [1, 3])
def test_a_decoder_that_is_not_as_deep_as_its_encoder_is_refused_in_words(layers, load):
    with pytest.raises(UnsupportedModelError, match=rf"encoder's \(2\), and its decoder has {layers}\."):
        load("bart", layers=2, decoder_layers=layers)


def test_bigbird_attends_to_all_tokens_whatever_it_has_read(load, caplog):
    sparse = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
    model = load("big_bird", layers=2, **sparse)
    assert "attends to all tokens" in caplog.text
    right = families.small_model("big_bird", layers=2, **sparse | {"attention_type": "original_full"})
    ids = [(7 * i) % 61 + 3 for i in range(40)]
    with torch.inference_mode():
        expected = right(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    assert close(model.step([TokenSequence((), 0)], [ids], every=True), expected)


def test_what_goes_on_token_by_token_alone_is_found_out(load):
    assert not load("jamba", layers=2, attn_layer_period=2, attn_layer_offset=1).resume_options.several


def remembers(out, ids, use_cache):
    out.logits = out.logits + remembers.last
    remembers.last = float(out.logits[0, -1, 0]) if use_cache else 0.0


remembers.last = 0.0


def looks_ahead(out, ids, use_cache):
    out.logits = out.logits + ids[:, -1:, None]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(remembers, "and it cannot resume from its own cache: a token"), (looks_ahead, "tokens after it")],
)
def test_a_model_that_remembers_beside_its_cache_or_looks_ahead_is_refused(fault, reason, tokenizer, monkeypatch):
    model = families.small_model("bloom", layers=2)
    forward = type(model).forward

    def faulty(self, input_ids, *args, **kwargs):
        out = forward(self, input_ids, *args, **kwargs)
        fault(out, input_ids, kwargs.get("use_cache"))
        return out

    faulty.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(type(model), "forward", faulty)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_checked(model, tokenizer, Checkpoint(name="bloom", location="bloom", local=True))


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
    if isinstance(model, StatefulModel):
        assert model.max_positions == 64


def test_windows_are_proved_although_they_are_long(load, monkeypatch):
    """llama4's attention is chunked at fixed positions, thousands of tokens apart: the self-check must detect that."""
    from transformers.models.llama4 import modeling_llama4

    right = modeling_llama4.create_chunked_causal_mask
    assert isinstance(load("llama4_text", layers=2, attention_chunk_size=4096), StatefulModel)

    def whole_when_cached(**given):
        cache = given.get("past_key_values")
        held = cache is not None and cache.get_seq_length()
        return modeling_llama4.create_causal_mask(**given) if held else right(**given)

    monkeypatch.setattr(modeling_llama4, "create_chunked_causal_mask", whole_when_cached)
    with pytest.raises(UnsupportedModelError, match="cannot resume"):
        load("llama4_text", layers=2, attention_chunk_size=4096)


def test_rows_are_not_padded_where_an_index_counts_blocks_of_keys(load):
    """At real sizes a block is longer than the self-check's rows, so the self-check cannot detect the effect of
    padding.
    """
    kinds = {"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"]}
    model = load("minimax_m3_vl_text", layers=2, **kinds)
    options = model.resume_options
    assert (options.ragged, options.ragged_several, options.together) == (False, False, True)
    rows = experts(model)
    assert close(model.step(rows, [QUESTION] * 3), expected(model))


ROWS, HEADS, WIDTH = 1, 2, 3


@dataclass
class Layer:
    keys: torch.Tensor
    states: dict[int, torch.Tensor]
    seen: int
    size: int = 4
    flag: bool = True


@dataclass
class Cache:
    layers: list[Layer] = field(default_factory=list)


def cache(tokens: int, rows: int = 1, *, grown: int | None = None, state: int = 5, seen: int | None = None) -> Cache:
    """A cache of two layers after `tokens` tokens."""
    grown = tokens if grown is None else grown
    return Cache(
        [
            Layer(
                keys=torch.arange(rows * HEADS * grown * WIDTH).float().reshape(rows, HEADS, grown, WIDTH) + layer,
                states={0: torch.full((rows, state), float(tokens + layer))},
                seen=tokens if seen is None else seen,
            )
            for layer in range(2)
        ]
    )


def learnt(**odd) -> CacheLayout:
    return CacheLayout.of((5, cache(5, **odd)), [(6, cache(6, **odd)), (9, cache(9, **odd))], cache(5, rows=2, **odd))


def test_two_caches_of_one_tree_have_nothing_in_common():
    tree = learnt()
    first, second = (tree.make(tree.read(cache(n)), n) for n in (7, 8))
    first.layers[0].states[0] = torch.zeros(1)
    assert second.layers[0].states[0].shape == (1, 5)
    assert (first.layers[0].seen, second.layers[1].seen, second.layers[0].flag) == (7, 8, True)


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        (lambda n, rows: cache(n, rows, grown=n // 2 + 1), "grows by a rule"),
        (lambda n, rows: cache(n, rows, seen=n * n), "a counter in its cache"),
        (lambda n, rows: cache(n, 1), "grows by a rule"),
        (lambda n, rows: Cache(cache(n, rows).layers[: n - 4]), "the layout of its cache"),
        (lambda n, rows: {"common": torch.full((3,), float(n))}, "shares between sequences"),
        (lambda n, rows: cache(n, 3 * rows - 2), "batches sequences"),
    ],
)
def test_a_form_that_cannot_be_told_is_refused(caches, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        CacheLayout.of((5, caches(5, 1)), [(6, caches(6, 1)), (9, caches(9, 1))], caches(5, 2))


def test_kv_of_another_form_is_no_cache_of_this_model():
    tree = learnt()
    packing = CachePacking(tree, tree.read(cache(5)), layers=2, dtype=torch.float32)
    kv = packing.pack(tree.read(cache(5)), 5, 0)
    object.__setattr__(kv, "states", kv.states[::-1])
    with pytest.raises(ValueError, match="has the state"):
        packing.unpack([kv])


def test_what_grows_in_another_type_is_refused():
    tree = learnt()
    with pytest.raises(UnsupportedModelError, match="another dtype"):
        CachePacking(tree, tree.read(cache(5)), layers=2, dtype=torch.bfloat16)
