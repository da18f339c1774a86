"""Rows that read their first tokens together, against the same rows one at a time and one dense forward per row."""

from __future__ import annotations

import oracle
import pytest
import torch

from ragkv.attention.fresh import fresh_of
from ragkv.attention.kv import Segment
from ragkv.attention.reading import Piece
from ragkv.attention.row import Row
from ragkv.attention.stack import Mark, Stack

CPU = torch.device("cpu")
BLOCK = [0, 41, 42, 43, 44, 45]
LENGTHS = [5, 1, 4, 17, 5, 2, 16]


def pieces(counts, rows=None):
    rows = rows or [Row((), 0) for _ in counts]
    return [Piece(row=row, at=sum(counts[:i]), n=n) for i, (row, n) in enumerate(zip(rows, counts, strict=True))]


def found(counts, *, window=None, rows=None):
    """The lengths in each batch, and of those that are read alone."""
    batches, alone = fresh_of(pieces(counts, rows), window, CPU)
    return [[piece.n for piece in batch._pieces] for batch in batches], [piece.n for piece in alone]


def test_rows_of_about_one_length_are_read_together():
    assert found([5, 17, 4, 16, 5]) == ([[17, 16], [5, 5, 4]], [])


def test_a_row_unlike_the_others_is_read_alone():
    assert found([5, 40, 5]) == ([[5, 5]], [40])


def test_single_tokens_long_rows_and_rows_longer_than_a_window_are_read_alone():
    assert found([1, 1, 513, 513]) == ([], [1, 1, 513, 513])
    assert found([9, 9, 8, 8], window=8) == ([[8, 8]], [9, 9])


def test_rows_that_hold_tokens_and_stacks_are_read_alone():
    held = Row((), 0)
    held.own.commit(3)
    stack = Stack((), 0, marks=[Mark(i) for i in range(4)])
    assert found([4, 4, 4, 4], rows=[stack, held, Row((), 0), Row((), 0)]) == ([[4, 4]], [4, 4])


@pytest.mark.parametrize("family", ["llama-yarn", "gemma2", "mistral-sliding", "smollm3"])
@pytest.mark.parametrize("lengths", [LENGTHS, [6, 6, 6]], ids=["mixed", "equal"])
def test_the_logits_are_those_of_each_row_alone(make_model, family, lengths):
    model = make_model(family)
    [kv] = model.encode([BLOCK])
    questions = [[100 + 7 * i + j for j in range(n)] for i, n in enumerate(lengths)]

    def rows():
        return [Row.over((Segment(kv=kv, start=0),), position=len(BLOCK)) for _ in questions]

    together = model.step(rows(), questions, every=True)
    alone = torch.cat([model.step([row], [ids], every=True) for row, ids in zip(rows(), questions, strict=True)])
    with model.plain() as plain:
        plain.set_attn_implementation("ragkv-oracle")
        truth = torch.cat([oracle.reading(plain, [BLOCK], ids) for ids in questions])
    for each in (together, alone):
        torch.testing.assert_close(each, truth, atol=3e-5 * float(truth.abs().max()), rtol=0)
