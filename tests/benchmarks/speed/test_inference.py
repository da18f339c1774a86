"""The benchmarks of prefill and decoding have their rows, each with a baseline."""

import json

import pytest
from rounding import fits
from steady import stopwatches
from typer.testing import CliRunner

from ragkv.benchmarks.speed import inference, report
from ragkv.benchmarks.speed.inference import cached_step, measure_decode, random_llama, random_request
from ragkv.cli.bench import bench
from ragkv.engines.block import BlockAttention
from ragkv.errors import UsageError
from ragkv.model.apb.document import TABLE, BlockLengths
from ragkv.runtime import Stream, runtime_of


def test_both_sides_continue_with_the_same_tokens():
    """The baseline's cache has the KV that the engine reads: in fp32 the greedy tokens are equal."""
    few = {"vocab_size": 4000, "hidden_size": 96, "num_hidden_layers": 3, "initializer_range": 0.1}
    lm, engine = random_llama("float32", "cpu", {**inference.SHAPE, **few}), BlockAttention()
    request = random_request(lm, 300)
    stream, inputs = Stream(runtime_of(lm), engine, request), engine.cache(lm, request)
    ids, at = request.suffix_ids, inputs["past_key_values"].get_seq_length()
    for _ in range(4):
        token = cached_step(lm, inputs["past_key_values"], ids, at)
        assert token == stream.best()
        stream.advance(token)
        at += len(ids)
        ids = (token,)


@pytest.mark.usefixtures("quick")
def test_every_figure_stands_beside_its_baseline():
    found = measure_decode("90", rounds=1, device="cpu").to_json()
    assert found["bench"] == "decode"
    assert [(row["name"], row["baseline"]) for row in found["rows"]] == [
        ("token, 90 tokens", "transformers DynamicCache"),
        ("token, 90 tokens", "transformers StaticCache"),
        ("second token, 90 tokens", "transformers DynamicCache"),
    ]
    for row in found["rows"]:
        assert fits(row, digits=2), row


@pytest.fixture
def quick(make_model, monkeypatch):
    """A tiny model, and clocks that advance at every reading."""
    monkeypatch.setattr(inference, "random_llama", lambda *_: make_model("llama"))
    monkeypatch.setattr(inference, "WARM", 16)
    for module in (inference, report):
        stopwatches(monkeypatch, module)


@pytest.mark.usefixtures("quick")
def test_rows_are_told_beside_their_baselines():
    result = CliRunner().invoke(bench, ["apb", "--lengths", "96", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    several = ("apb on 2 ranks, 96 tokens vs full", "apb on 2 ranks, 96 tokens vs apb")
    for name in ("apb, 96 tokens vs full", "star, 96 tokens vs full", "apb, 96 tokens vs star", *several):
        assert {name, f"{name}: operations"} <= rows.keys()
    assert rows["apb, 96 tokens vs full"]["baseline"] == "full"
    assert rows["apb, 96 tokens vs full"]["baseline_value"] == rows["star, 96 tokens vs full"]["baseline_value"]
    # the slower of two ranks has 4 of 8 blocks, and the KV passed on grows from block to block
    share = rows["apb on 2 ranks, 96 tokens vs apb: operations"]
    assert 1.5 < share["ratio"] < 2


@pytest.mark.usefixtures("quick")
def test_lengths_of_blocks_are_those_given(monkeypatch):
    cuts = []
    within = inference._in_blocks
    monkeypatch.setattr(inference, "_in_blocks", lambda *given: cuts.append(given[2]) or within(*given))
    arguments = ["apb", "--lengths", "96", "--block-tokens", "32,8,4", "--ranks", "1", "--json"]
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 0, result.output
    assert "ranks" not in result.stdout
    assert cuts[-1] == BlockLengths(block=32, anchor=8, passing=4)
    wrong = CliRunner().invoke(bench, ["apb", "--block-tokens", "32,8"])
    assert isinstance(wrong.exception, UsageError)


def test_short_blocks_save_more_operations_than_the_papers(make_model):
    assert inference.block_lengths(4096) == BlockLengths(block=512, anchor=128, passing=32)
    short = inference.block_lengths(32768)
    assert short == BlockLengths(block=2048, anchor=512, passing=128)
    model, ids = make_model("llama"), (5,) * 32768
    assert inference._in_blocks(model, ids, short)[1] < inference._in_blocks(model, ids, TABLE[32768])[1]
