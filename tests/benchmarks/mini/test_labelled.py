"""Rows of many-shot learning: every answer restates a shot that is there, with the label that is right."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

import pytest
from packed import spoken

from ragkv.benchmarks.mini.labelled import shot_sample
from ragkv.evaluation.synthetic.manyshot import icl
from ragkv.worlds import UNANSWERABLE
from ragkv.worlds.shot import GROUPS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SHOT = re.compile(r"The (\w+) is ([\w ]+)\.\s*Label: (\w+)")
_KIND = {thing: group for group, things in GROUPS.items() for thing in things}


@pytest.mark.parametrize("chunks", [1, 3, 9])
def test_an_answer_is_a_shot_of_the_thing_or_else_of_its_kind(tokenizer: PreTrainedTokenizerFast, chunks: int) -> None:
    found = set()
    for seed in range(8):
        sample = shot_sample(random.Random(seed), tokenizer, chunks=chunks, questions=8)
        context = tokenizer.decode([t for t, asks in zip(sample.tokens, sample.asks, strict=True) if not asks])
        shots = _SHOT.findall(context)
        things = {thing for thing, _, _ in shots}
        for question, answer, _, gold in spoken(tokenizer, sample):
            [asked] = re.findall(r"The (\w+) is", question)
            if answer == UNANSWERABLE:
                assert _KIND[asked] not in {_KIND[thing] for thing in things}
                continue
            [shot] = _SHOT.findall(answer)
            assert shot in shots
            assert gold.strip() == shot[2]
            assert "\n" not in answer  # the metric reads the first line
            assert shot[0] == asked if asked in things else _KIND[shot[0]] == _KIND[asked]
            found.add(asked in things)
    assert found == {True, False}


def test_without_a_shot_nothing_is_known(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = shot_sample(random.Random(0), tokenizer, chunks=0)
    assert {answer for _, answer, _, _ in spoken(tokenizer, sample)} == {UNANSWERABLE}


def test_what_is_examined_has_labels_and_places_of_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    learned = [shot_sample(random.Random(seed), tokenizer, chunks=6) for seed in range(30)]
    shots = [shot for sample in learned for shot in _SHOT.findall(tokenizer.decode(sample.tokens))]
    labels, places = {label for _, _, label in shots}, {place for _, place, _ in shots}
    examined = icl(limit=30).examples
    assert labels.isdisjoint({label for example in examined for label in example.classes})
    assert not [chunk for example in examined for chunk in example.chunks if any(f"is {p}." in chunk for p in places)]
