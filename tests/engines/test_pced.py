"""PCED's β, rules, groups and memory: every variant against separate forward passes, and the number of copies held."""

import math
import weakref

import pytest
import torch
from asking import CHUNKS, SUFFIX, request, run
from script import by_hand

import ragkv.attention.partial
from ragkv.engines import make_engine
from ragkv.engines.pced import Evidence, divergence, divergence_terms
from ragkv.runtime import Stream, runtime_of

MANY = [[50 + i + j for j in range(3 + i % 4)] for i in range(7)]
RELEVANCE = [0.4, 0.9, 0.35, 0.8, 0.8, 0.1, 0.6]


@pytest.mark.parametrize("size", [0, 1, 2])
def test_ties_go_to_the_higher_score_then_the_earlier_expert(size, make_model):
    """Made-up logits: all experts agree."""
    model = make_model("llama")
    engine = make_engine("pced", {"pced": {"gamma": 0.0, "group_experts": size}})
    wanted = request(model, engine, chunks=[CHUNKS[0]] * 3, scores=[0.5, 0.7, 0.7])
    winners = []

    def choose(ask):
        winners.append(ask.owners[int(ask.winners[ask.best()])])
        return int(ask.best())

    row = torch.randn(50)
    by_hand(engine.program(wanted, model), lambda ask: row.repeat(len(ask.sequences), 1), choose=choose, steps=2)
    assert winners == [2, 2]  # chunks come in ascending relevance, so the last of equals is the most relevant


def test_tokens_of_equal_score_go_to_the_higher_r_then_to_the_lower_id(make_model, monkeypatch):
    """The documented total order: score, r, expert, token id. The lower id of a less relevant expert comes after."""
    model = make_model("llama")
    engine = make_engine("pced", {"pced": {"beta": 0.0, "gamma": 0.0}})
    asked = request(model, engine, chunks=CHUNKS[:2], scores=[0.8, 0.9])
    rows = torch.zeros(3, 320)
    rows[2, 3] = rows[1, 7] = rows[1, 9] = 5.0  # rows: the amateur, r = 0.9, r = 0.8
    monkeypatch.setattr(model, "step", lambda *_, **__: rows.clone())
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


@pytest.mark.parametrize("beta", ["per_expert", "released", 0.5])
def test_one_groups_logits_at_a_time(beta, make_model, monkeypatch):
    """The logits of a group are freed before the next group runs, also for the first token."""
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


@pytest.mark.usefixtures("without_kernel")
def test_the_prefix_is_one_tensor_for_all_experts(make_model, monkeypatch):
    """The kernel gets it once per layer and pass, whatever the number of experts: no copy, no extra row."""
    model = make_model("llama")
    engine = make_engine("pced", {})
    asked = request(model, engine, chunks=MANY, scores=RELEVANCE)
    calls = []
    honest = ragkv.attention.partial.partial_attention

    def watched(query, key, value, **rest):
        calls.append((key.data_ptr(), key.shape[0], query.shape[2], value.data_ptr()))
        return honest(query, key, value, **rest)

    monkeypatch.setattr(ragkv.attention.partial, "partial_attention", watched)
    stream = Stream(runtime_of(model), engine, asked)
    stream.advance(5)
    stream.advance(6)
    for layer in range(model.layers):
        keys, values = asked.prefix.keys[layer].data_ptr(), asked.prefix.values[layer].data_ptr()
        read = [(keys, 1, (len(MANY) + 1) * tokens, values) for tokens in (len(SUFFIX), 1, 1)]
        assert [call for call in calls if call[0] == keys] == read


def joint(rule, logits, amateur, betas, relevance, gamma):
    """Scores and winners `(vocab,)` in fp64, expert by expert, by the paper's equations."""
    rows = [(1 + b) * expert.double() - b * amateur.double() for expert, b in zip(logits, betas, strict=True)]
    if rule == "max":
        prior = [gamma * math.log(max(float(r), 1e-12)) for r in relevance]
        share = torch.stack([row + p for row, p in zip(rows, prior, strict=True)])
        return share.max(0).values, share.argmax(0)
    weights = torch.tensor([max(float(r), 1e-12) ** gamma for r in relevance], dtype=torch.double)
    weights = weights / weights.sum()
    chances = torch.stack([row.softmax(0) for row in rows])
    share = weights[:, None] * chances
    if rule == "moe":
        return share.sum(0).log(), share.argmax(0)
    return (weights[:, None] * chances.log()).sum(0), share.argmax(0)


@pytest.mark.parametrize("rule", ["max", "moe", "poe"])
@pytest.mark.parametrize("sizes", [(5,), (2, 3), (1, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("relevance", [(0.9, 0.7, 0.7, 0.2, 0.01), (0.5, 1e-4, 1e-5, 1e-9, 0.0), (0.0,) * 5], ids=str)
def test_scores_and_winners_are_the_equations(rule, sizes, relevance):
    torch.manual_seed(4)
    logits, amateur = 3 * torch.randn(5, 200), torch.randn(200)
    betas, relevance = [0.1, 0.6, 0.0, 0.3, 0.5], torch.tensor(relevance)
    scores, winners = joint(rule, logits, amateur, betas, relevance, 2.5)
    evidence = Evidence(rule, relevance, 2.5)
    for group, strengths in zip(logits.split(sizes), torch.tensor(betas)[:, None].split(sizes), strict=True):
        evidence.add(group, amateur, strengths)
    torch.testing.assert_close(evidence.scores, scores.float(), atol=1e-4, rtol=1e-5)
    assert torch.equal(evidence.winners, winners)
    if rule == "max":  # in place in the given logits: at 90 experts and 128K tokens a copy would be 46 MB
        torch.testing.assert_close(logits.max(0).values, evidence.scores)


def jensen_shannon(one, other):
    p, q = one.double().softmax(0), other.double().softmax(0)
    m = (p + q) / 2
    return (torch.xlogy(p, p) - torch.xlogy(p, m) + torch.xlogy(q, q) - torch.xlogy(q, m)).sum() / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divergence_is_jensen_shannons(dtype):
    torch.manual_seed(5)
    experts, amateur = (3 * torch.randn(4, 500)).to(dtype), (3 * torch.randn(500)).to(dtype)
    expected = torch.stack([jensen_shannon(expert, amateur) for expert in experts])
    torch.testing.assert_close(divergence(experts, amateur).double(), expected, atol=1e-5, rtol=0)


def test_tokens_that_a_model_rules_out_add_nothing_that_is_no_number():
    """A logit of −inf has probability 0, and p·log p is 0 there: for the expert, for the amateur, and for both."""
    torch.manual_seed(6)
    expert, amateur = torch.randn(40), torch.randn(40)
    expert[:3], amateur[2:6] = -torch.inf, -torch.inf
    found = divergence_terms(expert, amateur)
    assert (found >= 0).all()
    assert found[2] == 0
    torch.testing.assert_close(found.sum().double() / 2, jensen_shannon(expert, amateur), atol=1e-6, rtol=0)


def test_divergence_never_leaves_its_bounds():
    """Two distributions with disjoint support: rounding must not push the contrast beyond its maximum."""
    for seed in range(40):
        torch.manual_seed(seed)
        experts, amateur = 3 * torch.randn(3, 50), 3 * torch.randn(50)
        experts[:, :25] += 60.0
        amateur[25:] += 60.0
        found = divergence(experts, amateur)
        assert float(found.max()) <= float(torch.tensor(math.log(2)))
        torch.testing.assert_close(found, torch.full((3,), math.log(2)))
        assert float(divergence(amateur[None], amateur)[0]) < 1e-6
