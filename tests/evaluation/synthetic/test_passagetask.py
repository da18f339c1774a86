"""Passages of worlds: contexts hold each other, questions are shared, evidence stands there."""

from __future__ import annotations

from typing import get_args

import pytest

from ragkv.errors import UsageError
from ragkv.evaluation.metric import score
from ragkv.evaluation.synthetic.passagetask import passages
from ragkv.worlds import QuestionKind, World

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


def test_order_says_nothing():
    places = {example.needed[0] for example in passages(chunks=16, limit=40).examples}
    assert len(places) > 8  # the evidence may stand anywhere


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
