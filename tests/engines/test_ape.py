"""APE's settings against Eq. 5, PCW as one of them, and the shared prefix's length."""

from __future__ import annotations

import oracle
import pytest
import torch
from asking import CHUNKS, PREFIX, STEPS, SUFFIX, request, run

from ragkv.config import IndexConfig, PromptConfig, load_config, save_config
from ragkv.engines import make_engine
from ragkv.engines.ape import APEConfig
from ragkv.errors import ConfigError
from ragkv.model.prompt import Tokens, render
from ragkv.runtime import Stream, runtime_of


def expected(model, prefix, **settings):
    with model.plain() as plain:
        plain.set_attn_implementation("ragkv-oracle")
        return oracle.ape(plain, prefix, CHUNKS, SUFFIX, STEPS, **settings)


@pytest.mark.parametrize("family", ["llama3-scaling", "gemma3"])
@pytest.mark.parametrize("mode", ["power", "log"])
@pytest.mark.parametrize(("temperature", "scale"), [(1.0, 1.0), (0.2, 0.3), (0.6, 1.0), (1.0, 0.1)])
def test_every_corner_of_the_search_range(family, mode, temperature, scale, make_model):
    model = make_model(family)
    found = run(model, "ape", tuning={"temperature": temperature, "scale": scale, "scale_mode": mode})[0]
    assert found == expected(model, PREFIX, temperature=temperature, scale=scale, mode=mode)


@pytest.mark.parametrize("family", ["llama-yarn", "gemma2", "cohere2"])
def test_pcw_is_no_prefix_and_nothing_reweighed(family, make_model):
    """Parallel context windows: chunks side by side from position 0, ordinary softmax over all of them."""
    model = make_model(family)
    found = run(model, "ape", tuning={"temperature": 1.0, "scale": 1.0}, prefix=[])[0]
    assert found == expected(model, [], temperature=1.0, scale=1.0)


@pytest.mark.parametrize("length", [1, 2, 12, 42])
def test_any_prefix_length(length, make_model):
    model = make_model("qwen2")
    prefix = [0, *[13] * (length - 1)]
    pair = {"temperature": 0.9, "scale": 0.9}
    assert run(model, "ape", tuning=pair, prefix=prefix)[0] == expected(model, prefix, **pair)


def test_logits_follow_equation_5_and_not_only_the_argmax(make_model):
    """A temperature of 1 that were ignored, or a scale that were squared, would show here."""
    model = make_model("llama")
    scores = {}
    for pair in ((1.0, 1.0), (0.9, 1.0), (0.9, 0.9)):
        engine = make_engine("ape", {"ape": {"temperature": pair[0], "scale": pair[1]}})
        scores[pair] = Stream(runtime_of(model), engine, request(model, engine)).scores
    assert not torch.allclose(scores[1.0, 1.0], scores[0.9, 1.0], atol=1e-3)
    assert not torch.allclose(scores[0.9, 1.0], scores[0.9, 0.9], atol=1e-3)


def test_at_the_default_one_chunk_is_plain_attention(family, make_model):
    """T = S = 1 reweighs nothing: the logits are those of one causal forward, at the question and along an answer."""
    model = make_model(family)
    forced = [90, 91, 92]
    tokens = [*PREFIX, *CHUNKS[1], *SUFFIX, *forced]
    with model.plain() as plain:
        logits = plain(input_ids=torch.tensor([tokens]), use_cache=False).logits
    expected = logits[0, -len(forced) - 1 :].float()  # (forced + 1, vocabulary)
    for settings in ({}, {"temperature": 1.0, "scale": 1.0}, {"temperature": 1.0, "scale": 1.0, "scale_mode": "log"}):
        engine = make_engine("ape", {"ape": settings})
        assert (engine.config.temperature, engine.config.scale) == (1.0, 1.0)
        stream = Stream(runtime_of(model), engine, request(model, engine, chunks=[CHUNKS[1]]))
        found = [stream.scores]
        for token in forced:
            stream.advance(token)
            found.append(stream.scores)
        torch.testing.assert_close(torch.stack(found), expected, atol=1e-4, rtol=1e-4)


class Bare:
    """A base model's tokenizer: no chat template, newlines that merge as text, a BOS."""

    chat_template = None
    bos_token_id = 7
    eos_token_id = None

    def convert_tokens_to_ids(self, tokens):
        return [None] * len(tokens)

    def convert_ids_to_tokens(self, ids):
        return [chr(i) for i in ids]

    def __call__(self, text, **options):
        ids = [] if options.get("add_special_tokens") is False else [self.bos_token_id]
        while text:
            two = text.startswith("\n\n")
            ids.append(99 if two else ord(text[0]))
            text = text[2 if two else 1 :]
        return {"input_ids": ids}


@pytest.mark.parametrize("newlines", [0, 2, 12, 22, 42])
def test_a_base_models_prefix_is_newlines_counted_in_tokens(newlines):
    tokens = Tokens(Bare())
    prompt = render(PromptConfig(system="", context="", prefix_newlines=newlines), tokens)
    assert prompt.prefix_ids(tokens) == (7, *[10] * newlines)
    assert prompt.before_contexts == "\n" * newlines
    assert prompt.suffix_ids(tokens, "Why?") == tokens.encode("Question: Why?\nAnswer:")


def test_newlines_lengthen_a_templates_prefix_too(make_model):
    tokens = make_model("llama").tokens
    short = render(PromptConfig(), tokens).prefix_ids(tokens)
    long = render(PromptConfig(prefix_newlines=10), tokens).prefix_ids(tokens)
    assert long[: len(short)] == short
    assert long[len(short) :] == tokens.encode("\n") * 10
    with pytest.raises(ConfigError, match="prefix_newlines"):
        PromptConfig(prefix_newlines=-1)


def test_an_index_keeps_the_pair_that_its_file_states(tmp_path):
    """The default is the engine's, not the file's: an index that says nothing has the default of the version."""
    save_config(tmp_path, IndexConfig(model="m"))
    assert make_engine("ape", load_config(tmp_path).tuning).config == APEConfig(temperature=1.0, scale=1.0)
    save_config(tmp_path, IndexConfig(model="m", tuning={"ape": {"temperature": 0.9, "scale": 0.9}}))
    assert make_engine("ape", load_config(tmp_path).tuning).config == APEConfig(temperature=0.9, scale=0.9)
