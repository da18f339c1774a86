from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.retrievers import Hit, reciprocal_rank_fusion, relative_score_fusion

rankings = st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8), max_size=4)


def hits(ids: list[str] | str) -> list[Hit]:
    return [Hit(chunk_id=chunk_id, score=10.0 - rank) for rank, chunk_id in enumerate(ids)]


def test_by_hand() -> None:
    """1/61 + 1/62 for a and b, 1/63 for c and d: ties by id."""
    fused = reciprocal_rank_fusion([hits("abd"), hits("bac")])
    assert [hit.chunk_id for hit in fused] == ["a", "b", "c", "d"]
    assert [hit.score for hit in fused] == [1 / 61 + 1 / 62] * 2 + [1 / 63] * 2


@settings(deadline=None)
@given(rankings, st.integers(0, 100))
def test_scores_are_the_sums_of_the_formula(found: list[list[str]], k: int) -> None:
    fused = reciprocal_rank_fusion([hits(ids) for ids in found], k=k)
    assert {hit.chunk_id for hit in fused} == {chunk_id for ids in found for chunk_id in ids}
    for hit in fused:
        exact = sum(Fraction(1, k + ids.index(hit.chunk_id) + 1) for ids in found if hit.chunk_id in ids)
        assert hit.score == pytest.approx(float(exact), rel=1e-14)
    assert fused == sorted(fused, key=lambda hit: (-hit.score, hit.chunk_id))


@settings(deadline=None)
@given(rankings, st.randoms(use_true_random=False))
def test_the_order_of_the_lists_does_not_matter(found: list[list[str]], rng: random.Random) -> None:
    shuffled = rng.sample(found, len(found))
    assert reciprocal_rank_fusion([hits(ids) for ids in shuffled]) == reciprocal_rank_fusion(
        [hits(ids) for ids in found]
    )


@settings(deadline=None)
@given(st.lists(st.sampled_from("abcdefgh"), unique=True), st.integers(1, 4))
def test_one_ranking_however_often_is_itself(ids: list[str], times: int) -> None:
    assert [hit.chunk_id for hit in reciprocal_rank_fusion([hits(ids)] * times)] == ids


@settings(deadline=None)
@given(rankings, st.integers(0, 3), st.integers(0, 7))
def test_a_better_rank_never_hurts(found: list[list[str]], which: int, at: int) -> None:
    if which >= len(found) or not 0 < at < len(found[which]):
        return
    before = {hit.chunk_id: hit.score for hit in reciprocal_rank_fusion([hits(ids) for ids in found])}
    ids = found[which]
    ids[at - 1], ids[at] = ids[at], ids[at - 1]
    after = {hit.chunk_id: hit.score for hit in reciprocal_rank_fusion([hits(ids) for ids in found])}
    assert after[ids[at - 1]] > before[ids[at - 1]]
    assert after[ids[at]] < before[ids[at]]


def test_wrong_arguments() -> None:
    assert reciprocal_rank_fusion([]) == reciprocal_rank_fusion([[], []]) == []
    with pytest.raises(ValueError, match="twice"):
        reciprocal_rank_fusion([hits("aba")])
    with pytest.raises(ValueError, match="0 or more"):
        reciprocal_rank_fusion([], k=-1)


scored = st.lists(
    st.dictionaries(st.sampled_from("abcdefgh"), st.floats(-1e6, 1e6, width=32), max_size=8).map(
        lambda found: [Hit(chunk_id=name, score=score) for name, score in found.items()]
    ),
    max_size=3,
)


def test_relative_scores_by_hand() -> None:
    """a: 1 + 0.5; b: 0.25 + 1; c and d are the last of their lists."""
    lists = [{"a": 0.9, "b": 0.6, "c": 0.5}, {"b": 30.0, "a": 20.0, "d": 10.0}]
    fused = relative_score_fusion([[Hit(chunk_id=c, score=s) for c, s in found.items()] for found in lists])
    assert [hit.chunk_id for hit in fused] == ["a", "b", "c", "d"]
    assert [hit.score for hit in fused] == pytest.approx([1.5, 1.25, 0, 0])
    assert [hit.score for hit in relative_score_fusion([[Hit(chunk_id="a", score=3.0)], []])] == [1.0]


@settings(deadline=None)
@given(scored, st.floats(0.5, 64, width=16), st.integers(-100, 100), st.randoms(use_true_random=False))
def test_no_scale_nor_order_of_lists_changes_relative_scores(
    found: list[list[Hit]], factor: float, shift: int, rng: random.Random
) -> None:
    fused = {hit.chunk_id: hit.score for hit in relative_score_fusion(found)}
    assert all(0 <= score <= len(found) for score in fused.values())
    moved = [[Hit(chunk_id=hit.chunk_id, score=hit.score * factor + shift) for hit in one] for one in found]
    spans = [max(scores) - min(scores) for one in moved if (scores := [hit.score for hit in one])]
    again = relative_score_fusion(rng.sample(moved, len(moved)))
    assert {hit.chunk_id for hit in again} == set(fused)
    if all(span > 1 for span in spans):  # else rounding makes scores equal
        for hit in again:
            assert hit.score == pytest.approx(fused[hit.chunk_id], abs=1e-6)


def test_wrong_scores() -> None:
    with pytest.raises(ValueError, match="finite"):
        relative_score_fusion([[Hit(chunk_id="a", score=float("nan"))]])
    with pytest.raises(ValueError, match="twice"):
        relative_score_fusion([hits("aba")])
