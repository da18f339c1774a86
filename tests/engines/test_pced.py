"""PCED's β, rules, groups and memory: every variant against separate forwards, and what is held how often."""

from __future__ import annotations

import math
import weakref

import oracle
import pytest
import torch
from asking import CHUNKS, PREFIX, SCORES, STEPS, SUFFIX, request, run
from script import by_hand

import ragkv.attention.step
from ragkv.engines import make_engine
from ragkv.engines.evidence import Evidence, divergence, divergence_terms
from ragkv.runtime import Stream, runtime_of

MANY = [[50 + i + j for j in range(3 + i % 4)] for i in range(7)]
RELEVANCE = [0.4, 0.9, 0.35, 0.8, 0.8, 0.1, 0.6]


@pytest.mark.parametrize("family", ["llama3-scaling", "gemma2", "qwen3"])
@pytest.mark.parametrize(
    "settings",
    [
        {"beta": "shared"},
        {"beta": "released"},
        {"beta": 0.5},
        {"beta": 0.0, "gamma": 0.0},
        {"aggregation": "moe"},
        {"aggregation": "poe"},
        {"aggregation": "moe", "beta": "released"},
    ],
    ids=str,
)
def test_variants_equal_separate_forwards(family, settings, make_model):
    model = make_model(family)
    literal = {"rule" if key == "aggregation" else key: value for key, value in settings.items()}
    with model.plain() as plain:
        expected = oracle.pced(plain, PREFIX, CHUNKS, SUFFIX, SCORES, STEPS, **literal)
    assert run(model, "pced", tuning=settings) == expected


@pytest.mark.parametrize("size", [1, 3, 7, 50])
@pytest.mark.parametrize("rule", ["max", "moe", "poe"])
@pytest.mark.parametrize("beta", ["per_expert", "shared", "released"])
def test_groups_change_nothing(size, rule, beta, make_model):
    model = make_model("llama-long")
    settings = {"aggregation": rule, "beta": beta}
    asked = {"chunks": MANY, "scores": RELEVANCE, "steps": 4}
    grouped = run(model, "pced", tuning=settings | {"group_experts": size}, **asked)
    assert grouped == run(model, "pced", tuning=settings, **asked)


def test_without_contrast_and_prior_one_expert_is_single(make_model):
    model = make_model("smollm3")
    alone = {"chunks": [CHUNKS[1]], "scores": [0.9]}
    single = run(model, "full", **alone)[0]
    for rule in ("max", "moe", "poe"):
        settings = {"beta": 0.0, "gamma": 0.0, "aggregation": rule}
        assert run(model, "pced", tuning=settings, **alone)[0] == single


@pytest.mark.parametrize("size", [0, 1, 2])
def test_ties_go_to_the_higher_score_then_the_earlier_expert(size, make_model):
    """Made-up logits: every expert says the same."""
    model = make_model("llama")
    engine = make_engine("pced", {"pced": {"gamma": 0.0, "group_experts": size}})
    wanted = request(model, engine, chunks=[CHUNKS[0]] * 3, scores=[0.5, 0.7, 0.7])
    winners = []

    def choose(ask):
        winners.append(ask.owners[int(ask.winners[ask.best()])])
        return int(ask.best())

    row = torch.randn(50)
    by_hand(engine.program(wanted, model), lambda ask: row.repeat(len(ask.rows), 1), choose=choose, steps=2)
    assert winners == [2, 2]  # chunks come in ascending relevance: the last of equals is the most relevant


def test_tokens_of_equal_score_go_to_the_higher_r_then_to_the_lower_id(make_model, monkeypatch):
    """The stated total order: score, r, expert, token id. A lower id of a less relevant expert comes after."""
    model = make_model("llama")
    engine = make_engine("pced", {"pced": {"beta": 0.0, "gamma": 0.0}})
    asked = request(model, engine, chunks=CHUNKS[:2], scores=[0.8, 0.9])
    rows = torch.zeros(3, 320)
    rows[2, 3] = rows[1, 7] = rows[1, 9] = 5.0  # rows: the amateur, r = 0.9, r = 0.8
    monkeypatch.setattr(model, "step", lambda *_: rows.clone())
    stream = Stream(runtime_of(model), engine, asked)
    assert (stream.best(), stream.winner(7), stream.winner(3)) == (7, 1, 0)


