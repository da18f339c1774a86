from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.retrievers import EPSILON, ScoreKind, fuse, normalise_rerank, normalise_retrieval

KINDS = get_args(ScoreKind)
finite = st.floats(allow_nan=False, allow_infinity=False)
unit = st.floats(0.0, 1.0 - EPSILON)
ROUNDING = 1e-12


def test_worked_example() -> None:
    """By hand: (0.6 + 1) / 2 = 0.8; arctan(1) = pi/4, so 2/pi * pi/4 = 0.5; sigmoid(ln 3) = 3/4."""
    dense, sparse, rerank = normalise_retrieval(0.6, "dense"), normalise_retrieval(1.0, "sparse"), math.log(3)
    assert dense == pytest.approx(0.8, abs=1e-15)
    assert normalise_retrieval(0.6, "colbert") == dense
    assert sparse == pytest.approx(0.5, abs=1e-15)
    assert normalise_rerank(rerank) == pytest.approx(0.75, abs=1e-15)
    # 2 * 0.8 * 0.75 / (1.55 + 1e-8) = 1.2 / 1.55000001 and 2 * 0.5 * 0.75 / (1.25 + 1e-8)
    assert fuse(dense, normalise_rerank(rerank)) == pytest.approx(0.774193543392, abs=1e-12)
    assert fuse(sparse, normalise_rerank(rerank)) == pytest.approx(0.5999999952, abs=1e-12)
    assert fuse(dense, None) == dense


def test_ends_of_the_scales() -> None:
    top = 1 - 1e-8
    assert [normalise_retrieval(s, "dense") for s in (-1.0, 0.0, 1.0, 1.0001, -1.0001)] == [
        0,
        0.5,
        top,
        top,
        0,
    ]
    assert [normalise_retrieval(s, "sparse") for s in (-3.0, 0.0, 1e300)] == [0, 0, top]
    assert [normalise_rerank(z) for z in (-1e308, -800.0, 0.0, 800.0, 1e308)] == [0, 0, 0.5, top, top]
    assert fuse(0.0, 0.0) == 0
    assert fuse(0.0, 0.9) == 0


@given(finite, st.sampled_from(KINDS), finite)
def test_everything_is_in_the_unit_interval(score: float, kind: ScoreKind, logit: float) -> None:
    retrieval, rerank = normalise_retrieval(score, kind), normalise_rerank(logit)
    for value in (retrieval, rerank, fuse(retrieval, rerank), fuse(retrieval, None)):
        assert 0 <= value < 1


@given(finite, finite, st.sampled_from(KINDS))
def test_normalising_keeps_the_order(one: float, other: float, kind: ScoreKind) -> None:
    low, high = sorted((one, other))
    assert normalise_retrieval(low, kind) <= normalise_retrieval(high, kind)
    assert normalise_rerank(low) <= normalise_rerank(high) + ROUNDING


@given(unit, unit, unit)
def test_fusion_is_symmetric_monotone_and_between(one: float, other: float, fixed: float) -> None:
    low, high = sorted((one, other))
    assert fuse(one, other) == fuse(other, one)
    assert fuse(low, fixed) <= fuse(high, fixed) + ROUNDING
    assert fuse(one, other) <= high + ROUNDING
    assert fuse(one, other) >= low * (1 - EPSILON) - EPSILON


@given(st.floats(-30, 30))
def test_sigmoid_is_the_logistic_function(logit: float) -> None:
    assert normalise_rerank(logit) == pytest.approx(min(1 / (1 + math.exp(-logit)), 1 - EPSILON), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    for kind in KINDS:
        with pytest.raises(ValueError, match="finite"):
            normalise_retrieval(bad, kind)
    with pytest.raises(ValueError, match="finite"):
        normalise_rerank(bad)
    for pair in ((bad, 0.5), (0.5, bad)):
        with pytest.raises(ValueError, match=r"\[0, 1\)"):
            fuse(*pair)


def test_raw_scores_and_unknown_kinds_are_refused() -> None:
    for pair in ((1.0, 0.5), (0.5, -0.1), (3.2, None)):
        with pytest.raises(ValueError, match=r"\[0, 1\)"):
            fuse(*pair)
    with pytest.raises(ValueError, match="unknown kind"):
        normalise_retrieval(0.5, "bm25")  # type: ignore[arg-type]
