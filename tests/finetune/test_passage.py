"""Passages are of the chunker's size, and support the questions that are asked of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from ragkv.finetune.passage import answerable, passages
from ragkv.worlds import World

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.mark.parametrize("seed", range(5))
def test_passages_are_of_the_chunkers_size(tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    world = World.generate(seed)
    texts = passages(random.Random(seed), tokenizer, world)
    sizes = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    assert max(sizes) <= 96 + 8  # a broken line may spell a word in more tokens
    assert sorted(sizes)[len(sizes) // 2] >= 30
    assert all(text == text.strip() and text for text in texts)


@pytest.mark.parametrize("seed", range(5))
def test_answerable_questions_stand_in_the_passages(tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    world = World.generate(seed)
    texts = passages(random.Random(seed), tokenizer, world)[:4]
    found = answerable(world, texts)
    flat = [" ".join(text.split()) for text in texts]
    assert found
    assert len(found) < len(world.questions)
    for question in found:
        assert all(any(sentence in text for text in flat) for sentence in question.support)