@pytest.mark.parametrize("rule", ["max", "moe", "poe"])
def test_ties_across_groups_go_to_the_earlier_expert(rule):
    row = torch.randn(50)
    evidence = Evidence(rule, torch.full((4,), 0.5), 1.0)
    for size in (1, 2, 1):
        evidence.add(row.repeat(size, 1), torch.zeros(50), torch.zeros(size, 1))
    assert (evidence.winners == 0).all()


def test_low_scores_make_an_expert_inert(make_model):
    _, winners = run(make_model("llama"), "pced", scores=[0.0, 0.9, 0.0])
    assert set(winners) == {1}


def test_divergence_is_bounded_and_zero_for_equals():
    logits = torch.randn(5, 40) * 20
    assert (divergence(logits, logits[0])[0] < 1e-6).all()
    found = divergence(logits, torch.randn(40) * 20)
    assert (found >= 0).all()
    assert (found <= math.log(2)).all()
    apart = torch.full((1, 2), -1e4)
    apart[0, 0] = 1e4
    torch.testing.assert_close(divergence(apart, -apart[0]), torch.tensor([math.log(2)]))
    torch.testing.assert_close(divergence_terms(logits[1], logits[0]).sum() / 2, divergence(logits, logits[0])[1])


def test_evidence_works_in_the_logits_it_is_given():
    """At 90 experts and 128K tokens a second copy would be 46 MB; `max` makes none, whatever the number of groups."""
    logits, amateur = torch.randn(4, 50), torch.randn(50)
    expected = (1.5 * logits - 0.5 * amateur + torch.tensor([0.9, 0.5, 0.5, 0.0]).clamp_min(1e-12).log()[:, None]).max(
        0
    )
    evidence = Evidence("max", torch.tensor([0.9, 0.5, 0.5, 0.0]), 1.0)
    for group in logits.split(2):
        evidence.add(group, amateur, torch.full((2, 1), 0.5))
    torch.testing.assert_close(evidence.scores, expected.values)
    assert torch.equal(evidence.winners, expected.indices)
    torch.testing.assert_close(logits.max(0).values, expected.values)  # used up: prior and contrast are in them


@pytest.mark.parametrize("beta", ["per_expert", "released", 0.5])
def test_one_groups_logits_at_a_time(beta, make_model, monkeypatch):
    """The logits of a group are gone before the next group runs, at the first token too."""
    model = make_model("llama-long")
    honest, alive, most = model.step, [], []

    def watched(*args, **kwargs):
        most.append(sum(ref() is not None for ref in alive))
        logits = honest(*args, **kwargs)
        alive.append(weakref.ref(logits.untyped_storage()))
        return logits

    monkeypatch.setattr(model, "step", watched)
    run(model, "pced", chunks=MANY, scores=RELEVANCE, steps=2, tuning={"group_experts": 2, "beta": beta})
    assert len(most) == 2 + 12  # prefix and chunks encoded; four groups, three passes
    assert set(most) == {0}


def test_the_prefix_is_one_tensor_for_all_experts(make_model, monkeypatch):
    """Handed to the kernel once per layer and pass, whatever the number of experts: no copy, no row of its own."""
    model = make_model("llama")
    engine = make_engine("pced", {})
    asked = request(model, engine, chunks=MANY, scores=RELEVANCE)
    calls = []
    honest = ragkv.attention.step.partial_attention

    def watched(query, key, value, **rest):
        calls.append((key.data_ptr(), key.shape[0], query.shape[2], value.data_ptr()))
        return honest(query, key, value, **rest)

    monkeypatch.setattr(ragkv.attention.step, "partial_attention", watched)
    stream = Stream(runtime_of(model), engine, asked)
    stream.advance(5)
    stream.advance(6)
    for layer in range(model.layers):
        keys, values = asked.prefix.keys[layer].data_ptr(), asked.prefix.values[layer].data_ptr()
        read = [(keys, 1, (len(MANY) + 1) * tokens, values) for tokens in (len(SUFFIX), 1, 1)]
        assert [call for call in calls if call[0] == keys] == read
