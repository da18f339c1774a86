"""`ragkv bench decode` compares like with like."""

from __future__ import annotations

import pytest
import torch
from rounding import fits

from ragkv.benchmarks.speed.decode import _step, measure, random_request
from ragkv.benchmarks.speed.ttft import random_llama
from ragkv.engines.block import BlockAttention
from ragkv.runtime import Stream, runtime_of


@pytest.mark.slow
def test_both_sides_continue_with_the_same_tokens():
    """The baseline's cache holds what the engine reads: in fp32 the greedy tokens are the same."""
    lm, engine = random_llama("float32", "cpu"), BlockAttention()
    request = random_request(lm, 300)
    stream, inputs = Stream(runtime_of(lm), engine, request), engine.cache(lm, request)
    ids, at = torch.tensor([request.suffix_ids]), inputs["past_key_values"].get_seq_length()
    for _ in range(4):
        token = _step(lm, inputs["past_key_values"], ids, at)
        assert token == stream.best()
        stream.advance(token)
        at += ids.shape[1]
        ids = torch.tensor([[token]])


@pytest.mark.slow
def test_every_figure_stands_beside_its_baseline():
    report = measure([300], rounds=1, device="cpu").to_json()
    assert report["bench"] == "decode"
    assert [(row["name"], row["baseline"]) for row in report["rows"]] == [
        ("token, 300 tokens", "transformers DynamicCache"),
        ("token, 300 tokens", "transformers StaticCache"),
        ("second token, 300 tokens", "transformers DynamicCache"),
    ]
    for row in report["rows"]:
        assert fits(row, digits=2), row
