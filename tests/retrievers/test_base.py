import math
from fractions import Fraction
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.retrievers import (
    EPSILON,
    Hit,
    ScoreKind,
    fuse,
    normalise_rerank,
    normalise_retrieval,
    reciprocal_rank_fusion,
    relative_score_fusion,
)

KINDS = get_args(ScoreKind)
finite = st.floats(allow_nan=False, allow_infinity=False)
unit = st.floats(0.0, 1.0 - EPSILON)
ROUNDING = 1e-12


def test_worked_example():
    """(0.6 + 1) / 2 = 0.8; arctan(1) = pi/4, so 2/pi * pi/4 = 0.5; sigmoid(ln 3) = 3/4."""
    dense, sparse, rerank = normalise_retrieval(0.6, "dense"), normalise_retrieval(1.0, "sparse"), math.log(3)
    assert dense == pytest.approx(0.8, abs=1e-15)
    assert normalise_retrieval(0.6, "colbert") == dense
    assert sparse == pytest.approx(0.5, abs=1e-15)
    assert normalise_rerank(rerank) == pytest.approx(0.75, abs=1e-15)
    # 2 * 0.8 * 0.75 / (1.55 + 1e-8) = 1.2 / 1.55000001 and 2 * 0.5 * 0.75 / (1.25 + 1e-8)
    assert fuse(dense, normalise_rerank(rerank)) == pytest.approx(0.774193543392, abs=1e-12)
    assert fuse(sparse, normalise_rerank(rerank)) == pytest.approx(0.5999999952, abs=1e-12)
    assert fuse(dense, None) == dense
    top = 1 - 1e-8
    assert [normalise_retrieval(s, "dense") for s in (-1.0, 0.0, 1.0, 1.0001, -1.0001)] == [0, 0.5, top, top, 0]
    assert [normalise_retrieval(s, "sparse") for s in (-3.0, 0.0, 1e300)] == [0, 0, top]
    assert [normalise_rerank(z) for z in (-1e308, -800.0, 0.0, 800.0, 1e308)] == [0, 0, 0.5, top, top]
    assert fuse(0.0, 0.0) == 0
    assert fuse(0.0, 0.9) == 0


@given(finite, st.sampled_from(KINDS), finite)
def test_everything_is_in_the_unit_interval(score, kind, logit):
    retrieval, rerank = normalise_retrieval(score, kind), normalise_rerank(logit)
    for value in (retrieval, rerank, fuse(retrieval, rerank), fuse(retrieval, None)):
        assert 0 <= value < 1


@given(finite, finite, st.sampled_from(KINDS))
def test_normalising_keeps_the_order(one, other, kind):
    low, high = sorted((one, other))
    assert normalise_retrieval(low, kind) <= normalise_retrieval(high, kind)
    assert normalise_rerank(low) <= normalise_rerank(high) + ROUNDING


@given(unit, unit, unit)
def test_fusion_is_symmetric_monotone_and_between(first, second, fixed):
    low, high = sorted((first, second))
    assert fuse(first, second) == fuse(second, first)
    assert fuse(low, fixed) <= fuse(high, fixed) + ROUNDING
    assert fuse(first, second) <= high + ROUNDING
    assert fuse(first, second) >= low * (1 - EPSILON) - EPSILON


@given(st.floats(-30, 30))
def test_sigmoid_is_the_logistic_function(logit):
    assert normalise_rerank(logit) == pytest.approx(min(1 / (1 + math.exp(-logit)), 1 - EPSILON), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(bad):
    for kind in KINDS:
        with pytest.raises(ValueError, match="finite"):
            normalise_retrieval(bad, kind)
    with pytest.raises(ValueError, match="finite"):
        normalise_rerank(bad)
    for pair in ((bad, 0.5), (0.5, bad)):
        with pytest.raises(ValueError, match=r"\[0, 1\)"):
            fuse(*pair)


def test_raw_scores_and_unknown_kinds_are_refused():
    for pair in ((1.0, 0.5), (0.5, -0.1), (3.2, None)):
        with pytest.raises(ValueError, match=r"\[0, 1\)"):
            fuse(*pair)
    with pytest.raises(ValueError, match="unknown kind"):
        normalise_retrieval(0.5, "bm25")  # type: ignore[arg-type]


rankings = st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8), max_size=4)


