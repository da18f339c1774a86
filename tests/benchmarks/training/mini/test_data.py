"""mini's tokenizer and training rows: questions, answers, and the loss weight of each token."""

import random

import pytest
from transformers import AutoTokenizer

from ragkv.benchmarks.evaluation.worlds.world import UNANSWERABLE
from ragkv.benchmarks.training.mini.data import (
    FIRST_WEIGHT,
    GOLD_WEIGHT,
    INSTRUCTION,
    mixed_sample,
    prefix_text,
    qa_sample,
    suffix_text,
)


def spoken(tokenizer, sample):
    """For each question: itself, its answer, the answer's parts without weight, and those weighted as gold."""
    answers = []
    for segment in sorted({s for s, asks in zip(sample.segments, sample.asks, strict=True) if asks}):
        row = [i for i, s in enumerate(sample.segments) if s == segment]
        question, answer = tokenizer.decode([sample.tokens[i] for i in row]).split("<|end|>\n<|assistant|>\n")
        message = row[-len(tokenizer(answer, add_special_tokens=False)["input_ids"]) :]
        unlearned = tokenizer.decode([sample.tokens[i] for i in message if sample.weights[i] == 0])
        gold = tokenizer.decode([sample.tokens[i] for i in message if sample.weights[i] == GOLD_WEIGHT])
        answers.append((question.removeprefix("Question: "), answer.removesuffix("<|end|>"), unlearned, gold))
    return answers


@pytest.mark.parametrize("block", [False, True])
def test_a_row_is_prefix_chunks_and_questions(tokenizer, block):
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


@pytest.mark.parametrize("hard", [False, True])
def test_a_mixed_row_asks_every_kind_and_answers_from_its_passages(tokenizer, hard):
    kinds: set[str] = set()
    for seed in range(6):
        sample = mixed_sample(random.Random(seed), tokenizer, passage_range=(8, 8), questions=14, hard=hard)
        context = [t for t, asks in zip(sample.tokens, sample.asks, strict=True) if not asks]
        read = " ".join(tokenizer.decode(context).split())
        for _question, answer, unlearned, gold in spoken(tokenizer, sample):
            sentences = [part + "." for part in answer.rstrip(".").split(". ")]
            stand = [sentence in read for sentence in sentences]
            if answer == UNANSWERABLE:
                kinds.add("unanswerable")
            elif answer.endswith(f" ... {UNANSWERABLE}"):  # an answer that has begun ends where its value would be
                *known, _ = answer.removesuffix(f" ... {UNANSWERABLE}").split(". ")
                assert all(f"{sentence}." in read for sentence in known)
                assert gold.rstrip().endswith("...")
                kinds.add("half known" if known else "broken off")
            elif sentences[-1].startswith(("Both", "They")) or sentences[-1].endswith("first."):
                assert stand[:2] == [True, True]
                assert gold.replace(" ", "").endswith(sentences[-1].replace(" ", ""))
                kinds.add("comparison")
            elif unlearned and len(sentences) == 2:
                kinds.add("begun")
            elif all(stand):
                kinds.add("answered")
    assert kinds == {"unanswerable", "comparison", "begun", "answered", "broken off", "half known"}


SENTINEL = "\x00chunks\x00"


def ids(tokenizer, text):
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_template_equals_the_parts(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    rendered = loaded.apply_chat_template(
        [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": f"Documents:\n\n{SENTINEL}Question: Who?"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert rendered.split(SENTINEL) == [prefix_text(), suffix_text("Who?")]
    assert ids(loaded, prefix_text()).count(loaded.bos_token_id) == 1
    assert loaded.unk_token_id is None
