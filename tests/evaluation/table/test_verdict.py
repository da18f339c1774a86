"""Figures, differences and verdicts on made-up scores."""

from __future__ import annotations

import pytest

from ragkv.evaluation.ranking import mean
from ragkv.evaluation.table.definition import Cell, Order
from ragkv.evaluation.table.figure import difference_of, figure_of
from ragkv.evaluation.table.verdict import judge, tally


def scores(values, column="x", start=0):
    return {column: [(str(at), float(value)) for at, value in enumerate(values, start)]}


A, B = Cell("a", "x"), Cell("b", "x")


def order(relation, within=0.0):
    return Order(left=A, relation=relation, right=B, source="s", within=within)


def test_a_figure_is_the_mean_with_its_interval():
    values = [1, 0, 1, 1, 0, 1, 1, 1, 0, 1]
    found, known = figure_of(scores(values), 3), mean(values, 3)
    assert (found.value, found.n) == (known.value, 10)
    assert found.ci95 == pytest.approx(known.ci95, abs=0.1)
    assert figure_of(scores(values), 3) == found


def test_columns_of_a_mean_weigh_the_same():
    found = figure_of(scores([1, 1], "x") | scores([0, 0, 0, 0, 0, 1], "y"), 0)
    assert found.value == pytest.approx((1 + 1 / 6) / 2)
    assert found.n == 8
    assert figure_of(scores([1, 1], "x") | {"y": []}, 0).value is None
    assert figure_of(scores([1, 1, 1]), 0).ci95 == (1.0, 1.0)


def test_the_same_questions_are_compared_one_by_one():
    ours, theirs = scores([1, 1, 0, 1, 0, 1, 1, 0]), scores([1, 0, 0, 1, 0, 1, 1, 0])
    paired = difference_of(ours, theirs, 0)
    assert (paired.value, paired.paired, paired.certain) == (1 / 8, True, False)
    assert paired.ci95[0] == 0
    apart = difference_of(ours, scores([1, 0, 0, 1, 0, 1, 1, 0], start=100), 0)
    assert (apart.value, apart.paired) == (1 / 8, False)
    assert apart.ci95[0] < 0 < apart.ci95[1]
    assert apart.ci95[1] - apart.ci95[0] > paired.ci95[1] - paired.ci95[0]
    assert difference_of(ours, {"x": []}, 0) is None


def test_questions_without_room_on_one_side_are_left_out():
    assert difference_of(scores([1, 1, 1, 0]), scores([0, 1, 1]), 0).value == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("left", "right", "better", "at_least"),
    [([1, 1, 1], [1, 0, 1], True, True), ([1, 0, 1], [0, 1, 1], False, True), ([0, 0, 1], [1, 0, 1], False, False)],
)
def test_better_and_at_least_as_good(left, right, better, at_least):
    measured = {A: scores(left), B: scores(right)}
    assert judge(order(">"), measured, 0).held is better
    assert judge(order(">="), measured, 0).held is at_least


def test_about_the_same():
    measured = {A: scores([1] * 97 + [0] * 3), B: scores([1] * 99 + [0])}
    assert judge(order("~", within=2), measured, 0).held is True
    assert judge(order("~", within=1.9), measured, 0).held is False
    assert judge(order("~", within=2), {A: measured[B], B: measured[A]}, 0).held is True


def test_what_a_verdict_says():
    held = judge(order(">"), {A: scores([1] * 9), B: scores([0] * 9)}, 0)
    assert (held.word, held.certain, held.difference.value) == ("holds", True, 1.0)
    turned = judge(order(">"), {A: scores([0, 1, 0]), B: scores([1, 0, 1])}, 0)
    assert (turned.word, turned.certain) == ("does not hold", False)
    equal = judge(order(">"), {A: scores([0, 1, 0]), B: scores([1, 0, 0])}, 0)
    assert (equal.word, equal.held, equal.certain) == ("tied", False, False)
    absent = judge(order(">"), {A: scores([1])}, 0)
    assert (absent.word, absent.held, absent.certain) == ("not measured", None, False)
    assert tally([held, held, turned, equal, absent]) == (
        "2 of 4 statements of order hold here (1 tied, 1 does not hold, 1 not measured)."
    )
    assert tally([held]) == "1 of 1 statements of order hold here."
    assert tally([]) == ""
