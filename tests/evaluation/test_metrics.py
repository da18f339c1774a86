"""Metrics equal the benchmarks' own code; samples and intervals are compared with formulas and simulation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.benchmarks.evaluation.metrics import METRICS, Example, bootstrap_mean, hit_at, ndcg_at, score
from ragkv.doctor.questions import draw_sample
from ragkv.doctor.retrieval import recall_at, reciprocal_rank
from ragkv.errors import ConfigError

WORDS = st.sampled_from(["Tarn", "tarn", "Halden", "works", "a", "An", "the", "é", "Café", "x-ray", "1907", "7", "."])
TEXTS = st.lists(WORDS, max_size=7).map(" ".join)
GOLDS = st.lists(TEXTS, min_size=1, max_size=4)


def example(*answers: str, classes: tuple[str, ...] = ()) -> Example:
    return Example(example_id="e1", question="?", chunks=(), answers=answers, classes=classes)


def test_an_unknown_name_gets_the_list_of_names():
    with pytest.raises(ConfigError, match=r"no metric 'bleu'; choose one of contains, subspan_em, .*string_match_all"):
        score("bleu", "x", example("x"))


@pytest.mark.parametrize("name", METRICS)
def test_no_metric_judges_without_a_gold_answer(name):
    with pytest.raises(ConfigError, match=f"e1 has no gold answer; {name} cannot"):
        score(name, "x", example())


@pytest.mark.parametrize(
    ("name", "prediction", "answers", "expected"),
    [
        ("contains", "It was  ANN\nlee.", ("Bolt", "Ann Lee"), 1.0),
        ("contains", "It was Ann.", ("Ann Lee",), 0.0),
        # google-deepmind/loft evaluation/utils.py
        ("subspan_em", "The answer is Zurich, of course.", ("Bern", "the Zurich"), 1.0),
        ("subspan_em", "Zürich", ("Zurich",), 0.0),  # NFD keeps the mark as a separate character
        ("subspan_em", "Zu\u0308rich it is", ("Zürich",), 1.0),
        ("subspan_em", "1,907 people", ("1907",), 1.0),
        ("subspan_em", "Gotham", ("Batman of Gotham",), 0.0),
        ("f1", "Mira Oskel founded it", ("Mira Oskel",), 2 * (2 / 4) * 1 / (2 / 4 + 1)),
        ("f1", "no no no", ("no no",), 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("f1", "", ("",), 0.0),  # nothing in common, even if both are empty
        ("subspan_em", "It says so in [2].", ("2",), 1.0),  # a citation is not a list of answers
        # NVIDIA/RULER scripts/eval/synthetic/constants.py
        ("string_match_all", "VAR ABCDE, fghij", ("ABCDE", "FGHIJ", "KLMNO", "PQRST"), 0.5),
        ("string_match_all", "\x00it is 12345\x01", ("it is 12345",), 1.0),
    ],
)
def test_worked_examples(name, prediction, answers, expected):
    assert score(name, prediction, example(*answers)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [
        ("It asks for a Date", "Date", 1.0),
        ("\nDate\nQuestion: Location", "Date", 1.0),  # only the first line counts
        ("Date or Location", "Date", 0.5),
        ("Location", "Date", 0.0),
        ("date", "Date", 0.0),
        ("Other location", "Other location", 1.0),  # a part of the gold label does not count against it
        ("Other location in City", "Other location", 0.5),
        ("", "Date", 0.0),
    ],
)
def test_classification(prediction, gold, expected):
    classes = ("Date", "Location", "Other", "Other location", "City")
    assert score("classification", prediction, example(gold, classes=classes)) == expected


def test_classification_passes_over_the_label_after_one_that_it_removes():
    """LongBench removes items from the list that it iterates over; published figures include this."""
    parts_first = example("abc", classes=("a", "b", "c", "abc"))
    assert score("classification", "abc", parts_first) == 1 / 2  # "a" and "c" are removed, "b" is skipped
    assert score("classification", "abc", example("abc", classes=("a", "abc", "b"))) == 1.0  # the gold label is skipped


@given(prediction=TEXTS | st.text(), golds=st.lists(TEXTS | st.text(), min_size=1, max_size=4), data=st.data())
def test_every_metric_is_between_0_and_1_whatever_the_order_of_gold_answers(prediction, golds, data):
    shuffled = data.draw(st.permutations(golds))
    for name in sorted(METRICS):
        judged = [example(*order, classes=("Tarn", "7", "tarn")) for order in (golds, shuffled)]
        assert 0.0 <= score(name, prediction, judged[0]) == score(name, prediction, judged[1]) <= 1.0


@given(prediction=TEXTS, golds=GOLDS, article=st.sampled_from(["a ", "the ", "An "]))
def test_loft_sees_no_case_article_or_punctuation(prediction, golds, article):
    for name in ("subspan_em", "f1"):
        plain = score(name, prediction, example(*golds))
        assert score(name, f"{article}{prediction.upper()} !", example(*golds)) == plain
        assert score(name, prediction, example(*(f" {article}{gold.upper()}?" for gold in golds))) == plain


def test_a_sample_is_drawn_by_its_seed_in_the_order_of_the_items():
    items = [str(number) for number in range(30)]
    drawn = draw_sample(items, 10, 3)
    assert len(set(drawn)) == 10
    assert drawn == draw_sample(items, 10, 3) != draw_sample(items, 10, 4)
    assert sorted(drawn, key=items.index) == drawn
    assert draw_sample(items, 50, 0) == items == draw_sample(items, None, 0)


def test_the_interval_is_seeded_and_holds_the_mean():
    values = [0.0, 1.0] * 50
    drawn = bootstrap_mean([values], 3)
    assert (drawn.value, drawn.n) == (0.5, 100)
    assert drawn == bootstrap_mean([values], 3)
    assert drawn.ci95 != bootstrap_mean([values], 4).ci95
    # the normal interval is 0.5 ± 1.96 * 0.5 / sqrt(100)
    assert drawn.ci95 == pytest.approx((0.402, 0.598), abs=0.02)
    assert bootstrap_mean([[1.0, 1.0]], 0).ci95 == (1.0, 1.0)
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_mean([[]], 0)


def test_the_interval_covers_the_truth_about_95_times_in_100():
    """Coverage for samples of a known mean: far from 95 % would be another interval."""
    rng = np.random.default_rng(0)
    samples = rng.random((200, 60))  # mean 0.5
    covered = sum(low <= 0.5 <= high for low, high in (bootstrap_mean([row.tolist()], 0).ci95 for row in samples))
    assert 180 <= covered <= 198


IDS = [f"d{i}" for i in range(12)]
GRADES = st.dictionaries(st.sampled_from(IDS), st.integers(1, 4), min_size=1)


def test_the_worked_example():
    ranked, relevant = ["b", "x", "a", "c"], {"a": 3, "b": 1, "d": 2}
    # b is at rank 1, a at rank 3, d is missing
    assert [recall_at(k, ranked, relevant) for k in (1, 2, 4)] == pytest.approx([1 / 3, 1 / 3, 2 / 3])
    assert reciprocal_rank(4, ranked, relevant) == 1
    assert reciprocal_rank(3, ["x", "c", "a"], relevant) == pytest.approx(1 / 3)
    assert reciprocal_rank(2, ["x", "c", "a"], relevant) == 0
    assert [hit_at(k, ["x", "a"], relevant) for k in (1, 2)] == [0, 1]
    # DCG@3 = 1/log2(2) + 0/log2(3) + 3/log2(4) = 1 + 1.5 = 2.5
    # the best is a, d, b: 3/log2(2) + 2/log2(3) + 1/log2(4) = 3 + 1.261859507 + 0.5 = 4.761859507
    assert ndcg_at(3, ranked, relevant) == pytest.approx(2.5 / 4.761859507142915, abs=1e-12)
    # DCG@1 = 1, the best is 3
    assert ndcg_at(1, ranked, relevant) == pytest.approx(1 / 3)


def test_nothing_found_is_zero():
    for measure in (recall_at, hit_at, reciprocal_rank, ndcg_at):
        assert measure(5, [], {"a": 1}) == measure(5, ["b", "c"], {"a": 1}) == 0


@given(st.permutations(IDS), GRADES, st.integers(1, 12))
def test_ndcg_is_scikit_learn_s_where_everything_is_ranked(ranked, relevant, k):
    metrics = pytest.importorskip("sklearn.metrics")
    truth = [[relevant.get(name, 0) for name in IDS]]
    scores = [[-ranked.index(name) for name in IDS]]
    assert ndcg_at(k, ranked, relevant) == pytest.approx(metrics.ndcg_score(truth, scores, k=k), abs=1e-12)
