"""What counts as an answer in a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.evaluation.containment import Wording

TEXT = (
    "Oskel\u2019s well-known mill (\u201cHalden Works, Ltd.\u201d) made 1,250 valves of 3.5 mm in the U.S. from "
    "1907\u20131910, in C#."
)


@pytest.mark.parametrize(
    "answer",
    [
        "Halden Works Ltd",
        "halden works, ltd",
        "Oskel's well known mill",
        "oskels wellknown",
        "1250 valves",
        "1,250",
        "US",
        "U.S.",
        "1907-1910",
        "1907 1910",
        "3.5 mm",
        "C#",
        "works ltd made",
    ],
)
def test_punctuation_makes_no_difference(answer):
    assert Wording.of(TEXT).holds(Wording.of(answer))


@pytest.mark.parametrize("answer", ["35 mm", "12.50", "C++", "!!", "Halden Mill", "19071910 C", "F#"])
def test_but_numbers_and_signs_do(answer):
    assert not Wording.of(TEXT).holds(Wording.of(answer))


@given(st.text(max_size=40), st.text(max_size=10), st.text(max_size=10))
def test_a_text_holds_its_pieces(text, before, after):
    assert Wording.of(f"{before} {text} {after}").holds(Wording.of(text))
