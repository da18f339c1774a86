"""Chunks of a benchmark's text: nothing is lost, and sizes hold."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.evaluation.cutting import Cutter, estimated_tokens

MARK = re.compile(r"^Passage \d+:", re.MULTILINE)
LINES = st.lists(st.sampled_from(["Passage 1:", "Passage 22: x", "a line", "  indented", "", "see Passage 3: there"]))


def words(text: str) -> int:
    return len(text.split())


@settings(deadline=None)  # no test asserts on time
@given(lines=LINES, size=st.integers(1, 9))
def test_nothing_but_white_space_is_lost(lines, size):
    text = "\n".join(lines)
    cutter = Cutter(chunk_tokens=size, count_tokens=words)
    for chunks in (cutter.prose(text), cutter.code(text), cutter.passages(text, MARK), cutter.examples(text, MARK)):
        assert "".join("".join(chunks).split()) == "".join(text.split())
        assert all(chunk.strip() for chunk in chunks)
    assert all(words(chunk) <= size for chunk in cutter.prose(text))


@settings(deadline=None)
@given(lines=LINES, size=st.integers(1, 9))
def test_marks_begin_chunks(lines, size):
    text = "\n".join(lines)
    cutter = Cutter(chunk_tokens=size, count_tokens=words)
    marks = len(MARK.findall(text))
    if marks:
        for chunk in cutter.passages(text, MARK)[-marks:]:
            assert len(MARK.findall(chunk)) == 1
        for chunk in cutter.examples(text, MARK):
            assert words(chunk) <= size or len(MARK.findall(chunk)) <= 1
    else:
        assert cutter.passages(text, MARK) == cutter.examples(text, MARK) == cutter.prose(text)


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("word", 1), ("words", 2), ("海海海海", 3), ("\ud800", 1)])
def test_tokens_are_estimated_from_bytes(text, tokens):
    assert estimated_tokens(text) == tokens
