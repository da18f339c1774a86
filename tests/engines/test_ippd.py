"""IPPD: many questions about one context at once, with the numbers of `full` asked one by one."""

from __future__ import annotations

import pytest
import torch
from asking import CHUNKS, CONTEXTS, PREFIX, QUESTIONS, request, requests

from ragkv.attention.kv import ChunkKV, Segment
from ragkv.attention.ownkv import OwnKV
from ragkv.attention.slab import SlabKV
from ragkv.engines import Choose, Read, Request, Shared, make_engine
from ragkv.runtime import Generation, Runtime, Stream, runtime_of

GREEDY = Generation(max_new_tokens=5)


def _answers(model, name, runtime=None):
    """Greedy tokens of all questions, asked at once."""
    engine, runtime = make_engine(name, {}), runtime or runtime_of(model)
    jobs = [runtime.submit(engine, each, GREEDY) for each in requests(model, engine)]
    return [[token.token_id for token in runtime.tokens(job)] for job in jobs]


def _one_by_one(model, name):
    engine, runtime = make_engine(name, {}), runtime_of(model)
    return [[t.token_id for t in runtime.decode(engine, each, GREEDY)] for each in requests(model, engine)]


def test_all_at_once_are_the_answers_of_full_one_by_one(family, make_model):
    model = make_model(family)
    assert _answers(model, "ippd") == _one_by_one(model, "full")


def test_the_scores_are_those_of_full(family, make_model):
    model = make_model(family)
    ippd, full = make_engine("ippd", {}), make_engine("full", {})
    streams = [Stream(runtime_of(model), ippd, each) for each in requests(model, ippd)]
    for each, stream in zip(requests(model, full), streams, strict=True):
        yardstick = Stream(runtime_of(model), full, each)
        for token in (90, 91, 92):
            torch.testing.assert_close(stream.scores, yardstick.scores, rtol=1e-4, atol=1e-4)
            yardstick.advance(token)
            stream.advance(token)


def test_instruction_and_contexts_are_read_once(make_model, monkeypatch):
    model, read = make_model("llama"), []
    step = model.step

    def counted(rows, ids, **options):
        read.extend(ids)
        return step(rows, ids, **options)

    monkeypatch.setattr(model, "step", counted)
    _answers(model, "ippd", Runtime(model))
    whole = [tuple(i for chunk in chunks for i in chunk) for chunks in CONTEXTS]
    long = [tuple(ids) for ids in read if len(ids) > 1]
    assert long.count(tuple(PREFIX)) == 1
    assert [long.count(each) for each in whole] == [1, 1]
    asked = [tuple(ids) for ids in QUESTIONS for _ in CONTEXTS if len(ids) > 1]
    assert sorted(long) == sorted([tuple(PREFIX), *whole, *asked])


def test_what_is_shared_takes_no_place_beside_the_questions(make_model, monkeypatch):
    """Room for many rows as long as a context would be made, and filled with zeros, for the one row that reads it."""
    model, own = make_model("llama"), {}
    step = model.step

    def watched(rows, ids, **options):
        own.update({tuple(each): type(row.own) for row, each in zip(rows, ids, strict=True) if len(each) > 1})
        return step(rows, ids, **options)

    monkeypatch.setattr(model, "step", watched)
    _answers(model, "ippd", Runtime(model))
    assert own.pop(tuple(PREFIX)) is OwnKV
    assert all(own.pop(tuple(i for chunk in chunks for i in chunk)) is OwnKV for chunks in CONTEXTS)
    assert set(own.values()) == {SlabKV}


def test_the_program_without_a_model():
    kv = ChunkKV(keys=(torch.zeros(1, 5, 4),), values=(torch.zeros(1, 5, 4),))
    wanted = Request(prefix_ids=(1, 2), chunks=(), suffix_ids=(8, 9))
    program = make_engine("ippd", {}).program(wanted, None)
    asked = next(program)
    assert isinstance(asked, Shared)
    assert asked.parts == ((1, 2), ())
    read = program.send((Segment(kv=kv, start=0),))
    assert isinstance(read, Read)
    assert (read.rows[0].position, list(read.ids)) == (5, [(8, 9)])
    choose = program.send(torch.eye(10)[3:4])
    assert isinstance(choose, Choose)
    assert list(program.send(int(choose.best())).ids) == [(3,)]


@pytest.mark.parametrize("prefix", [[], PREFIX])
def test_without_a_context_the_instruction_is_all(prefix, make_model):
    model = make_model("llama")
    found = []
    for name in ("ippd", "full"):
        wanted = request(model, make_engine(name, {}), chunks=[], scores=[], prefix=prefix)
        found.append([t.token_id for t in runtime_of(model).decode(make_engine(name, {}), wanted, GREEDY)])
    assert found[0] == found[1]


def test_a_shared_sequence_counts_once():
    engine = make_engine("ippd", {})
    chunks = request(None, make_engine("full", {})).chunks
    one, two = (Request(prefix_ids=(1, 2), chunks=chunks, suffix_ids=ids) for ids in ((3,), (4, 5)))
    assert engine.demand(one, 4).tokens == 5
    assert engine.demand(one, 4).shared == engine.demand(two, 4).shared
    assert list(engine.demand(one, 4).shared.values()) == [2, sum(map(len, CHUNKS))]
    other = Request(prefix_ids=(1, 2), chunks=chunks[:1], suffix_ids=(3,))
    assert len(engine.demand(one, 4).shared.keys() & engine.demand(other, 4).shared.keys()) == 1
