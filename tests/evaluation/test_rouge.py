"""ROUGE-L beside figures of the package `rouge` 1.0.1, and beside a plain longest common subsequence."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.evaluation.rouge import rouge_l

SENTENCES = st.lists(st.sampled_from(["ship", "sails", "to", "Tarn", "and", "back"]), min_size=1, max_size=6)
TEXTS = st.lists(SENTENCES.map(" ".join), min_size=1, max_size=4).map(". ".join)


@pytest.mark.parametrize(
    ("found", "gold", "expected"),
    [
        ("the cat sat on the mat.", "the cat was on the mat.", 0.7999999950000002),  # 5 different words each
        ("Police killed the gunman. The end", "the gunman police killed. It was the end.", 0.4615384565680473),
        ("a b c d", "d c b a", 0.24999999500000009),
        ("a b a b", "b a b a", 0.999999995),  # b a b is common: all different words
        ("one. two three. ", "two. one three", 0.8571428522448981),  # the blank after the last stop is a word
        ("It rains", "It rains", 0.999999995),
        ("...", "a", 0.0),
        ("a", "", 0.0),
        ("", "", 0.0),
    ],
)
def test_figures_of_the_package(found, gold, expected):
    assert rouge_l(found, gold) == expected


@settings(deadline=None)  # no test asserts on time
@given(text=TEXTS)
def test_equal_texts_have_one(text):
    assert rouge_l(text, text) == pytest.approx(1.0, abs=1e-8)


@settings(deadline=None)
@given(found=TEXTS, gold=TEXTS)
def test_range_and_blindness_to_white_space(found, gold):
    value = rouge_l(found, gold)
    assert 0.0 <= value < 1.0
    assert rouge_l(found.replace(" ", "\n  "), gold) == value
    assert (value == 0.0) == (not set(found.replace(".", "").split()) & set(gold.replace(".", "").split()))


@settings(deadline=None)
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
