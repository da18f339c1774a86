"""PCED's arithmetic against Eqs. 2 and 3 written out in fp64, for scores and logits at their limits."""

from __future__ import annotations

import math

import pytest
import torch

from ragkv.engines.evidence import Evidence, divergence, divergence_terms


def joint(rule, logits, amateur, betas, relevance, gamma):
    """Scores and winners `(vocab,)` in fp64, expert by expert, as the equations stand in the paper."""
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
@pytest.mark.parametrize("relevance", [(0.9, 0.7, 0.7, 0.2, 0.01), (0.5, 1e-4, 1e-5, 1e-9, 0.0)], ids=str)
def test_scores_and_winners_are_the_equations(rule, sizes, relevance):
    torch.manual_seed(4)
    logits, amateur = 3 * torch.randn(5, 200), torch.randn(200)
    betas, relevance = [0.1, 0.6, 0.0, 0.3, 0.5], torch.tensor(relevance)
    scores, winners = joint(rule, logits, amateur, betas, relevance, 2.5)
    evidence, at = Evidence(rule, relevance, 2.5), 0
    for size in sizes:
        evidence.add(logits[at : at + size].clone(), amateur, torch.tensor(betas[at : at + size])[:, None])
        at += size
    torch.testing.assert_close(evidence.scores, scores.float(), atol=1e-4, rtol=1e-5)
    assert torch.equal(evidence.winners, winners)


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
    """A logit of −inf has no share: p·log p is 0 there, for the expert, for the amateur, and where both rule it out."""
    torch.manual_seed(6)
    expert, amateur = torch.randn(40), torch.randn(40)
    expert[:3], amateur[2:6] = -torch.inf, -torch.inf
    found = divergence_terms(expert, amateur)
    assert (found >= 0).all()
    assert found[2] == 0
    torch.testing.assert_close(found.sum().double() / 2, jensen_shannon(expert, amateur), atol=1e-6, rtol=0)


def test_divergence_never_leaves_its_bounds():
    """Two models that agree on no token: rounding must not make the contrast stronger than the strongest there is."""
    for seed in range(40):
        torch.manual_seed(seed)
        experts, amateur = 3 * torch.randn(3, 50), 3 * torch.randn(50)
        experts[:, :25] += 60.0
        amateur[25:] += 60.0
        found = divergence(experts, amateur)
        assert float(found.max()) <= float(torch.tensor(math.log(2)))
        torch.testing.assert_close(found, torch.full((3,), math.log(2)))
        assert float(divergence(amateur[None], amateur)[0]) < 1e-6


def test_experts_that_are_all_irrelevant_still_have_finite_scores():
    logits = torch.randn(3, 20)
    for rule in ("max", "moe", "poe"):
        evidence = Evidence(rule, torch.zeros(3), 2.5)
        evidence.add(logits.clone(), torch.randn(20), torch.zeros(3, 1))
        assert evidence.scores.isfinite().all()
