"""`ragkv bench`: every figure stands beside its baseline, in one JSON form; and both sides compute the same."""

import json

import pytest
from rounding import fits
from steady import stopwatches
from typer.testing import CliRunner

from ragkv.benchmarks.speed import batch, inference, report
from ragkv.benchmarks.speed.inference import cached_step, random_llama, random_request
from ragkv.cli.main import app
from ragkv.engines.block import BlockAttention
from ragkv.errors import UsageError
from ragkv.runtime import Stream, runtime_of

FEW = {**inference.SHAPE, "vocab_size": 4000, "hidden_size": 96, "num_hidden_layers": 3, "initializer_range": 0.1}
DECODE = ["token, 90 tokens", "token, 90 tokens", "second token, 90 tokens"]
BATCH = [f"2 questions, {name}" for name in ("same chunks vs one by one", "own chunks vs one by one")]
INGEST = ["encode vs one chunk at a time", "encode vs padded batches of 8"]


@pytest.fixture
def tiny(monkeypatch):
    """A tiny model, and clocks that advance at every reading."""
    for module in (inference, batch):
        monkeypatch.setattr(module, "random_llama", lambda *_: random_llama("float32", "cpu", FEW))
    for module in (inference, report):
        stopwatches(monkeypatch, module)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("ttft --tokens 90 --rounds 1", [f"{name}, 90 tokens" for name in inference.ENGINES]),
        ("decode --tokens 90 --rounds 1", DECODE),
        ("batch --questions 2 --chunks 1 --rounds 1", [*BATCH, "2 questions, same chunks vs shared cache"]),
        ("ingest --chunks 3 --rounds 1", INGEST),
    ],
)
def test_every_figure_stands_beside_its_baseline(command, names):
    result = CliRunner().invoke(app, ["bench", *command.split(), "--device", "cpu", "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    payload = json.loads(result.stdout)
    assert payload.keys() == {"bench", "machine", "versions", "rows"}
    assert (payload["bench"], set(payload["versions"]) >= {"ragkv", "torch", "transformers"}) == (
        command.split()[0],
        True,
    )
    assert [row["name"] for row in payload["rows"]] == names
    for row in payload["rows"]:
        assert row.keys() == {"name", "value", "unit", "baseline", "baseline_value", "ratio"}
        more_is_better = row["unit"].endswith("/s")
        assert more_is_better or fits(row, digits=2), row
        assert not more_is_better or row["ratio"] == pytest.approx(row["value"] / row["baseline_value"], rel=0.01)


def test_both_sides_continue_with_the_same_tokens():
    """The baseline's cache has the KV that the engine reads: in fp32 the greedy tokens are equal."""
    lm, engine = random_llama("float32", "cpu", FEW), BlockAttention()
    request = random_request(lm, 300)
    stream, inputs = Stream(runtime_of(lm), engine, request), engine.cache(lm, request)
    ids, position = request.suffix_ids, inputs["past_key_values"].get_seq_length()
    for _ in range(4):
        token = cached_step(lm, inputs["past_key_values"], ids, position)
        assert token == stream.best()
        stream.advance(token)
        position += len(ids)
        ids = (token,)


def test_every_benchmark_has_its_options_and_an_option_needs_its_value():
    for name in ("ttft", "decode", "llama-cpp", "vllm", "batch", "ingest", "store"):
        shown = CliRunner().invoke(app, ["bench", name, "--help"])
        assert (shown.exit_code, "--quick" in shown.output) == (0, True)
    run = CliRunner().invoke(app, ["bench", "decode", "--tokens", "--json"])
    assert "'--tokens' requires an argument" in str(run.exception)


def test_quick_chooses_the_sizes_by_itself():
    run = CliRunner().invoke(app, ["bench", "decode", "--quick", "--tokens", "90"])
    assert isinstance(run.exception, UsageError)
    assert "leave one of them out" in str(run.exception)


@pytest.mark.parametrize(
    ("value", "other", "shown"),
    [(0.000012345, 1234.5678, (0.0000123, 1234.568)), (0.123456, 0.0123456, (0.123, 0.0123)), (0.0, 7.0, (0.0, 7.0))],
)
def test_a_small_figure_is_not_rounded_to_nothing(value, other, shown):
    row = report.BenchRow.of("x", value, "s", "y", other, 0.00123456)
    assert ((row.value, row.baseline_value), row.ratio) == (shown, 0.00123)
