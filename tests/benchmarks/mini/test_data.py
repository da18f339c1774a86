"""mini's tokenizer and training rows: questions, answers, and the loss weight of each token."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ragkv.benchmarks.evaluation.tasks.catalog import icl
from ragkv.benchmarks.evaluation.worlds import text as library
from ragkv.benchmarks.evaluation.worlds.passages import passages
from ragkv.benchmarks.evaluation.worlds.text import BLANK, GROUPS, docstrings, english_sentences, reference_texts
from ragkv.benchmarks.evaluation.worlds.world import UNANSWERABLE, World
from ragkv.benchmarks.mini.data import (
    FIRST_WEIGHT,
    GOLD_WEIGHT,
    INSTRUCTION,
    QASample,
    copy_sample,
    mixed_sample,
    prefix_text,
    prose_sample,
    qa_sample,
    retrieved,
    shot_sample,
    suffix_text,
)


def spoken(tokenizer, sample):
    """For each question: itself, its answer, the answer's parts without weight, and those weighted as gold."""
    found = []
    for segment in sorted({s for s, asks in zip(sample.segments, sample.asks, strict=True) if asks}):
        row = [i for i, s in enumerate(sample.segments) if s == segment]
        question, answer = tokenizer.decode([sample.tokens[i] for i in row]).split("<|end|>\n<|assistant|>\n")
        message = row[-len(tokenizer(answer, add_special_tokens=False)["input_ids"]) :]
        unlearned = tokenizer.decode([sample.tokens[i] for i in message if sample.weights[i] == 0])
        gold = tokenizer.decode([sample.tokens[i] for i in message if sample.weights[i] == GOLD_WEIGHT])
        found.append((question.removeprefix("Question: "), answer.removesuffix("<|end|>"), unlearned, gold))
    return found


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


def test_retrieved_passages_speak_of_what_is_asked(tokenizer):
    world = World.generate(4, size=40)
    texts = passages(random.Random(0), tokenizer, world)
    for seed in range(5):
        chosen = retrieved(random.Random(seed), world, texts, 6)
        assert len(chosen) == len(set(chosen)) == 6
        assert set(chosen) <= set(texts)
        questions = random.Random(seed).sample(world.questions, 2)  # the first draw of `retrieved`
        for question in questions:
            if any(question.support[-1] in text for text in texts):
                assert any(question.support[-1] in text for text in chosen)


def test_a_copy_row_repeats_every_record():
    sample = copy_sample(random.Random(0), vocab=(6, 500), records=7)
    half = len(sample.tokens) // 2
    assert sorted(sample.tokens[:half]) == sorted(sample.tokens[half:])
    assert not any(sample.weights[:half])
    assert sum(sample.weights) == half - 7


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


@pytest.mark.nightly
def test_prose_rows_ask_for_words_of_their_passages(tokenizer):
    asked = 0
    for seed in range(2):
        sample = prose_sample(random.Random(seed), tokenizer, passage_range=(12, 12))
        read = " ".join(tokenizer.decode([t for t, a in zip(sample.tokens, sample.asks, strict=True) if not a]).split())
        for question, answer, _, gold in spoken(tokenizer, sample):
            if answer != UNANSWERABLE:
                assert answer in read
                assert BLANK in question
                assert gold.split()[0].strip(".,") in answer
                asked += 1
    assert asked > 4


def test_weights_follow_the_characters():
    ask = QASample("Who?", "Mira leads Oskel.", spans=((11, 16, 4.0),), relation=5.0, given=4, last=7.0)
    offsets = [(0, 4), (4, 10), (10, 11), (11, 16), (16, 17), (17, 23)]
    assert ask.weights(offsets) == [0.0, 5.0, 1.0, 4.0, 1.0, 7.0]
    assert ask._replace(given=0).weights(offsets)[0] == ask.first


def test_what_is_learned_from_is_neither_a_test_nor_the_reference(tmp_path, monkeypatch):
    """The debugger repeats the reference's text."""
    monkeypatch.setattr(library.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    names = ("ast", "json/tool", "pdb", "pydoc_data/topics", "test/ast", "json/tests/tool", "site-packages/ast")
    texts = [" ".join([f"This sentence is about file number {at}."] * 3) for at in range(len(names))]
    for name, docstring in zip(names, texts, strict=True):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'"""{docstring}"""')
    assert library.docstrings.__wrapped__() == tuple(texts[:2])


@pytest.mark.nightly
def test_what_is_examined_was_not_learned_from():
    learned = {sentence for text in docstrings() for sentence in english_sentences(text)}
    examined = [sentence for text in reference_texts() for sentence in english_sentences(text)]
    assert not [sentence for sentence in examined if sentence in learned]


_SHOT = re.compile(r"The (\w+) is ([\w ]+)\.\s*Label: (\w+)")
_KIND = {thing: group for group, things in GROUPS.items() for thing in things}


@pytest.mark.parametrize("chunks", [1, 3, 9])
def test_an_answer_is_a_shot_of_the_thing_or_else_of_its_kind(tokenizer, chunks):
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
            assert "\n" not in answer  # the metric reads only the first line
            assert shot[0] == asked if asked in things else _KIND[shot[0]] == _KIND[asked]
            found.add(asked in things)
    assert found == {True, False}


def test_what_is_examined_has_labels_and_places_of_its_own(tokenizer):
    learned = [shot_sample(random.Random(seed), tokenizer, chunks=6) for seed in range(30)]
    shots = [shot for sample in learned for shot in _SHOT.findall(tokenizer.decode(sample.tokens))]
    labels, places = {label for _, _, label in shots}, {place for _, place, _ in shots}
    examined = icl(limit=30).examples
    assert labels.isdisjoint({label for example in examined for label in example.classes})
    assert not [chunk for example in examined for chunk in example.chunks if any(f"is {p}." in chunk for p in places)]


SENTINEL = "\x00chunks\x00"


def ids(tokenizer, text):
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_any_text_round_trips(tokenizer):
    @settings(max_examples=200)
    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def check(text):
        assert tokenizer.decode(ids(tokenizer, text)) == text

    check()


def test_names_are_spelled_alike_everywhere(tokenizer):
    for document in World.generate(1, split="heldout").documents:
        name = ids(tokenizer, document.title)
        for before, after in (("\n", "\n"), ("the ", "."), ("# ", "\n\n"), ("", "?")):
            found = ids(tokenizer, before + document.title + after)
            assert any(found[start : start + len(name)] == name for start in range(len(found)))


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
