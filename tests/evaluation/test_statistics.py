"""Samples and intervals over questions: against formulas and simulation, and with a width however alike all went."""

import random

import numpy as np
import pytest

from ragkv.evaluation.metrics import bootstrap_mean, difference_interval, draw_sample, mean_interval, share_interval


@pytest.mark.parametrize(("n", "least"), [(3, 0.408), (8, 0.704), (60, 0.952), (100, 0.971)])
def test_without_a_fault_the_number_of_questions_decides(n, least):
    assert share_interval([1] * n) == (pytest.approx(least, abs=1e-3), 1.0)
    assert share_interval([64] * n, [64] * n) == share_interval([1] * n)  # tokens of one answer go together
    assert share_interval([0] * n) == (0.0, pytest.approx(1 - least, abs=1e-3))


def test_paired_differences_are_those_of_bonett_and_price():
    """(b + 1 - c - 1) / (n + 2), and its standard error but for n / (n - 1)."""
    n, b, c = 60, 7, 2
    p, q = (b + 1) / (n + 2), (c + 1) / (n + 2)
    value, error = p - q, 1.96 * ((p + q - (p - q) ** 2) / (n + 1)) ** 0.5
    found = difference_interval([1] * b + [-1] * c + [0] * (n - b - c))
    assert found == pytest.approx((value - error, value + error), abs=1e-5)


def test_long_answers_weigh_more():
    low, high = share_interval([100, 0], [100, 1])
    assert 0 < low < 100 / 101 < high
    assert low > share_interval([1, 0], [1, 1])[0]


def test_a_mean_without_a_bound_leaves_room_for_the_worst():
    assert mean_interval([0.0, 0.0], [3, 5]) == (0.0, 0.0)
    low, high = mean_interval([0.1, 0.1, 4.0], [10, 10, 10])
    assert low < 4.2 / 30 < high
    assert high > 0.2


@pytest.mark.parametrize(("share", "n"), [(0.95, 100), (0.85, 60), (0.8, 100)])
def test_a_share_below_the_limit_is_seldom_called_sure(share, n):
    """What a verdict does wrong: the lower end lies above the true share."""
    draw = random.Random(5)
    wrong = sum(share_interval([draw.random() < share for _ in range(n)])[0] > share for _ in range(2000))
    assert wrong / 2000 < 0.05


def test_a_sample_is_drawn_by_its_seed_in_the_order_of_the_items():
    items = [str(number) for number in range(30)]
    found = draw_sample(items, 10, 3)
    assert len(set(found)) == 10
    assert found == draw_sample(items, 10, 3) != draw_sample(items, 10, 4)
    assert sorted(found, key=items.index) == found
    assert draw_sample(items, 50, 0) == items == draw_sample(items, None, 0)


def test_the_interval_is_seeded_and_holds_the_mean():
    values = [0.0, 1.0] * 50
    found = bootstrap_mean([values], 3)
    assert (found.value, found.n) == (0.5, 100)
    assert found == bootstrap_mean([values], 3)
    assert found.ci95 != bootstrap_mean([values], 4).ci95
    # the normal interval is 0.5 ± 1.96 * 0.5 / sqrt(100)
    assert found.ci95 == pytest.approx((0.402, 0.598), abs=0.02)
    assert bootstrap_mean([[1.0, 1.0]], 0).ci95 == (1.0, 1.0)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_mean([[]], 0)


def test_the_interval_covers_the_truth_about_95_times_in_100():
    """Coverage on samples of a known mean: far from 95 % would be an interval of something else."""
    rng = np.random.default_rng(0)
    samples = rng.random((200, 60))  # mean 0.5
    covered = sum(low <= 0.5 <= high for low, high in (bootstrap_mean([row.tolist()], 0).ci95 for row in samples))
    assert 180 <= covered <= 198
