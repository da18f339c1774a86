"""A row is what inference reads: prefix, chunks and questions, with weights on what is to be learned."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from ragkv.benchmarks.mini.sample import (
    FIRST_WEIGHT,
    GOLD_WEIGHT,
    collate,
    copy_sample,
    prefix_text,
    qa_sample,
    retrieved,
)
from ragkv.finetune.passage import passages
from ragkv.worlds import World

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.mark.parametrize("block", [False, True])
def test_a_row_is_prefix_chunks_and_questions(tokenizer: PreTrainedTokenizerFast, block: bool) -> None:
    sample = qa_sample(random.Random(1), tokenizer, passage_range=(4, 4), questions=5, block=block)
    text = tokenizer.decode(sample.tokens)
    assert text.startswith(prefix_text())
    assert text.count("<|end|>\n<|assistant|>\n") == 5
    assert max(sample.segments) == 4 + 5
    assert sample.block is block
    weighed = [index for index, weight in enumerate(sample.weights) if weight]
    assert all(sample.asks[index] for index in weighed)
    assert sample.weights.count(FIRST_WEIGHT) == 5
    golds = tokenizer.decode([sample.tokens[index] for index in weighed if sample.weights[index] == GOLD_WEIGHT])
    assert golds.strip()
    assert qa_sample(random.Random(1), tokenizer, passage_range=(4, 4), questions=5, block=block) == sample


def test_retrieved_passages_speak_of_what_is_asked(tokenizer: PreTrainedTokenizerFast) -> None:
    world = World.generate(4, size=40)
    texts = passages(random.Random(0), tokenizer, world)
    for seed in range(5):
        chosen = retrieved(random.Random(seed), world, texts, 6)
        assert len(chosen) == len(set(chosen)) == 6
        assert set(chosen) <= set(texts)
        questions = random.Random(seed).sample(world.questions, 2)  # what `retrieved` draws first
        for question in questions:
            if any(question.support[-1] in text for text in texts):
                assert any(question.support[-1] in text for text in chosen)


@pytest.mark.parametrize("hard", [False, True])
def test_missing_answers_carry_no_gold_weight(tokenizer: PreTrainedTokenizerFast, hard: bool) -> None:
    sample = qa_sample(random.Random(2), tokenizer, passage_range=(3, 3), questions=8, misses=1.0, hard=hard)
    assert set(sample.weights) == {0.0, 1.0}
    assert max(sample.segments) == 3 + 8


def test_a_copy_row_repeats_every_record() -> None:
    sample = copy_sample(random.Random(0), vocab=(6, 500), records=7)
    half = len(sample.tokens) // 2
    assert sorted(sample.tokens[:half]) == sorted(sample.tokens[half:])
    assert not any(sample.weights[:half])
    assert sum(sample.weights) == half - 7


def test_collate_pads_to_a_multiple(tokenizer: PreTrainedTokenizerFast) -> None:
    samples = [copy_sample(random.Random(seed), vocab=(6, 500), records=3 + seed) for seed in range(3)]
    batch = collate(samples, pad=0, multiple=32)
    assert batch.tokens.shape[1] % 32 == 0
    for row, sample in enumerate(samples):
        count = len(sample.tokens)
        assert batch.tokens[row, :count].tolist() == sample.tokens
        assert batch.segments[row, count:].eq(-1).all()
        assert not batch.weights[row, count:].any()
