"""Questions by description: right about their document, and hardly a word in common with it."""

from __future__ import annotations

from collections import Counter

import pytest

from ragkv.worlds import World
from ragkv.worlds.questions import paraphrases, shared_words


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    return [World.generate(seed, split="heldout", size=60) for seed in range(5)]


def test_a_question_hardly_shares_a_word_with_its_document(worlds):
    shared = Counter(
        shared_words(found.question, world.document(found.title).text)
        for world in worlds
        for found in paraphrases(world)
    )
    assert shared.total() > 1000
    assert shared[0] > 0.95 * shared.total()
    assert max(shared) <= 2


def test_paraphrases_are_right_and_give_no_name_away(worlds):
    for world in worlds:
        for found in paraphrases(world):
            assert found.gold in world.document(found.title).text
            assert found.title not in found.question
    assert paraphrases(worlds[0], seed=1) == paraphrases(worlds[0], seed=1)
    assert paraphrases(worlds[0], seed=1) != paraphrases(worlds[0], seed=2)
    assert len(paraphrases(worlds[0], wordings=1)) < len(paraphrases(worlds[0], wordings=3))
