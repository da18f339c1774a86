"""Mixed rows: every kind of question is asked, and its answer is what the passages say."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from ragkv.cloze import BLANK, clozes, docstrings, english_sentences, reference_texts
from ragkv.finetune.mixture import mixed_sample, prose_passages, prose_sample
from ragkv.finetune.sample import GOLD_WEIGHT, Ask, Sample
from ragkv.worlds import UNANSWERABLE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def spoken(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[tuple[str, str, str, str]]:
    """Of every question: itself, its answer, what of the answer weighs nothing and what weighs as gold."""
    found = []
    for segment in sorted({s for s, asks in zip(sample.segments, sample.asks, strict=True) if asks}):
        row = [i for i, s in enumerate(sample.segments) if s == segment]
        question, answer = tokenizer.decode([sample.tokens[i] for i in row]).split("<|end|>\n<|assistant|>\n")
        said = row[-len(tokenizer(answer, add_special_tokens=False)["input_ids"]) :]
        unlearned = tokenizer.decode([sample.tokens[i] for i in said if sample.weights[i] == 0])
        gold = tokenizer.decode([sample.tokens[i] for i in said if sample.weights[i] == GOLD_WEIGHT])
        found.append((question.removeprefix("Question: "), answer.removesuffix("<|end|>"), unlearned, gold))
    return found


@pytest.mark.parametrize("hard", [False, True])
def test_a_mixed_row_asks_every_kind_and_answers_from_its_passages(
    tokenizer: PreTrainedTokenizerFast, hard: bool
) -> None:
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
            elif sentences[-1].startswith(("Both", "They")) or sentences[-1].endswith("first."):
                assert stand[:2] == [True, True]
                assert gold.replace(" ", "").endswith(sentences[-1].replace(" ", ""))
                kinds.add("comparison")
            elif unlearned and len(sentences) == 2:
                kinds.add("begun")
            elif all(stand):
                kinds.add("answered")
    assert kinds == {"unanswerable", "comparison", "begun", "answered"}


def test_without_passages_nothing_is_known(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = mixed_sample(random.Random(0), tokenizer, passage_range=(0, 0))
    answers = spoken(tokenizer, sample)
    assert all(answer == UNANSWERABLE or unlearned for _, answer, unlearned, _ in answers)
    assert sum(answer == UNANSWERABLE for _, answer, _, _ in answers) > len(answers) / 2


def test_prose_rows_ask_for_words_of_their_passages(tokenizer: PreTrainedTokenizerFast) -> None:
    asked = 0
    for seed in range(4):
        sample = prose_sample(random.Random(seed), tokenizer, passage_range=(12, 12))
        read = " ".join(tokenizer.decode([t for t, a in zip(sample.tokens, sample.asks, strict=True) if not a]).split())
        for question, answer, _, gold in spoken(tokenizer, sample):
            if answer != UNANSWERABLE:
                assert answer in read
                assert BLANK in question
                assert gold.split()[0].strip(".,") in answer
                asked += 1
    assert asked > 8


def test_weights_follow_the_characters() -> None:
    ask = Ask("Who?", "Mira leads Oskel.", spans=((11, 16, 4.0),), relation=5.0, given=4, last=7.0)
    offsets = [(0, 4), (4, 10), (10, 11), (11, 16), (16, 17), (17, 23)]
    assert ask.weights(offsets) == [0.0, 5.0, 1.0, 4.0, 1.0, 7.0]
    assert ask._replace(given=0).weights(offsets)[0] == ask.first


def test_a_cloze_leaves_out_words_that_stand_nowhere_else() -> None:
    rng = random.Random(3)
    texts = reference_texts()
    sentences = [sentence for text in texts for sentence in english_sentences(text)]
    assert len(sentences) > 500
    for sentence in rng.sample(sentences, 200):
        for cloze in clozes(rng, sentence, 2):
            blanked = sentence[: cloze.start] + BLANK + sentence[cloze.start + len(cloze.gold) :]
            assert f'"{blanked}"' in cloze.question
            assert sentence[cloze.start :].startswith(cloze.gold)
            assert cloze.gold.casefold() not in cloze.question.casefold()


def test_what_is_examined_was_not_learned_from() -> None:
    learned = {sentence for text in docstrings() for sentence in english_sentences(text)}
    examined = [sentence for text in reference_texts() for sentence in english_sentences(text)]
    assert not [sentence for sentence in examined if sentence in learned]


def test_prose_passages_are_of_the_chunkers_size(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = prose_passages(random.Random(1), tokenizer, reference_texts(), 40)
    sizes = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    assert len(texts) == 40
    assert max(sizes) <= 96 + 8
    assert all(texts)
