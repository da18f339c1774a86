"""Metrics equal the benchmarks' own code; samples and intervals are compared with formulas and simulation."""

import itertools
import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.doctor.metrics import (
    METRICS,
    Example,
    bootstrap_mean,
    difference_interval,
    draw_sample,
    hit_at,
    mean_interval,
    ndcg_at,
    recall_at,
    reciprocal_rank,
    rouge_l,
    score,
    share_interval,
)
from ragkv.errors import ConfigError

WORDS = st.sampled_from(["Tarn", "tarn", "Halden", "works", "a", "An", "the", "é", "Café", "x-ray", "1907", "7", "."])
TEXTS = st.lists(WORDS, max_size=7).map(" ".join)
GOLDS = st.lists(TEXTS, min_size=1, max_size=4)


def example(*answers: str, classes: tuple[str, ...] = ()) -> Example:
    return Example(example_id="e1", question="?", chunks=(), answers=answers, classes=classes)


def test_an_unknown_name_gets_the_list_of_names():
    with pytest.raises(ConfigError, match=r"no metric 'bleu'; choose one of contains, subspan_em, .*string_match_part"):
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
        ("exact_match", "The Halden Works!", ("halden works",), 1.0),
        ("exact_match", "Halden Works in Tarn", ("Halden Works",), 0.0),
        ("f1", "Mira Oskel founded it", ("Mira Oskel",), 2 * (2 / 4) * 1 / (2 / 4 + 1)),
        ("f1", "no no no", ("no no",), 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("f1", "", ("",), 0.0),  # nothing in common, even if both are empty
        ("subspan_em", "It says so in [2].", ("2",), 1.0),  # a citation is not a list of answers
        ("subspan_em", "TITLE: Zug\n**Final Answer: ['Bern', 'Zug']**", ("Bern",), 1.0),
        ("subspan_em", "TITLE: Zug\nFinal Answer: ['Bern', 'Zug']", ("Zug",), 0.0),  # the first item counts
        ("subspan_em", "Final Answer: [1907]", ("1907",), 1.0),
        ("subspan_em", "Final Answer: []", ("Bern",), 0.0),
        ("subspan_em", "Final Answer: [Bern]", ("Bern",), 0.0),  # not a list of texts: LOFT reads nothing
        ("exact_match", r"Final Answer: ['C:\dir']", (r"C:\dir",), 1.0),
        ("exact_match", "Final Answer: ['the devil's sleep']", ("Devils sleep",), 1.0),
        # evaluation/rag.py
        ("loft_multi", "Final Answer: ['Bern', 'the city of Zug']", ("Zug", "Bern, Switzerland"), 1.0),
        ("loft_multi", "Final Answer: ['Bern']", ("Zug", "Bern"), 0.0),
        ("loft_multi", "Final Answer: ['New York City', 'Rome']", ("New York", "York"), 0.0),  # one value, two golds
        ("loft_multi", "Final Answer: ['York', 'New York City']", ("New York", "York"), 1.0),
        ("loft_multi", "They are Bern, Zug and Basel.", ("Basel", "Zug", "Bern"), 1.0),
        ("loft_multi", "- Bern\n- Zug\n", ("Zug", "Bern", "Basel"), 0.0),
        ("loft_multi", "...", ("Zug",), 0.0),
        # THUDM/LongBench metrics.py, LongBench/eval.py
        ("qa_f1", "Zürich", ("Zurich",), 0.0),
        ("qa_f1", "The Zürich, a city", ("zürich city",), 1.0),
        ("qa_f1", "Bern\nQuestion: where", ("Bern",), 2 * (1 / 3) / (1 / 3 + 1)),
        ("qa_f1_first_line", "\n\nBern\nQuestion: where", ("Bern",), 1.0),
        ("retrieval", "Paragraph 7", ("Paragraph 7",), 1.0),
        ("retrieval", "Paragraph 7 or 17", ("Paragraph 7",), 0.5),
        ("retrieval", "the seventh", ("Paragraph 7",), 0.0),
        ("retrieval", "段落12", ("段落12",), 1.0),
        ("count", "There are 12, not 13 or 12.", ("12",), 2 / 3),
        ("count", "012", ("12",), 0.0),
        ("code_sim", "\n```python\n# next\nreturn self.x\nreturn 1", ("return self.y",), 0.92),
        ("code_sim", "import os", ("import sys",), 0.84),
        ("code_sim", "x = foo(a, b)", ("x = foo(b, a)",), 0.85),
        ("code_sim", "# only a comment", ("x = 1",), 0.0),
        ("rouge_l", "a b c d", ("x", "d c b a"), 0.24999999500000009),
        ("rouge_l_first_line", "a b\nDialogue: c", ("a b",), 0.999999995),
        # NVIDIA/RULER scripts/eval/synthetic/constants.py
        ("string_match_all", "VAR ABCDE, fghij", ("ABCDE", "FGHIJ", "KLMNO", "PQRST"), 0.5),
        ("string_match_all", "\x00it is 12345\x01", ("it is 12345",), 1.0),
        ("string_match_part", "in PARIS", ("Lyon", "Paris"), 1.0),
        ("string_match_part", "in Pa\tris", ("Pa\nris",), 1.0),  # control characters become line ends
        ("string_match_part", "nowhere", ("Lyon", "Paris"), 0.0),
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


def test_classification_says_that_it_needs_labels():
    with pytest.raises(ConfigError, match='e1: the metric "classification" needs "classes"'):
        score("classification", "Date", example("Date"))


def test_retrieval_says_what_its_gold_answer_looks_like():
    with pytest.raises(ConfigError, match='needs an answer such as "Paragraph 7"'):
        score("retrieval", "7", example("7"))


@given(prediction=TEXTS | st.text(), golds=st.lists(TEXTS | st.text(), min_size=1, max_size=4), data=st.data())
def test_every_metric_is_between_0_and_1_whatever_the_order_of_gold_answers(prediction, golds, data):
    shuffled = data.draw(st.permutations(golds))
    for name in sorted(set(METRICS) - {"retrieval"}):
        judged = [example(*order, classes=("Tarn", "7", "tarn")) for order in (golds, shuffled)]
        assert 0.0 <= score(name, prediction, judged[0]) == score(name, prediction, judged[1]) <= 1.0


@given(prediction=TEXTS, golds=GOLDS, article=st.sampled_from(["a ", "the ", "An "]))
def test_loft_sees_no_case_article_or_punctuation(prediction, golds, article):
    for name in ("subspan_em", "exact_match", "f1"):
        plain = score(name, prediction, example(*golds))
        assert score(name, f"{article}{prediction.upper()} !", example(*golds)) == plain
        assert score(name, prediction, example(*(f" {article}{gold.upper()}?" for gold in golds))) == plain


@given(
    values=st.lists(st.text("abc", min_size=1, max_size=3), max_size=5),
    golds=st.lists(st.text("bcd", min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_multi_value_assignment_is_the_best_of_all(values, golds):
    """Compared with all assignments of values to golds, for texts without articles."""
    values = [value for value in values if value != "a"]
    best = any(
        all(gold in value or value in gold for gold, value in zip(golds, chosen, strict=True))
        for chosen in itertools.permutations(values, len(golds))
    )
    assert score("loft_multi", f"Final Answer: {values}", example(*golds)) == float(best)
    assert score("loft_multi", " ; ".join(values), example(*golds)) == float(best)


def test_an_assignment_of_hundreds_of_values_needs_no_deep_recursion():
    """A chain in which each new gold value moves all earlier ones to their other choice."""
    golds = [f"v{i}e" for i in range(600)]
    values = [f"v{i}e v{i + 1}e" for i in range(600)]  # gold i fits values i - 1 and i
    assert score("loft_multi", ";".join(values), example(*golds)) == 1.0
    assert score("loft_multi", ";".join(values[:-1]), example(*golds)) == 0.0


SENTENCES = st.lists(st.sampled_from(["ship", "sails", "to", "Tarn", "and", "back"]), min_size=1, max_size=6)
ENGLISH = st.lists(SENTENCES.map(" ".join), min_size=1, max_size=4).map(". ".join)


@pytest.mark.parametrize(
    ("found", "gold", "expected"),
    [
        ("the cat sat on the mat.", "the cat was on the mat.", 0.7999999950000002),  # 5 different words each
        ("Police killed the gunman. The end", "the gunman police killed. It was the end.", 0.4615384565680473),
        ("a b c d", "d c b a", 0.24999999500000009),
        ("a b a b", "b a b a", 0.999999995),  # b a b is common: all distinct words
        ("one. two three. ", "two. one three", 0.8571428522448981),  # the space after the last full stop is a word
        ("It rains", "It rains", 0.999999995),
        ("...", "a", 0.0),
        ("a", "", 0.0),
        ("", "", 0.0),
    ],
)
def test_figures_of_the_package(found, gold, expected):
    assert rouge_l(found, gold) == expected


@given(found=ENGLISH, gold=ENGLISH)
def test_range_and_blindness_to_white_space(found, gold):
    value = rouge_l(found, gold)
    assert 0.0 <= value < 1.0
    assert rouge_l(gold, gold) == pytest.approx(1.0, abs=1e-8)
    assert rouge_l(found.replace(" ", "\n  "), gold) == value
    assert (value == 0.0) == (not set(found.replace(".", "").split()) & set(gold.replace(".", "").split()))


@given(words=st.permutations("abcdefgh"), others=st.permutations("efghijkl"), n=st.integers(1, 8), m=st.integers(1, 8))
def test_sentences_of_different_words_have_the_plain_f_of_their_common_subsequence(words, others, n, m):
    x, y = tuple(words[:n]), tuple(others[:m])

    @cache
    def longest(i: int, j: int) -> int:
        if i == n or j == m:
            return 0
        if x[i] == y[j]:
            return 1 + longest(i + 1, j + 1)
        return max(longest(i + 1, j), longest(i, j + 1))

    assert rouge_l(" ".join(x), " ".join(y)) == pytest.approx(2 * longest(0, 0) / (n + m), abs=1e-7)


def test_a_sentence_of_thousands_of_words_has_a_score():
    words = [f"w{i}" for i in range(1500)]
    assert rouge_l(" ".join(words), " ".join(words[::2])) == pytest.approx(2 * 750 / 2250, abs=1e-7)


@pytest.mark.parametrize(("n", "least"), [(3, 0.408), (8, 0.704), (60, 0.952), (100, 0.971)])
def test_without_a_fault_the_number_of_questions_decides(n, least):
    assert share_interval([1] * n) == (pytest.approx(least, abs=1e-3), 1.0)
    assert share_interval([64] * n, [64] * n) == share_interval([1] * n)  # the tokens of an answer are one cluster
    assert share_interval([0] * n) == (0.0, pytest.approx(1 - least, abs=1e-3))


def test_paired_differences_are_those_of_bonett_and_price():
    """(b + 1 - c - 1) / (n + 2), and its standard error except for n / (n - 1)."""
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
    """The rate of wrong verdicts: the lower end is above the true share."""
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
    """Coverage for samples of a known mean: far from 95 % would be another interval."""
    rng = np.random.default_rng(0)
    samples = rng.random((200, 60))  # mean 0.5
    covered = sum(low <= 0.5 <= high for low, high in (bootstrap_mean([row.tolist()], 0).ci95 for row in samples))
    assert 180 <= covered <= 198


IDS = [f"d{i}" for i in range(12)]
rankings = st.lists(st.sampled_from(IDS), unique=True)
grades = st.dictionaries(st.sampled_from(IDS), st.integers(-1, 4), min_size=1).filter(lambda g: max(g.values()) > 0)
cuts = st.integers(1, 14)


def test_the_worked_example():
    ranked, relevance = ["b", "x", "a", "c"], {"a": 3, "b": 1, "d": 2, "x": 0}
    # relevant: a, b and d; b is at rank 1, a at rank 3, d is missing
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


@given(rankings, grades, cuts)
def test_only_the_first_k_and_the_relevant_count(ranked, relevance, k):
    positive = {name: grade for name, grade in relevance.items() if grade > 0}
    for measure in (recall_at, hit_at, reciprocal_rank, ndcg_at):
        assert measure(ranked, relevance, k) == measure(ranked[:k], positive, k)


@given(st.permutations(IDS), grades, st.integers(1, 12))
def test_ndcg_is_scikit_learn_s_where_everything_is_ranked(ranked, relevance, k):
    metrics = pytest.importorskip("sklearn.metrics")
    truth = [[max(relevance.get(name, 0), 0) for name in IDS]]
    scores = [[-ranked.index(name) for name in IDS]]
    assert ndcg_at(ranked, relevance, k) == pytest.approx(metrics.ndcg_score(truth, scores, k=k), abs=1e-12)
