"""`ragkv bench llama-cpp`: with a stand-in for llama.cpp, and with llama.cpp itself if it is installed."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rounding import fits
from steady import stopwatches
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ragkv.benchmarks.speed import llama_cpp, report
from ragkv.benchmarks.speed.inference import SHAPE, random_llama
from ragkv.cli.main import app
from ragkv.errors import MissingExtraError, RagkvError, UsageError


@functools.cache
def weights_of(file: Path):
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)


class StandIn:
    """Reads the GGUF file with transformers; a state file contains the tokens read so far."""

    def __init__(self, file: Path, cells: int, *, flash: bool, kv: str = "f16") -> None:
        assert flash or kv == "f16"
        self.cells = cells
        self.model = weights_of(file)
        self.clear()

    def clear(self) -> None:
        self.ids: list[int] = []

    def read(self, ids):
        self.ids += ids
        assert len(self.ids) <= self.cells
        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([self.ids]), logits_to_keep=1).logits[0, -1].numpy()

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(self.ids))

    def load(self, file: Path) -> None:
        assert not self.ids
        self.ids = json.loads(file.read_text())

    def close(self) -> None:
        pass


@pytest.fixture
def model(monkeypatch):
    """A tiny model with heads as wide as a Q8_0 block, and clocks that advance at every reading."""
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}

    def tiny(dtype="auto", *_):
        return random_llama("int8" if dtype == "int8" else "float32", "cpu", {**SHAPE, **shape, "num_hidden_layers": 2})

    monkeypatch.setattr(llama_cpp, "random_llama", tiny)
    stopwatches(monkeypatch, report)
    return tiny()


@pytest.fixture
def standin(monkeypatch):
    monkeypatch.setattr(llama_cpp, "find_spec", lambda name: name)
    monkeypatch.setattr(llama_cpp, "versions", lambda *_: {})
    monkeypatch.setattr(llama_cpp, "LlamaCpp", StandIn)
    monkeypatch.setattr(llama_cpp, "quantised", lambda path, *_: path)
    monkeypatch.setattr(llama_cpp, "_measure_runtime", lambda *_: [])


def rows_of(*arguments: str):
    result = CliRunner().invoke(app, ["bench", "llama-cpp", "--tokens", "90", "--rounds", "1", "--json", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)["rows"]


def check(rows) -> None:
    assert [(row["name"], row["baseline"]) for row in rows[:10]] == [
        ("first token, 90 tokens", "llama.cpp f16, state from a file"),
        ("first token, q8, 90 tokens", "llama.cpp f16, state from a file"),
        ("first token, 90 tokens", "llama.cpp f16, prefill"),
        ("second token, 90 tokens", "llama.cpp f16"),
        ("token, 90 tokens", "llama.cpp f16"),
        ("token, 90 tokens", "llama.cpp q8_0 weights"),
        ("token, 90 tokens", "llama.cpp q8_0 weights and KV"),
        ("token, q8, 90 tokens", "llama.cpp q8_0 weights and KV"),
        ("KV of a token, 90 tokens", "llama.cpp f16, state in a file"),
        ("KV of a token, q8, 90 tokens", "llama.cpp q8_0, state in a file"),
    ]
    for row in rows[:10]:
        assert fits(row, digits=2), row


@pytest.mark.usefixtures("model", "standin")
@pytest.mark.parametrize("dtype", ["auto", pytest.param("int8", marks=pytest.mark.nightly)])
def test_every_figure_stands_beside_llama_cpp(dtype):
    check(rows_of("--dtype", dtype))


@pytest.mark.usefixtures("model")
def test_the_same_with_llama_cpp_itself():
    pytest.importorskip("llama_cpp")
    rows = rows_of()
    check(rows)
    assert [(row["name"], row["baseline"]) for row in rows[10:]] == [
        ("llama-cpp, first token, 90 tokens", "llama.cpp, state from a file"),
        ("llama-cpp, first token, 90 tokens", "llama.cpp, prefill of 90 tokens"),
        ("llama-cpp, token, 90 tokens", "llama.cpp"),
        ("llama-cpp, KV of a token, 90 tokens", "llama.cpp, state in a file"),
        ("llama-cpp, resident memory, 90 tokens", "file, KV and 600 MB"),
    ]
    assert all(fits(row, digits=2) for row in rows[10:])
    kv, memory = rows[13:]
    assert kv["ratio"] == pytest.approx(1, abs=0.2)  # of so few tokens, the states' heads count
    assert 2e6 < memory["value"] * 1e6 < 2e9


def test_a_random_file_is_read_as_transformers_reads_it(tmp_path):
    pytest.importorskip("llama_cpp")
    shape = {**SHAPE, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    file = llama_cpp.random_file({**shape, "tie_word_embeddings": True}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    ids = list(range(40, 72))
    with torch.inference_mode():
        theirs = weights_of(file)(input_ids=torch.tensor([ids]), logits_to_keep=1).logits[0, -1].numpy()
    there = llama_cpp.LlamaCpp(file, 512, flash=False)
    assert np.corrcoef(there.read(ids), theirs)[0, 1] > 0.999
    there.close()


def test_a_model_that_is_no_file_is_refused():
    pytest.importorskip("llama_cpp")
    refused = CliRunner().invoke(app, ["bench", "llama-cpp", "--model", "mini"])
    assert isinstance(refused.exception, UsageError)
    assert "no GGUF file and none of 1.1B, 3B" in str(refused.exception)


def test_other_logits_are_refused(model, standin, monkeypatch):
    monkeypatch.setattr(
        StandIn, "read", lambda self, ids: np.random.default_rng(0).normal(size=model.config.vocab_size)
    )
    found = CliRunner().invoke(app, ["bench", "llama-cpp", "--quick"])
    assert isinstance(found.exception, RagkvError)
    assert "correlate with ours by only" in str(found.exception)


@pytest.mark.parametrize(("package", "remedy"), [("llama_cpp", "pip install llama-cpp-python"), ("gguf", r"\[gguf\]")])
def test_without_a_package_one_sentence_names_it(monkeypatch, package, remedy):
    monkeypatch.setattr(llama_cpp, "find_spec", lambda name: None if name == package else name)
    with pytest.raises(MissingExtraError, match=remedy):
        llama_cpp.measure_llama_cpp()
