"""Forward passes in captured pieces, which the processor records (`support/recordedgraph.py`), and on a GPU."""

from __future__ import annotations

from functools import cache

import pytest
import recordedgraph
import torch

from ragkv.attention.kv import PlacedChunk
from ragkv.attention.sequence import ChunkGroup, TokenSequence
from ragkv.runtime import cuda_graphs
from ragkv.runtime.cuda_graphs import PiecewiseGraphs


@pytest.fixture
def recorded(monkeypatch):
    recordedgraph.use(monkeypatch)


def passes(model):
    """Rows and their tokens, pass by pass: questions over chunks, and steps of several; some sizes recur."""
    chunks = model.encode([range(5, 14), range(20, 41), (7, 8)])

    def over(*which, start=3, temperature=1.0):
        placed, at = [], start
        for chunk in which:
            placed.append(PlacedChunk(kv=chunks[chunk], start=at))
            at += chunks[chunk].tokens
        return TokenSequence((ChunkGroup(segments=tuple(placed), temperature=temperature),), at)

    first, other = over(0, 1, 2), over(2, 1, start=9)
    yield [over(1, 0)], [range(40, 51)]
    yield [first], [range(60, 74)]
    yield [other], [range(30, 39)]
    yield [first, other], [(3,), (4,)]
    yield [first, other], [(5,), (6,)]
    yield [over(0, temperature=0.7), first], [(9, 8), (7,)]
    yield [other, first], [(1,), (2,)]
    third = over(1, temperature=0.7)
    yield [third], [range(50, 66)]
    yield [first, other, third], [(1,), (2,), (3,)]
    yield [other, third, first], [(4,), (5,), (6,)]


def compared(model, monkeypatch, close):
    """Of every pass, whether it ran in pieces; its logits are those of the model's kernels."""
    graphs, replays, replayed = PiecewiseGraphs(cache(cuda_graphs.Capture)), [], cuda_graphs._Captured.run
    monkeypatch.setattr(cuda_graphs._Captured, "run", lambda *given: replays.append(1) or replayed(*given))
    in_pieces, found, expected = [], [], []
    for (rows, ids), (others, _) in zip(passes(model), passes(model), strict=True):
        replays.clear()
        found.append(model.step(rows, ids, run=graphs.logits))
        expected.append(model.step(others, ids))
        in_pieces.append(bool(replays))
    torch.testing.assert_close(found, expected, **close)  # at the end: later passes change none of them
    return in_pieces


IN_PIECES = [False, True, True, False, True, False, True, True, False, True]


def test_a_pass_in_pieces_computes_what_its_kernels_do(unlike_family, make_model, recorded, monkeypatch):
    assert compared(make_model(unlike_family), monkeypatch, {"atol": 1e-5, "rtol": 1e-5}) == IN_PIECES


def test_a_pass_of_many_tokens_is_not_captured(make_model, recorded, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "SIZES", (1, 2, 4, 8))
    assert compared(make_model("llama"), monkeypatch, {}) == [False] * 4 + [True, False, True, False, False, True]


def test_a_model_that_cannot_be_captured_runs_as_before(make_model, recorded, monkeypatch, caplog):
    def refused(self):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recordedgraph.RecordedCapture, "begin", refused)
    caplog.set_level("INFO")
    assert not any(compared(make_model("llama"), monkeypatch, {}))
    assert [record.getMessage() for record in caplog.records if "kernel by kernel" in record.getMessage()] == [
        "passes of this model run kernel by kernel: they cannot be captured: "
        "operation not permitted when stream is capturing"
    ]  # once


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek3"])
def test_a_pass_in_pieces_on_a_gpu_computes_what_its_kernels_do(family, make_model, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = make_model(family, "float32", "cuda")
    assert compared(model, monkeypatch, {"atol": 1e-3, "rtol": 1e-3}) == IN_PIECES
