"""Measures of a ranking: worked examples by hand, the properties that define them, scikit-learn's nDCG."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.evaluation.metrics import hit_at, ndcg_at, recall_at, reciprocal_rank

IDS = [f"d{i}" for i in range(12)]
rankings = st.lists(st.sampled_from(IDS), unique=True)
grades = st.dictionaries(st.sampled_from(IDS), st.integers(-1, 4), min_size=1).filter(lambda g: max(g.values()) > 0)
cuts = st.integers(1, 14)


def test_the_worked_example():
    ranked, relevance = ["b", "x", "a", "c"], {"a": 3, "b": 1, "d": 2, "x": 0}
    # relevant are a, b and d; b stands at rank 1, a at rank 3, d nowhere
    assert recall_at(ranked, relevance, 1) == pytest.approx(1 / 3)
    assert recall_at(ranked, relevance, 2) == pytest.approx(1 / 3)
    assert recall_at(ranked, relevance, 4) == pytest.approx(2 / 3)
    assert reciprocal_rank(ranked, relevance) == 1
    assert reciprocal_rank(["x", "c", "a"], relevance) == pytest.approx(1 / 3)
    assert reciprocal_rank(["x", "c", "a"], relevance, 2) == 0
    assert [hit_at(["x", "a"], relevance, k) for k in (1, 2)] == [0, 1]
    # DCG@3 = 1/log2(2) + 0/log2(3) + 3/log2(4) = 1 + 1.5 = 2.5
    # the best is a, d, b: 3/log2(2) + 2/log2(3) + 1/log2(4) = 3 + 1.261859507 + 0.5 = 4.761859507
    assert ndcg_at(ranked, relevance, 3) == pytest.approx(2.5 / 4.761859507142915, abs=1e-12)
    # DCG@1 = 1, the best is 3
    assert ndcg_at(ranked, relevance, 1) == pytest.approx(1 / 3)


def test_nothing_found_is_zero():
    for measure in (recall_at, hit_at, reciprocal_rank, ndcg_at):
        assert measure([], {"a": 1}, 5) == 0
        assert measure(["b", "c"], {"a": 1, "b": 0}, 5) == 0


@pytest.mark.parametrize("measure", [recall_at, hit_at, reciprocal_rank, ndcg_at])
def test_what_is_not_defined_is_refused(measure):
    with pytest.raises(ValueError, match="no id is relevant"):
        measure(["a"], {"a": 0}, 1)
    with pytest.raises(ValueError, match="at least 1"):
        measure(["a"], {"a": 1}, 0)
    with pytest.raises(ValueError, match="twice"):
        measure(["a", "a"], {"a": 1}, 2)


@settings(deadline=None)
@given(rankings, grades, cuts)
def test_all_lie_between_0_and_1_and_grow_with_k(ranked, relevance, k):
    for measure in (recall_at, hit_at, reciprocal_rank, ndcg_at):
        assert 0 <= measure(ranked, relevance, k) <= 1 + 1e-12
    for measure in (recall_at, hit_at, reciprocal_rank):
        assert measure(ranked, relevance, k) <= measure(ranked, relevance, k + 1)
    assert reciprocal_rank(ranked, relevance, k) <= hit_at(ranked, relevance, k)
    assert recall_at(ranked, relevance, k) <= hit_at(ranked, relevance, k)
    assert (recall_at(ranked, relevance, k) > 0) == (ndcg_at(ranked, relevance, k) > 0)


@settings(deadline=None)
@given(rankings, grades, cuts)
def test_only_the_first_k_and_the_relevant_count(ranked, relevance, k):
    positive = {name: grade for name, grade in relevance.items() if grade > 0}
    for measure in (recall_at, hit_at, reciprocal_rank, ndcg_at):
        assert measure(ranked, relevance, k) == measure(ranked[:k], positive, k)


@settings(deadline=None)
@given(st.permutations(IDS), grades, st.integers(1, 12))
def test_ndcg_is_scikit_learn_s_where_everything_is_ranked(ranked, relevance, k):
    metrics = pytest.importorskip("sklearn.metrics")
    truth = [[max(relevance.get(name, 0), 0) for name in IDS]]
    scores = [[-ranked.index(name) for name in IDS]]
    assert ndcg_at(ranked, relevance, k) == pytest.approx(metrics.ndcg_score(truth, scores, k=k), abs=1e-12)