def hits(ids: list[str] | str) -> list[Hit]:
    return [Hit(chunk_id=chunk_id, score=10.0 - rank) for rank, chunk_id in enumerate(ids)]


def test_fused_ranks_by_hand():
    """1/61 + 1/62 for a and b, 1/63 for c and d; ties are ordered by id."""
    fused = reciprocal_rank_fusion([hits("abd"), hits("bac")])
    assert [hit.chunk_id for hit in fused] == ["a", "b", "c", "d"]
    assert [hit.score for hit in fused] == [1 / 61 + 1 / 62] * 2 + [1 / 63] * 2
    assert reciprocal_rank_fusion([]) == reciprocal_rank_fusion([[], []]) == []
    with pytest.raises(ValueError, match="twice"):
        reciprocal_rank_fusion([hits("aba")])
    with pytest.raises(ValueError, match="0 or more"):
        reciprocal_rank_fusion([], k=-1)


@given(rankings, st.integers(0, 100))
def test_scores_are_the_sums_of_the_formula(lists, k):
    fused = reciprocal_rank_fusion([hits(ids) for ids in lists], k=k)
    assert {hit.chunk_id for hit in fused} == {chunk_id for ids in lists for chunk_id in ids}
    for hit in fused:
        exact = sum(Fraction(1, k + ids.index(hit.chunk_id) + 1) for ids in lists if hit.chunk_id in ids)
        assert hit.score == pytest.approx(float(exact), rel=1e-14)
    assert fused == sorted(fused, key=lambda hit: (-hit.score, hit.chunk_id))


@given(rankings, st.randoms(use_true_random=False))
def test_the_order_of_the_lists_does_not_matter(found, rng):
    shuffled = rng.sample(found, len(found))
    assert reciprocal_rank_fusion([hits(ids) for ids in shuffled]) == reciprocal_rank_fusion(
        [hits(ids) for ids in found]
    )


scored = st.lists(
    st.dictionaries(st.sampled_from("abcdefgh"), st.floats(-1e6, 1e6, width=32), max_size=8).map(
        lambda found: [Hit(chunk_id=name, score=score) for name, score in found.items()]
    ),
    max_size=3,
)


def test_relative_scores_by_hand():
    """a: 1 + 0.5; b: 0.25 + 1; c and d are the last of their lists."""
    lists = [{"a": 0.9, "b": 0.6, "c": 0.5}, {"b": 30.0, "a": 20.0, "d": 10.0}]
    fused = relative_score_fusion([[Hit(chunk_id=c, score=s) for c, s in found.items()] for found in lists])
    assert [hit.chunk_id for hit in fused] == ["a", "b", "c", "d"]
    assert [hit.score for hit in fused] == pytest.approx([1.5, 1.25, 0, 0])
    assert [hit.score for hit in relative_score_fusion([[Hit(chunk_id="a", score=3.0)], []])] == [1.0]
    with pytest.raises(ValueError, match="finite"):
        relative_score_fusion([[Hit(chunk_id="a", score=float("nan"))]])
    with pytest.raises(ValueError, match="twice"):
        relative_score_fusion([hits("aba")])


@given(scored, st.floats(0.5, 64, width=16), st.integers(-100, 100), st.randoms(use_true_random=False))
def test_no_scale_nor_order_of_lists_changes_relative_scores(found, factor, shift, rng):
    fused = {hit.chunk_id: hit.score for hit in relative_score_fusion(found)}
    assert all(0 <= score <= len(found) for score in fused.values())
    moved = [[Hit(chunk_id=hit.chunk_id, score=hit.score * factor + shift) for hit in one] for one in found]
    spans = [max(scores) - min(scores) for one in moved if (scores := [hit.score for hit in one])]
    again = relative_score_fusion(rng.sample(moved, len(moved)))
    assert {hit.chunk_id for hit in again} == set(fused)
    if all(span > 1 for span in spans):  # otherwise rounding makes scores equal
        for hit in again:
            assert hit.score == pytest.approx(fused[hit.chunk_id], abs=1e-6)
