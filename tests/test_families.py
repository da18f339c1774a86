"""Every decoder family of the installed transformers is answered exactly or refused with a reason.

The oracle is `ragkv.benchmarks.evaluation.families`: dense, uncached forward passes of transformers, compared with
ragkv's engines. A sample of the mechanisms runs here; `make test-all` judges all families, as `make models` does (ten
minutes on one core).
"""

import pytest
import torch

from ragkv.benchmarks.evaluation import families
from ragkv.benchmarks.evaluation.families import ENGINES, EXACT, examine
from ragkv.engines import Request, make_engine
from ragkv.errors import PromptTooLongError, UnsupportedModelError
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.language_model import LanguageModel
from ragkv.model.self_check import load_checked
from ragkv.runtime import Generation, runtime_of

MUST = (
    "llama mistral ministral ministral3 mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text phi3 phimoe "
    "glm glm4 glm4_moe olmo olmo2 olmo3 olmoe flex_olmo granite granitemoe granitemoeshared smollm3 cohere cohere2 "
    "cohere2_moe exaone4 exaone_moe ernie4_5 ernie4_5_moe seed_oss apertus arcee minimax_m2 starcoder2 gpt_neox "
    "internlm3 dots1 helium bitnet vaultgemma nanochat afmoe aria_text cwm hy_v3 hyperclovax iquestcoder jais2 jetmoe "
    "kolibri1 laguna mellum solar_open emu3 gpt_oss mimo_v2_flash granite_swa granitemoe_swa "
    "dbrx phi persimmon fuyu stablelm nemotron gemma4_unified_text moshi modernbert-decoder falcon gptj "
    "gpt_neox_japanese flint gemma3n_text deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3 longcat_flash youtu axk1"
)
"""Families that must stay accepted; those that the installed transformers does not have yet are skipped."""

SAMPLE = {
    "qwen2_moe": "windows in the mask alone, on some layers",
    "phimoe": "windows in the mask alone, on all layers",
    "gemma2": "soft caps and windows",
    "gemma3_text": "two kinds of rotary angles",
    "cohere2": "windows with RoPE, full layers without",
    "gpt_neox": "partial rotary angles, parallel layers",
    "ministral3": "queries scaled by position",
    "deepseek_v2": "latent attention, positions as complex numbers",
    "longcat_flash": "latent attention, pairs of numbers rotated apart",
    "gpt_oss": "attention sinks and windows",
    "stablelm": "layers that hand nothing through, rotary angles of the first dimensions",
    "gemma4_unified_text": "rotary functions of one tensor, heads of different size",
    "gptj": "attention by a method, rotary angles in a table",
    "falcon": "attention by code of its own",
}

ELSEWHERE = ("qwen2_moe", "phimoe", "gemma2", "gemma3_text", "cohere2", "gpt_oss")
"""Families of `conftest`, on which the tests of engines and runtime are exact."""

KEPT = {
    "gpt2": "no rotary positions",
    "whisper": "no rotary positions",
    "hunyuan_v1_dense": "changed after or besides",
    "beam": "scales queries by position",
}
"""Families whose chunks cannot be moved; every other engine is exact on them."""

RESUMED = {
    "olmo_hybrid": "a gated delta net",
    "minimax": "a cache of a class of its own",
    "lfm2": "convolutions beside attention",
}
"""`tests/model/test_stateful.py` has others."""

REFUSED = {
    "roberta": "a causal forward pass differs",
    "diffllama": "computes attention 2 times",
    "hrm_text": "computes attention 8 times",
    "doge": "uses its attention mask as a tensor",
}

pytestmark = pytest.mark.filterwarnings("ignore")  # from transformers, about its default configurations

BIG = 40_000_000  # parameters: families without a small model are only tested for refusal without loading weights
ALL_EXACT = dict.fromkeys(ENGINES, "exact")


def examined(family, tokenizer, *, steps=4, **changes):
    """The verdict on a small model of the family, and the result for each engine."""
    if family not in families.families():
        pytest.skip("not in this version of transformers")
    verdict = examine(family, families.small_model(family, **changes), tokenizer, steps=steps)
    return verdict, {name: verdict.engine(name) for name in ENGINES}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.nightly] * (name in ELSEWHERE)) for name in SAMPLE]
)
def test_a_sample_is_exact(family, tokenizer):
    verdict, engines = examined(family, tokenizer, layers=4)
    assert engines == ALL_EXACT, verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("family", KEPT)
def test_chunks_that_cannot_be_moved_are_read_in_place(family, tokenizer):
    verdict, engines = examined(family, tokenizer, layers=2)
    assert engines == ALL_EXACT | {"block": "refused"}
    assert KEPT[family] in verdict.reason
    assert verdict.reason.endswith("use engine 'ape'.")


@pytest.mark.slow
@pytest.mark.parametrize("family", RESUMED)
def test_a_sample_of_those_that_are_resumed_is_exact(family, tokenizer):
    verdict, engines = examined(family, tokenizer, steps=3)
    assert engines == ALL_EXACT | {"block": "refused", "ape": "refused"}
    assert verdict.reason.endswith("use engine 'pced'.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"), [("lfm2", {}), ("minimax_m3_vl_text", {"mlp_layer_types": ["dense", "sparse"]})]
)
def test_where_all_layers_attend_to_all_every_engine_is_exact(family, changes, tokenizer):
    verdict, engines = examined(family, tokenizer, layers=2, layer_types=["full_attention"] * 2, **changes)
    assert engines == ALL_EXACT, verdict.reason


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", ()),
        ("lfm2", ("conv", "full_attention")),
        ("minimax_m3_vl_text", ("full_attention", "minimax_m3_sparse", "dense", "sparse")),
        ("ministral", ("sliding_attention", "full_attention")),
        ("gpt_neo", ("global", "local")),
    ],
)
def test_a_small_model_has_the_layers_of_real_ones(family, kinds):
    if family not in families.families():
        pytest.skip("not in this version of transformers")
    assert families.layer_kinds(families.small_config(family)) == kinds


