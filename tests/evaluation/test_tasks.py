"""Generated tasks have the answers that their chunks state, and are reproduced from their seed."""

import re
from collections import Counter
from typing import get_args

import pytest

from ragkv.benchmarks.evaluation import tasks as catalog
from ragkv.benchmarks.evaluation.metrics import score
from ragkv.benchmarks.evaluation.tasks import TASKS, make_task, passages
from ragkv.benchmarks.evaluation.worlds.world import QuestionKind, World
from ragkv.doctor.specs import Spec
from ragkv.errors import UsageError


def made(name: str, *, seed: int = 0, limit: int = 6, chunks: int = 8, **options):
    return make_task(Spec(name, options), seed=seed, limit=limit, chunks=chunks)


@pytest.mark.parametrize("name", TASKS)
def test_every_task(name):
    task = made(name)
    assert task == made(name)
    assert task.examples[0].chunks != made(name, seed=1).examples[0].chunks
    assert (task.name, task.seed, len(task.examples)) == (f"{name}/8", 0, 6)
    for example in task.examples:
        assert len(example.chunks) == 8
        assert all(example.chunks)
        assert score(task.metric, ", ".join(example.answers), example) == 1
        assert score(task.metric, "nothing", example) == 0
        evidence = "\n".join(example.chunks[at] for at in example.needed)
        if "hop" in example.kind or example.kind == "list":
            assert all(answer in evidence for answer in example.answers)


@pytest.mark.parametrize("chunks", [1, 2, 33, 128])
def test_worlds_of_any_size(chunks):
    task = made("worlds", chunks=chunks, limit=7, kinds="one hop+two hops")
    worlds: dict[str, tuple[str, ...]] = {}
    for example in task.examples:
        assert len(set(example.chunks)) == chunks
        assert all(example.chunks[at] for at in example.needed)
        assert worlds.setdefault(example.example_id.split("-")[0], example.chunks) == example.chunks  # a shared context
    kinds = Counter(example.kind for example in task.examples)
    assert kinds["one hop"] in ((7,) if chunks == 1 else (3, 4))
    if chunks > 1:
        assert all(len(example.needed) == 2 for example in task.examples if example.kind == "two hops")


def test_worlds_ask_every_kind_of_every_context():
    kinds = Counter(example.kind for example in made("worlds", limit=30).examples)
    assert kinds.keys() == {"one hop", "two hops", "comparison", "list", "unanswerable"}
    assert min(kinds.values()) >= 3
    for example in made("worlds", limit=30, kinds="unanswerable").examples:
        assert (example.kind, example.needed) == ("unanswerable", ())


def test_worlds_take_the_kinds_and_the_split_that_are_asked_for(monkeypatch):
    task = made("worlds", kinds="two hops", split="train")
    assert {example.kind for example in task.examples} == {"two hops"}
    assert task.name.startswith("worlds(kinds=")
    heads = {chunk.split("\n")[0] for example in task.examples for chunk in example.chunks}
    heldout = {f"# {document.title}" for document in World.generate(0, split="heldout", size=24).documents}
    assert heads.isdisjoint(heldout)
    monkeypatch.setattr(catalog, "_WORLD_PATIENCE", 3)
    with pytest.raises(UsageError, match="two hops"):
        made("worlds", kinds="two hops", chunks=1)


def test_labels_of_shots_obey_one_rule():
    for example in made("icl", limit=12, shots=5, classes=4).examples:
        shots = re.findall(r"The (\w+) is [^.]*\.\nLabel: (\w+)", "\n\n".join(example.chunks))
        assert len(shots) == 40
        rule = dict(shots)
        assert all(rule[thing] == label for thing, label in shots)
        assert set(rule.values()) == set(example.classes)
        thing = example.question.split()[2]
        assert (thing in rule, example.kind) in ((True, "seen"), (False, "unseen"))
        assert rule.get(thing, example.answers[0]) == example.answers[0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wrolds", {}, "worlds, variables, icl"),
        ("worlds", {"size": 3}, "chunks, split, kinds"),
        ("worlds", {"split": "test"}, "train, heldout"),
        ("icl", {"shots": "four"}, "int"),
        ("icl", {"shots": True}, "int"),
        ("icl", {"classes": 1}, "from 2 to"),
        ("worlds", {"chunks": 0}, "chunks"),
    ],
)
def test_what_cannot_be_is_refused(name, options, message):
    with pytest.raises(UsageError, match=message):
        make_task(Spec(name, options), seed=0, limit=2, chunks=8)


