"""Answering over chunks that lie on several ranks: what one process answers, the same bits on all of them."""

from __future__ import annotations

from dataclasses import replace

import asking
import pytest
import torch
from rankthreads import on_ranks

from ragkv.attention.kv import ChunkKV
from ragkv.engines import make_engine
from ragkv.runtime import Runtime, Stream

STEPS = 4
ENGINES = {
    "block": {},
    "ape": {"temperature": 0.7, "scale": 0.8},
    "pced": {},
}
CHUNKS = [*asking.CHUNKS, [90, 91, 92, 93, 94], [100 + i for i in range(21)]]
SCORES = [0.31, 0.82, 0.57, 0.12, 0.44]


def shared_out(request, owners, rank):
    """The request as `rank` has it: the chunks of other ranks are only told of."""

    def seen(chunk, owner):
        kv = chunk.kv
        if owner == rank:
            return replace(chunk, kv=replace(kv, owner=rank))
        elsewhere = ChunkKV.elsewhere(owner=owner, layers=kv.layers, tokens=kv.tokens, encoded_at=kv.encoded_at)
        return replace(chunk, kv=elsewhere)

    return replace(request, chunks=tuple(seen(c, o) for c, o in zip(request.chunks, owners, strict=True)))


def led(runtime, engine, request):
    """Greedy ids, winners and every step's scores, end tokens not heeded."""
    stream, ids, winners, scores = Stream(runtime, engine, request), [], [], []
    for _ in range(STEPS):
        scores.append(stream.scores.clone())
        ids.append(stream.best())
        winners.append(stream.winner(ids[-1]))
        stream.advance(ids[-1])
    return ids, winners, torch.stack(scores)


def compare(model, size, owners, names=tuple(ENGINES)):
    for name in names:
        engine = make_engine(name, {name: ENGINES[name]})
        whole = asking.request(model, engine, chunks=CHUNKS, scores=SCORES)
        wanted = led(Runtime(model), engine, whole)

        def work(group, engine=engine, whole=whole):
            runtime = Runtime(model, ranks=group)
            return led(runtime, engine, shared_out(whole, owners, group.rank)), group.sent

        found = on_ranks(size, work)
        for (ids, winners, scores), _ in found:
            assert ids == wanted[0]
            assert winners == wanted[1]
            assert torch.equal(scores, found[0][0][2])  # bit for bit
            assert (scores - wanted[2]).abs().max() < 1e-5 * max(1.0, float(wanted[2].abs().max()))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_answers_over_ranks_are_those_of_one_process(make_model, family):
    compare(make_model(family), 3, [2, 0, 2, 0, 2])  # rank 1 holds nothing


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma2", "mistral-sliding", "cohere2", "deepseek3"])
@pytest.mark.parametrize(
    ("size", "owners"),
    [(1, [0] * 5), (2, [1] * 5), (2, [0, 1, 0, 1, 0]), (4, [3, 2, 1, 0, 3]), (4, [3, 3, 3, 3, 1])],
)
def test_answers_over_any_ranks(make_model, family, size, owners):
    compare(make_model(family), size, owners)
