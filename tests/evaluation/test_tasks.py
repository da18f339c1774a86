"""Generated tasks have the answers that their chunks state, and are reproduced from their seed."""

import re
from collections import Counter
from typing import get_args

import pytest

from ragkv.benchmarks.evaluation.tasks import catalog
from ragkv.benchmarks.evaluation.tasks.catalog import TASKS, described, make_task, passages
from ragkv.benchmarks.evaluation.worlds.world import QuestionKind, World
from ragkv.doctor.io import Spec
from ragkv.doctor.metrics import score
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
        if name.startswith(("niah", "secret", "vt")) or "hop" in example.kind or example.kind == "list":
            assert all(answer in evidence for answer in example.answers)
    assert {about for task_name, about, _ in described() if task_name == name} != {""}


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


def test_needles_stand_once_and_in_the_order_of_the_chain():
    for example in made("niah_single_1", limit=20).examples:
        assert "\n".join(example.chunks).count("magic") == 1
    for example in made("vt", limit=20, chunks=2, hops=9).examples:
        lines = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", "\n".join(example.chunks))
        assert tuple(name for name, _ in lines) == example.answers
        assert [value for _, value in lines[1:]] == list(example.answers[:-1])
        assert lines[0][1] in example.question


@pytest.mark.parametrize(("chunks", "times"), [(8, 30), (2, 7), (40, 30)])
def test_common_words_are_the_ten_most_common(chunks, times):
    for example in made("cwe", limit=3, chunks=chunks).examples:
        found = re.findall(r"(\d+)\. (\S+)", " ".join(example.chunks))
        assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
        counts = Counter(word for _, word in found)
        assert {word for word, _ in counts.most_common(10)} == set(example.answers)
        assert set(counts.values()) == {times, 3}


def test_frequent_words_follow_a_zeta_law():
    for example in made("fwe", limit=5).examples:
        counts = Counter(" ".join(example.chunks).split()).most_common(5)
        assert counts[0][0] == "..."
        assert tuple(word for word, _ in counts[1:4]) == example.answers
        assert [count for _, count in counts] == [int(480 * 6 / 3.141592653589793**2 / rank**2) for rank in range(1, 6)]


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
        ("wrolds", {}, "worlds, cloze, secret-code"),
        ("worlds", {"size": 3}, "chunks, split, kinds"),
        ("worlds", {"split": "test"}, "train, heldout"),
        ("vt", {"hops": "four"}, "int"),
        ("vt", {"hops": True}, "int"),
        ("vt", {"hops": 0}, "from 1 to 100"),
        ("fwe", {"alpha": 1}, "alpha"),
        ("fwe", {"words": 1}, "fwe"),
        ("cwe", {"words": 2}, "cwe"),
        ("worlds", {"chunks": 0}, "chunks"),
    ],
)
def test_what_cannot_be_is_refused(name, options, message):
    with pytest.raises(UsageError, match=message):
        make_task(Spec(name, options), seed=0, limit=2, chunks=8)


def test_cloze_asks_for_words_of_one_chunk_of_a_folder(tmp_path):
    (tmp_path / "a.md").write_text("# Pumps\n\nThe old pump in the yard lifts water from the deep well.\n\n")
    sentence = "A careful keeper writes every broken lamp into the harbour book."
    (tmp_path / "b.txt").write_text(f"{sentence}\n\nshort\n")
    task = made("cloze", chunks=2, limit=3, folder=str(tmp_path), words=20)
    for example in task.examples:
        [at] = example.needed
        assert any(
            text in example.chunks[at]
            for text in (sentence, "The old pump in the yard lifts water from the deep well.")
        )
        assert example.answers[0] in example.chunks[at]
        assert example.answers[0] not in example.question
    with pytest.raises(UsageError, match="too little"):
        made("cloze", chunks=90, folder=str(tmp_path))
    with pytest.raises(UsageError, match="holds no"):
        made("cloze", folder=str(tmp_path / "nowhere"))


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
