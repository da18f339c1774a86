"""Worlds are the ground truth of every accuracy figure: they are reproducible, consistent and split cleanly."""

import random
from collections import Counter

import pytest
from package import run_fresh

from ragkv.benchmarks.evaluation.worlds.passages import answerable, passages
from ragkv.benchmarks.evaluation.worlds.world import (
    UNANSWERABLE,
    Split,
    World,
    comparisons,
    lists,
    paraphrases,
    shared_words,
    split_of,
    unanswerable,
)

SPLITS: tuple[Split, ...] = ("train", "heldout")


def name_words(world: World) -> set[str]:
    """Composed words in a world's names; a company's second word ("Works") is ordinary English."""
    words: set[str] = set()
    for document in world.documents:
        parts = document.title.split()
        words.update(parts[:1] if document.kind == "company" else parts)
    words.update(fact.value for fact in world.facts if fact.relation in ("town.river", "town.region"))
    return words


def test_generate_is_the_same_in_another_process():
    """Each process has another hash seed, which determines the order of sets."""
    imported = "from ragkv.benchmarks.evaluation.worlds.world import World"
    code = f"{imported}; print(repr(World.generate(3, split='heldout')), end='')"
    assert run_fresh(code, PYTHONHASHSEED="random") == (repr(World.generate(3, split="heldout")), "")


def test_splits_share_no_word_of_a_name():
    words: dict[Split, set[str]] = {}
    for split in SPLITS:
        words[split] = set().union(*(name_words(World.generate(seed, split=split)) for seed in range(40)))
        assert {split_of(word) for word in words[split]} == {split}
    assert words["train"].isdisjoint(words["heldout"])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("split", SPLITS)
def test_questions_are_answered_by_the_documents_that_they_name(seed, split):
    world = World.generate(seed, split=split, size=20)
    assert {question.hops for question in world.questions} == {1, 2}
    for question in world.questions:
        texts = [world.document(title).text for title in question.titles]
        assert len(question.titles) == len(question.support) == question.hops
        assert all(sentence in text for sentence, text in zip(question.support, texts, strict=True))
        assert question.gold in texts[-1]
        assert question.answer == " ".join(question.support)
        assert question.gold in question.answer
        assert question.question.endswith("?")
        assert question.gold in question.rephrased
        assert question.rephrased != question.answer
        assert question.rephrased not in " ".join(texts)


@pytest.mark.parametrize("seed", range(4))
def test_relations_and_their_inverses_agree(seed):
    world = World.generate(seed, size=30)
    by_key = {(fact.subject, fact.relation): fact.value for fact in world.facts}
    assert len(by_key) == len(world.facts)
    for person_relation, relation in (
        ("person.founded", "company.founder"),
        ("person.leads", "company.chief"),
        ("person.designed", "product.designer"),
        ("person.mayor", "town.mayor"),
        ("product.maker", "company.product"),
    ):
        for (subject, name), value in by_key.items():
            if name == person_relation:
                assert by_key[value, relation] == subject


@pytest.mark.parametrize("seed", range(4))
def test_every_sentence_stands_alone(seed):
    world = World.generate(seed, size=24)
    titles = [document.title for document in world.documents]
    assert len(set(titles)) == len(titles)
    for document in world.documents:
        assert 4 <= len(document.sentences) <= 7
        assert document.text == " ".join(document.sentences)
        assert all(sentence.startswith(document.title + " ") for sentence in document.sentences)


def test_a_question_has_one_answer_and_every_kind_is_asked():
    world = World.generate(5, size=40)
    golds: dict[str, set[str]] = {}
    for question in world.questions:
        golds.setdefault(question.question, set()).add(question.gold)
    assert {len(found) for found in golds.values()} == {1}
    world = World.generate(3, size=40)
    asked = world.ask(random.Random(1), world.facts[: len(world.facts) // 2], 4)
    kinds = [question.kind for question in asked]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(
        ("one hop", "two hops", "comparison", "list", "unanswerable"), 4
    )
    with pytest.raises(ValueError, match="at least 8"):
        World.generate(0, size=3)


@pytest.mark.parametrize("seed", range(3))
def test_a_comparison_says_what_its_two_facts_say(seed):
    world = World.generate(seed, size=30)
    facts = {fact.sentence: fact for fact in world.facts}
    closings = set()
    for question in comparisons(random.Random(seed), world.facts, 30):
        first, second = (facts[sentence] for sentence in question.support)
        closing = question.answer.removeprefix(f"{first.sentence} {second.sentence} ")
        assert question.gold + "." == closing
        assert question.right(question.answer)
        assert first.relation == second.relation
        assert first.subject in question.question
        assert second.subject in question.question
        if closing.endswith("first."):
            assert closing.startswith(min((first, second), key=lambda fact: int(fact.value)).subject)
        else:
            assert closing.startswith("Both") == (first.value == second.value)
        closings.add(closing.split()[0] in ("Both", "They") and closing.split()[0])
    assert {"Both", "They"} <= closings


@pytest.mark.parametrize("seed", range(3))
def test_a_list_names_all_and_only_those(seed):
    world = World.generate(seed, size=40)
    for stated in (world.facts, world.facts[::2]):
        for question in lists(stated):
            relation = question.relation.removeprefix("list ")
            values = {fact.value for fact in stated if fact.sentence in question.support}
            assert len(values) == 1
            assert question.golds == tuple(
                fact.subject for fact in stated if fact.relation == relation and fact.value in values
            )
            assert question.right(question.answer)
            assert not question.right(question.answer.replace(question.golds[-1], "Nobody"))


@pytest.mark.parametrize("seed", range(3))
def test_what_cannot_be_answered_follows_from_nothing_that_is_stated(seed):
    world = World.generate(seed, size=30)
    stated = world.facts[::3]
    stands = {(fact.relation, fact.subject, fact.value) for fact in stated}
    mirrored = {"company.founder": "person.founded", "town.mayor": "person.mayor", "company.product": "product.maker"}
    asked = list(unanswerable((*world.facts, *world.hidden), stated))
    assert asked
    for question in asked:
        assert question.answer == UNANSWERABLE
        [fact] = [
            fact
            for fact in (*world.facts, *world.hidden)
            if fact.relation == question.relation and fact.subject in question.question
        ]
        assert (fact.relation, fact.subject, fact.value) not in stands
        assert (mirrored.get(fact.relation), fact.value, fact.subject) not in stands
    assert not list(unanswerable(world.facts, world.facts))


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


@pytest.mark.parametrize("seed", range(5))
def test_passages_are_of_the_chunkers_size_and_answerable_questions_stand_in_them(tokenizer, seed):
    world = World.generate(seed)
    texts = passages(random.Random(seed), tokenizer, world)
    sizes = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    assert max(sizes) <= 96 + 8  # a split line may spell a word with more tokens
    assert sorted(sizes)[len(sizes) // 2] >= 30
    assert all(text == text.strip() and text for text in texts)
    found = answerable(world, texts[:4])
    flat = [" ".join(text.split()) for text in texts[:4]]
    assert found
    assert len(found) < len(world.questions)
    for question in found:
        assert all(any(sentence in text for text in flat) for sentence in question.support)
