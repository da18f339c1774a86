"""Block-Attention's sinks, presets and warnings, and its cache used by transformers."""

from dataclasses import replace

import oracle
import pytest
from asking import CHUNKS, PREFIX, STEPS, SUFFIX, continues, request, run

from ragkv.engines import make_engine
from ragkv.engines.block import block_starts, sink_tokens
from ragkv.errors import ConfigError, UnsupportedModelError


def tagged(model, monkeypatch, **recommended):
    monkeypatch.setattr(model, "checkpoint", replace(model.checkpoint, recommended=recommended))
    return model


def test_sinks(make_model):
    model = make_model("llama")
    with model.plain() as plain:
        nothing = oracle.block(plain, [], CHUNKS, SUFFIX, STEPS)
        first = oracle.block(plain, PREFIX[:1], CHUNKS, SUFFIX, STEPS)
    assert run(model, "block", tuning={"sink": "none"})[0] == nothing
    assert run(model, "block", tuning={"sink": "bos"})[0] == first
    assert run(model, "block", prefix=[])[0] == nothing


def test_a_checkpoints_sink_is_obeyed_unless_overruled(make_model, monkeypatch):
    model = tagged(make_model("llama"), monkeypatch, block_tuned=True, sink="bos")
    found = run(model, "block")[0]
    assert found == run(model, "block", tuning={"sink": "bos"})[0]
    assert found != run(model, "block", tuning={"sink": "prefix"})[0]
    with pytest.raises(ConfigError, match=r"ragkv\.json .* names the sink 'drain'"):
        run(tagged(model, monkeypatch, sink="drain"), "block")


def test_warnings_say_what_runs(make_model, monkeypatch):
    model = make_model("llama")
    presets = {p: make_engine("block", {"block": {"preset": p}}) for p in ("block", "prompt-cache", "no-positions")}
    assert make_engine("full", {}).warning(model) is None
    assert "not trained for Block-Attention" in presets["block"].warning(model)
    assert "as Prompt Cache" in presets["prompt-cache"].warning(model)
    assert "without position re-encoding" in presets["no-positions"].warning(model)
    tagged(model, monkeypatch, block_tuned=True)
    assert presets["block"].warning(model) is None
    assert presets["prompt-cache"].warning(model) is None
    assert "without position re-encoding" in presets["no-positions"].warning(model)


def test_a_model_that_was_tuned_without_positions_is_read_so(make_model, monkeypatch):
    model = tagged(make_model("llama"), monkeypatch, block_tuned=True, positions="kept")
    engines = {p: make_engine("block", {"block": {"preset": p}}) for p in ("block", "prompt-cache", "no-positions")}
    assert 'preset = "no-positions"' in engines["block"].warning(model)
    assert 'preset = "no-positions"' in engines["prompt-cache"].warning(model)
    assert engines["no-positions"].warning(model) is None


def test_over_is_followed_as_a_checkpoint_was_tuned(make_model, monkeypatch):
    model = make_model("llama")
    engines = {over: make_engine("block", {"block": {"over": over}}) for over in ("standalone", "prefixed")}
    assert 'over = "prefixed"' in engines["standalone"].warning(model)
    assert "over" not in engines["prefixed"].warning(model)
    for tuned, other in (("standalone", "prefixed"), ("prefixed", "standalone")):
        tagged(model, monkeypatch, block_tuned=True, over=tuned)
        assert engines[tuned].warning(model) is None
        assert f'over = "{tuned}"' in engines[other].warning(model)
    tagged(model, monkeypatch, block_tuned=True, over="both")
    with pytest.raises(ConfigError, match=r"over in ragkv.json of model .* must be one of standalone, prefixed"):
        engines["prefixed"].warning(model)
    with pytest.raises(ConfigError, match="reads standalone chunk KV"):
        make_engine("block", {"block": {"over": "prefixed", "preset": "no-positions"}})


def test_blocks_as_fine_tuning_lays_them_out():
    """A prompt without a prefix has no BOS as sink; each block starts where the last one ends, or at 0."""
    assert [sink_tokens(sink, 5) for sink in ("prefix", "bos", "none")] == [5, 1, 0]
    assert [sink_tokens(sink, 0) for sink in ("prefix", "bos", "none")] == [0, 0, 0]
    assert block_starts([4, 0, 7, 2]) == [0, 4, 4, 11]
    assert block_starts([4, 0, 7, 2], reencode=False) == [0, 0, 0, 0]
    assert block_starts([]) == []


def test_presets_differ_in_positions_alone(make_model):
    model = make_model("llama")
    assert run(model, "block", tuning={"preset": "prompt-cache"}) == run(model, "block")
    assert run(model, "block", tuning={"preset": "no-positions"})[0] != run(model, "block")[0]


def test_transformers_own_generate_continues_from_the_cache(unlike_family, make_model):
    """Keys are literally rotated and concatenated (§2.5) without ragkv's attention: the same greedy tokens."""
    continues(make_model(unlike_family), {})


@pytest.mark.parametrize(
    "tuning", [{"sink": "bos"}, {"sink": "none"}, {"preset": "no-positions"}, {"over": "prefixed"}]
)
def test_the_cache_has_the_engines_sink_and_positions(tuning, make_model):
    continues(make_model("llama3-scaling"), tuning)


def test_a_cache_cannot_keep_positions_and_windows(make_model):
    """transformers would let the question see keys whose kept positions are out of its window."""
    model = make_model("mistral-sliding")
    engine = make_engine("block", {"block": {"preset": "no-positions"}})
    with pytest.raises(UnsupportedModelError, match="has sliding windows, which transformers' generate would count"):
        engine.cache(model, request(model, engine))


def test_a_cache_of_nothing_but_the_question(make_model):
    model = make_model("llama")
    engine = make_engine("block", {"block": {"sink": "none"}})
    arguments = engine.cache(model, request(model, engine, chunks=[[]], scores=[0.5]))
    assert arguments["input_ids"].tolist() == [SUFFIX]
    assert arguments["past_key_values"].get_seq_length() == 0
