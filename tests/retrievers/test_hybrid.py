from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.retrievers import Hit, reciprocal_rank_fusion

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
