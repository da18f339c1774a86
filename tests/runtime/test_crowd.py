"""Many requests at once get the answers of one by one, whatever is beside them and however little room there is."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from crowd import alone, asked, together
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NIGHTLY = os.environ.get("RAGKV_NIGHTLY") == "1"
# windows (own, chunk and mask), two kinds of rope, soft caps, layers without rope, partial rotary, YaRN, pairs, sinks
FAMILIES = [
    "llama",
    "mistral-sliding",
    "gemma2",
    "gemma3",
    "cohere2",
    "smollm3",
    "phi4-partial",
    "glm4",
    "qwen3-yarn",
    "gpt-oss",
]


def named(one, tokens):
    """The tokens, their winners as what they read: the same chunk twice is two experts of one opinion."""
    return [replace(t, winner=None if t.winner is None else one.chunks[t.winner]) for t in tokens]


@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=100 if NIGHTLY else 4,
    deadline=None,
    derandomize=not NIGHTLY,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    crowd=st.lists(asked(heats=(0.0, 0.0, 0.8)), min_size=2, max_size=7),
    batch_tokens=st.sampled_from([1, 4, 16, 4096]),
    max_rows=st.sampled_from([1, 3, 256]),
    own_tokens=st.sampled_from([20, 1 << 20]),
)
def test_a_crowd_gets_the_answers_of_one_by_one(family, crowd, batch_tokens, max_rows, own_tokens, make_model):
    model = make_model(family)
    runtime, found = together(model, crowd, batch_tokens=batch_tokens, max_rows=max_rows, own_tokens=own_tokens)
    for one, (job, tokens, scores) in zip(crowd, found, strict=True):
        assert job.error is None
        expected, their_scores = alone(model, one)
        wanted = len(expected) if one.leaves is None else len(tokens)
        assert named(one, tokens) == named(one, expected)[:wanted]
        for ours, theirs in zip(scores, their_scores, strict=False):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert runtime.idle
