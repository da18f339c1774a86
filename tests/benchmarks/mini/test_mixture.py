"""Mixed rows: every kind of question is asked, and its answer is what the passages say."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from packed import spoken

from ragkv.benchmarks.mini.mixture import broken_off, mixed_sample, prose_passages, prose_sample
from ragkv.benchmarks.mini.sample import Ask
from ragkv.worlds import UNANSWERABLE
from ragkv.worlds.cloze import BLANK, clozes, docstrings, english_sentences, reference_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
            elif answer.endswith(f" ... {UNANSWERABLE}"):  # an answer that was begun ends where its value would stand
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


def test_without_passages_nothing_is_known(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = mixed_sample(random.Random(0), tokenizer, passage_range=(0, 0))
    answers = spoken(tokenizer, sample)
    assert all(answer == UNANSWERABLE or unlearned for _, answer, unlearned, _ in answers)
    assert sum(answer == UNANSWERABLE for _, answer, _, _ in answers) > len(answers) / 2


def test_an_expert_of_one_passage_never_breaks_off(tokenizer: PreTrainedTokenizerFast) -> None:
    for seed in range(6):
        sample = mixed_sample(random.Random(seed), tokenizer, passage_range=(0, 2))
        assert not [answer for _, answer, _, _ in spoken(tokenizer, sample) if "..." in answer]


def test_an_answer_is_broken_off_before_its_last_value() -> None:
    text, at = broken_off("Mira leads Oskel. Oskel was founded by Mira.", "Mira")
    assert text == f"Mira leads Oskel. Oskel was founded by ... {UNANSWERABLE}"
    assert text[at:] == f" ... {UNANSWERABLE}"


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