def test_an_encoder_is_as_deep_as_its_decoder_only_where_the_familys_own_is():
    depths = {name: families.small_config(name) for name in ("bart", "blenderbot", "blenderbot-small")}
    assert {name: (config.encoder_layers, config.decoder_layers) for name, config in depths.items()} == {
        "bart": (8, 8),
        "blenderbot": (4, 8),
        "blenderbot-small": (8, 8),
    }
    assert "its num_hidden_layers is the encoder's (4), and its decoder has 8" in families.judge("blenderbot").reason


def test_a_family_is_judged_with_every_rope_type_that_it_may_be_given(monkeypatch):
    examined = families.FamilyVerdict(family="any", errors=dict.fromkeys(ENGINES, 0.0))
    monkeypatch.setattr(families, "examine", lambda *_, **__: examined)  # this tests which models are tried
    phi3, llama, opt = (families.judge(family) for family in ("phi3", "llama", "opt"))
    assert llama.ropes == families.ROPE_TYPES
    assert phi3.ropes == ("default", "longrope")
    assert opt.ropes == ()
    assert [llama.models, opt.models] == [6, 3]


def test_what_one_model_of_a_family_refuses_is_refused():
    exact = families.FamilyVerdict(family="llama", errors=dict.fromkeys(ENGINES, 1e-6), ropes=("default",), models=1)
    errors = {"full": 1e-5, "pced": 1.0, "block": 0.0}
    other = families.FamilyVerdict(family="llama", errors=errors, reasons={"ape": "no"}, ropes=("yarn",), models=1)
    both = exact.joined(other)
    assert both.joined(exact) == families.FamilyVerdict(
        family="llama",
        errors={"full": 1e-5, "pced": 1.0, "block": 1e-6},
        reasons={"ape": "no"},
        ropes=("default", "yarn"),
        models=3,
    )
    assert [both.engine(name) for name in ENGINES] == ["exact", "wrong", "exact", "refused"]


LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 80,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 80}),
        ("phimoe", {"rope_parameters": {**LONG, "short_mscale": 1.1, "long_mscale": 1.3}}),
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 80}),
    ],
)
def test_angles_that_depend_on_the_length_are_exact_up_to_the_length_at_which_they_change(family, changes, tokenizer):
    verdict, engines = examined(family, tokenizer, steps=2, layers=2, **changes)
    assert engines == ALL_EXACT, verdict.reason
    model = families.small_model(family, layers=2, **changes)
    language = LanguageModel(model, tokenizer, Checkpoint(name=family, location=family, local=True))
    language.require_positions(80)
    with pytest.raises(PromptTooLongError, match=r"has 80, as far as its RoPE \((longrope|dynamic)\) is the one that"):
        language.require_positions(81)


@pytest.mark.parametrize("family", REFUSED)
def test_a_sample_is_refused_with_its_reason(family, tokenizer):
    verdict, _ = examined(family, tokenizer, steps=1, layers=2)
    assert {"block", "ape"} <= set(verdict.reasons)
    assert verdict.error is None or verdict.error <= EXACT
    assert REFUSED[family] in verdict.reason


def test_layers_that_choose_their_keys_by_an_index_are_refused(tokenizer):
    kinds = {"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"]}
    verdict, _ = examined("minimax_m3_vl_text", tokenizer, steps=1, layers=2, **kinds)
    assert "sparse attention" in verdict.reason


@pytest.mark.nightly
@pytest.mark.parametrize("family", families.families())
def test_every_family_is_exact_or_refused(family):
    verdict = families.judge(family)
    assert not (family in MUST.split() and verdict.reasons), verdict.reason
    assert verdict.errors or verdict.reason.startswith((f"Model {family!r} (", "Not tried: ")), verdict.reason
    assert verdict.error is None or verdict.error <= EXACT


@pytest.mark.nightly
@pytest.mark.parametrize("family", families.families())
def test_full_writes_the_tokens_that_transformers_generates(family, tokenizer):
    try:
        if families.parameters(family, size=1) > BIG:
            pytest.skip("cannot be shrunk")
        model = families.small_model(family, seed=7, size=1)
        language = load_checked(model, tokenizer, Checkpoint(name=family, location=family, local=True))
    except UnsupportedModelError as error:
        pytest.skip(str(error))
    except Exception:
        pytest.skip("no small model")
    language.eos_ids = frozenset()
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(4, min(language.config.vocab_size, 60), (40,), generator=generator).tolist()
    request = Request(prefix_ids=tuple(ids[:10]), chunks=(), suffix_ids=tuple(ids[10:]))
    written = runtime_of(language).decode(make_engine("full", {}), request, Generation(max_new_tokens=10))
    plain = families.small_model(family, seed=7, size=1)
    settings = plain.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = None
    settings.pad_token_id = 0
    with torch.inference_mode():
        # Moshi's cached steps differ from its own forward pass
        found = plain.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False, use_cache=family != "moshi")
    assert [token.token_id for token in written] == found[0, len(ids) :].tolist()


@pytest.fixture(scope="session")
def tokenizer(make_model):
    return make_model("llama").tokens._tokenizer
