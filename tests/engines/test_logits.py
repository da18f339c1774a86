"""The scores of every step, not the chosen token alone: each engine against its slow reference to fp32's precision.

A fault that moves a number without moving the largest one goes unseen where only tokens are compared. The first step
reads the question over chunks where they lie, the later ones over the context laid out.
"""

from __future__ import annotations

import oracle
import pytest
import torch
from asking import run

# prefix 4, chunks shorter and longer than the test models' windows of 8 tokens, the question 3
PREFIX = [0, 41, 42, 43]
CHUNKS = [[50, 51, 52, 53, 54], [60, 61], [70 + i for i in range(13)], [90, 91, 92, 93]]
SCORES = [0.31, 0.44, 0.82, 0.57]
SUFFIX = [100, 101, 102]
STEPS = 4
FAMILIES = [
    "llama-yarn",
    "gemma2",  # soft caps, a window in every other layer
    "gemma2-unwindowed",  # soft caps where rows are laid side by side
    "gemma3",  # two kinds of rotary positions
    "mistral-sliding",
    "smollm3",  # layers without RoPE
]
ASKED = {"prefix": PREFIX, "chunks": CHUNKS, "scores": SCORES, "suffix": SUFFIX, "steps": STEPS}


def found_and_expected(model, name, reference, *, dense=False, scored=False, tuning=None, chunks=CHUNKS, **literal):
    found, expected = [], []
    run(model, name, tuning=tuning, trace=found, **ASKED | {"chunks": chunks, "scores": SCORES[: len(chunks)]})
    scores = (SCORES[: len(chunks)],) if scored else ()
    with model.plain() as plain:
        if dense:
            plain.set_attn_implementation("ragkv-oracle")
        reference(plain, PREFIX, chunks, SUFFIX, *scores, STEPS, trace=expected, **literal)
    return torch.stack(found), torch.stack(expected)


def same(found, expected):
    reach = float(expected[expected.isfinite()].abs().max())
    torch.testing.assert_close(found, expected, atol=3e-5 * reach, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_block(family, make_model):
    same(*found_and_expected(make_model(family), "block", oracle.block, dense=True))


@pytest.mark.parametrize("family", ["llama-yarn", "gemma3"])
def test_block_without_positions(family, make_model):
    tuning = {"preset": "no-positions"}
    same(*found_and_expected(make_model(family), "block", oracle.block, dense=True, tuning=tuning, reencode=False))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pair", [(1.0, 0.6), (0.7, 1.0), (0.5, 0.7)])
@pytest.mark.parametrize("mode", ["power", "log"])
def test_ape(family, pair, mode, make_model):
    tuning = {"temperature": pair[0], "scale": pair[1], "scale_mode": mode}
    literal = {"temperature": pair[0], "scale": pair[1], "mode": mode}
    same(*found_and_expected(make_model(family), "ape", oracle.ape, dense=True, tuning=tuning, **literal))


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3"])
def test_ape_when_a_window_has_left_the_context_behind(family, make_model):
    """Chunks of two tokens are out of reach of a window of eight while the answer is written."""
    pair = {"temperature": 0.5, "scale": 0.7}
    steps = {"steps": 12}
    found, expected = [], []
    model = make_model(family)
    asked = ASKED | {"chunks": [[50, 51], [60]], "scores": [0.5, 0.6]} | steps
    run(model, "ape", tuning=pair, trace=found, **asked)
    with model.plain() as plain:
        plain.set_attn_implementation("ragkv-oracle")
        oracle.ape(plain, PREFIX, [[50, 51], [60]], SUFFIX, 12, trace=expected, **pair)
    same(torch.stack(found), torch.stack(expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_pced(family, make_model):
    same(*found_and_expected(make_model(family), "pced", oracle.pced, scored=True))


@pytest.mark.parametrize("rule", ["max", "moe", "poe"])
@pytest.mark.parametrize("beta", ["per_expert", "shared", "released", 0.3])
@pytest.mark.parametrize("group", [0, 2])
def test_pceds_rules_and_groups(rule, beta, group, make_model):
    """Groups of two experts: what one group leaves behind for the next is part of the scores."""
    tuning = {"aggregation": rule, "beta": beta, "group_experts": group}
    literal = {"rule": rule, "beta": beta}
    same(
        *found_and_expected(make_model("llama"), "pced", oracle.pced, scored=True, tuning=tuning, **literal),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_full(family, make_model):
    same(*found_and_expected(make_model(family), "full", oracle.full))
