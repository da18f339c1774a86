"""APE's default, the shared prefix's length, and what an index's file states; Eq. 5 is in test_engines.py."""

import torch
from asking import CHUNKS, PREFIX, SUFFIX, forced

from ragkv.config import IndexConfig, load_config, save_config
from ragkv.engines import make_engine
from ragkv.engines.ape import APEConfig


def test_at_the_default_one_chunk_is_plain_attention(unlike_family, make_model):
    """T = S = 1 reweighs nothing: the logits are those of one causal forward, at the question and along an answer."""
    model = make_model(unlike_family)
    answer = [90, 91, 92]
    tokens = [*PREFIX, *CHUNKS[1], *SUFFIX, *answer]
    with model.plain() as plain:
        logits = plain(input_ids=torch.tensor([tokens]), use_cache=False).logits
    expected = logits[0, -len(answer) - 1 :].float()  # (answer + 1, vocabulary)
    for settings in ({}, {"temperature": 1.0, "scale": 1.0}, {"temperature": 1.0, "scale": 1.0, "scale_mode": "log"}):
        engine = make_engine("ape", {"ape": settings})
        assert (engine.config.temperature, engine.config.scale) == (1.0, 1.0)
        found = forced(model, engine, answer, chunks=[CHUNKS[1]])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_an_index_keeps_the_pair_that_its_file_states(tmp_path):
    """The default is the engine's, not the file's: an index that says nothing has the default of the version."""
    save_config(tmp_path, IndexConfig(model="m"))
    assert make_engine("ape", load_config(tmp_path).tuning).config == APEConfig(temperature=1.0, scale=1.0)
    save_config(tmp_path, IndexConfig(model="m", tuning={"ape": {"temperature": 0.9, "scale": 0.9}}))
    assert make_engine("ape", load_config(tmp_path).tuning).config == APEConfig(temperature=0.9, scale=0.9)