def test_variables_are_asked_for_by_what_their_line_says():
    for kind in ("value", "reference"):
        task = made("variables", limit=30, chunks=1, words=512, kind=kind)
        for example in task.examples:
            [text] = example.chunks
            assert 505 <= len(text.split()) <= 512
            name = example.question.removeprefix("?")
            [content] = re.findall(rf"(?<!=)\b{name} (=?\w+)", text)  # once
            assert (content == example.answers[0]) == (kind == "value")
            if kind == "reference":
                assert f"{content.removeprefix('=')} {example.answers[0]} " in text


@pytest.mark.parametrize(
    ("chunks", "words", "bounds"), [(1, 119, "120 to 570"), (1, 571, "120 to 570"), (99, 3, "at least 4")]
)
def test_lists_of_variables_are_neither_too_short_nor_longer_than_names_suffice(chunks, words, bounds):
    with pytest.raises(UsageError, match=bounds):
        made("variables", chunks=chunks, words=words)


KINDS = get_args(QuestionKind)
SENTENCES = {line for document in World.generate(0, split="heldout", size=24).documents for line in document.sentences}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [8, 33])
def test_questions_of_every_kind(kind, chunks):
    task = passages(kind=kind, chunks=chunks, limit=10)
    assert task == passages(kind=kind, chunks=chunks, limit=10)
    assert len(task.examples) == 10
    assert {example.kind for example in task.examples} == {kind}
    for example in task.examples:
        assert len(set(example.chunks)) == chunks
        evidence = " ".join(example.chunks[at] for at in example.needed)
        if kind == "unanswerable":
            assert not evidence
        elif kind == "comparison":
            assert 1 <= len(example.needed) <= 2
        else:
            assert all(answer in evidence for answer in example.answers)
            assert len(example.needed) <= 2 or kind == "list"
        assert score(task.metric, ". ".join(example.answers), example) == 1


def test_a_context_has_several_questions():
    by: dict[tuple[str, ...], set[str]] = {}
    for example in passages(limit=12, per_context=4).examples:
        by.setdefault(example.chunks, set()).add(example.question)
    assert [len(asked) for asked in by.values()] == [4, 4, 4]


@pytest.mark.parametrize("kind", ["one hop", "two hops", "comparison"])
def test_contexts_of_one_pool_hold_each_other(kind):
    small, large, whole = (passages(kind=kind, chunks=size, pool=64, limit=8) for size in (8, 32, 64))
    for few, more, most in zip(small.examples, large.examples, whole.examples, strict=True):
        assert (few.example_id, few.question) == (more.example_id, more.question) == (most.example_id, most.question)
        assert set(few.chunks) < set(more.chunks) < set(most.chunks)
        assert {few.chunks[at] for at in few.needed} <= {more.chunks[at] for at in more.needed}


def test_passages_are_of_the_split():
    train, heldout = (passages(limit=4, split=split).examples[0].chunks for split in ("train", "heldout"))
    assert not set(train) & set(heldout)
    assert any(line in chunk for line in SENTENCES for chunk in heldout)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunks": 0}, "chunks of the task must be"),
        ({"chunks": 9, "pool": 8}, "pool of the task must be from 9"),
        ({"limit": 0}, "limit of the task"),
        ({"chunks": 1, "kind": "two hops"}, "no question of kind two hops can be asked of 1 chunks"),
    ],
)
def test_bad_sizes(settings, message):
    with pytest.raises(UsageError, match=message):
        passages(**settings)
