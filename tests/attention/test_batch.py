"""Rows of one step with different chunks, read in place or laid out, against one dense forward pass per row.

Rows have their own groups besides the shared ones and different positions, and chunks are moved.
"""

from __future__ import annotations

import functools

import oracle
import pytest
import torch

from ragkv.attention.batch import SequenceSlice, prefill_batches
from ragkv.attention.kv import PlacedChunk
from ragkv.attention.sequence import ChunkGroup, TokenSequence
from ragkv.runtime.batch_executor import ContextLayout

BLOCKS = {
    "a": [0, 41, 42, 43, 44],
    "b": [50 + i for i in range(9)],
    "c": [70, 71, 72],
    "d": [80 + i for i in range(11)],
    "e": [95, 96],
}
QUESTIONS = [[100, 101, 102], [110, 111, 112], [120, 121, 122], [130, 131, 132]]
FAMILIES = ["llama-yarn", "gemma2", "gemma2-unwindowed", "gemma3", "mistral-sliding", "smollm3"]


@functools.cache
class Library:
    """Each block encoded alone, once per model."""

    def __init__(self, model):
        self._kvs = dict(zip(BLOCKS, model.encode(list(BLOCKS.values())), strict=True))

    def placed(self, names, start=0):
        """The blocks in sequence from `start`."""
        found = []
        for name in names:
            found.append(PlacedChunk(kv=self._kvs[name], start=start))
            start = found[-1].end
        return tuple(found)

    def rows(self, shared, own):
        """One row per entry of `own`: a group for each of the `shared` blocks, then its own groups, as strings of block
        names.
        """
        rows = []
        for groups in own:
            found, at = [], 0
            for names in (*shared, *groups):
                found.append(ChunkGroup(segments=self.placed(names, at)))
                at = found[-1].segments[-1].end
            rows.append(TokenSequence(tuple(found), at))
        return rows


def logits(model, rows, *, settled):
    """Logits of every row's question, `(rows, n, vocab)`; its first token is read in a separate step, in place."""
    questions = QUESTIONS[: len(rows)]
    first = model.step(rows, [ids[:1] for ids in questions], every=True)
    if settled:
        ContextLayout().lay_out(rows, rows, model.rotary, windowed=bool(model.windows))
    rest = model.step(rows, [ids[1:] for ids in questions], every=True)
    return torch.cat([first[:, None], rest.view(len(rows), 2, -1)], 1)


@functools.cache
def truth(model, names, row):
    """A row's logits after these blocks, cached for several layouts and ways of reading."""
    with model.plain() as plain:
        return oracle.reading(plain, [], [BLOCKS[name] for name in names], QUESTIONS[row])


def expected(model, shared, own):
    return torch.stack([truth(model, shared + "".join(groups), row) for row, groups in enumerate(own)])


def same(found, truth):
    torch.testing.assert_close(found, truth, atol=3e-5 * float(truth.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("settled", "kernel"),
    [
        (False, True),
        (True, False),
        (False, False),
        pytest.param(True, True, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(
    ("shared", "own"),
    [
        ("ab", [["c"], [], ["c", "d"]]),  # two groups in a row; neither the first nor the last is the highest or lowest
        ("ab", [[], ["cd"], ["e"]]),  # two chunks in one group
        ("ab", [["d"], ["c"], ["b"], ["e"]]),
        ("ab", [["c"], [], ["d"], ["e"]]),  # a row without chunks of its own between two others
        ("ab", [["cd"], ["dc"], ["ecd"], ["ce"]]),  # the same chunks at different offsets, read once for all
        ("ab", [["cc"], ["c"], [], ["ccc"]]),  # one chunk at several positions of a row
        ("ab", [[], [], []]),
        ("", [["a"], ["c"], ["b"], ["e"]]),
        ("", [["a"], [], ["b"], ["d"]]),  # one row sees nothing at all, at position 0
        ("", [["a"], ["cd"], ["b"]]),
        ("", [["d"], ["d"], ["bd"]]),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_see_the_shared_chunks_and_their_own(family, shared, own, settled, kernel, make_model, request):
    if not kernel:
        request.getfixturevalue("without_kernel")
    model = make_model(family)
    same(logits(model, Library(model).rows(shared, own), settled=settled), expected(model, shared, own))


@pytest.mark.parametrize("weights", [{"temperature": 0.5}, {"scale": 0.7}])
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("kernel", [True, False])
def test_a_weighed_group_of_a_row_keeps_its_weight(weights, settled, kernel, make_model, request):
    """Beside rows with other weights, and rows that read the same chunks without a weight."""
    if not kernel:
        request.getfixturevalue("without_kernel")
    model = make_model("llama")
    library = Library(model)

    def rows(*chosen):
        found = [
            TokenSequence((ChunkGroup(segments=library.placed("ab"), **weights),), 14),
            TokenSequence((ChunkGroup(segments=library.placed("ab")),), 14),
            TokenSequence(
                (ChunkGroup(segments=library.placed("ab"), temperature=0.8, scale=0.3, scale_mode="log"),), 14
            ),
            TokenSequence(
                (ChunkGroup(segments=library.placed("c")), ChunkGroup(segments=library.placed("ab", 3), **weights)), 17
            ),
        ]
        return [found[i] for i in chosen]

    together = logits(model, rows(0, 1, 2, 3), settled=settled)
    for index in range(4):
        [row] = rows(index)
        first = model.step([row], [QUESTIONS[index][:1]], every=True)
        rest = model.step([row], [QUESTIONS[index][1:]], every=True)
        same(together[index], torch.cat([first, rest]))
    same(together[1], expected(model, "ab", [[], []])[1])
    for other in (0, 2):
        assert not torch.allclose(together[other], together[1], atol=1e-3)


CPU = torch.device("cpu")
PREFIX = [0, 41, 42, 43, 44, 45]
LENGTHS = [5, 1, 4, 17, 5, 2, 16]


def slices(counts, rows=None):
    rows = rows or [TokenSequence((), 0) for _ in counts]
    return [
        SequenceSlice(sequence=row, start=sum(counts[:i]), n=n)
        for i, (row, n) in enumerate(zip(rows, counts, strict=True))
    ]


def batches_of(counts, *, window=None, rows=None):
    """The lengths in each batch, and those of the chunks that are read alone."""
    batches, alone = prefill_batches(slices(counts, rows), window, CPU)
    return [[span.n for span in batch._spans] for batch in batches], [span.n for span in alone]


def test_rows_of_about_one_length_are_read_together_and_others_alone():
    assert batches_of([5, 17, 4, 16, 5]) == ([[17, 16], [5, 5, 4]], [])
    assert batches_of([5, 40, 5]) == ([[5, 5]], [40])
    assert batches_of([1, 1, 513, 513]) == ([], [1, 1, 513, 513])
    assert batches_of([9, 9, 8, 8], window=8) == ([[8, 8]], [9, 9])


def test_rows_that_hold_tokens_are_read_alone():
    held = TokenSequence((), 0)
    held.cache.commit(3)
    assert batches_of([4, 4, 4], rows=[held, TokenSequence((), 0), TokenSequence((), 0)]) == ([[4, 4]], [4])


@pytest.mark.parametrize("family", ["llama-yarn", "gemma2", "mistral-sliding", "smollm3"])
@pytest.mark.parametrize("lengths", [LENGTHS, [6, 6, 6]], ids=["mixed", "equal"])
def test_the_logits_are_those_of_each_row_alone(make_model, family, lengths):
    model = make_model(family)
    [kv] = model.encode([PREFIX])
    questions = [[100 + 7 * i + j for j in range(n)] for i, n in enumerate(lengths)]

    def rows():
        return [TokenSequence.over((PlacedChunk(kv=kv, start=0),), position=len(PREFIX)) for _ in questions]

    together = model.step(rows(), questions, every=True)
    alone = torch.cat([model.step([row], [ids], every=True) for row, ids in zip(rows(), questions, strict=True)])
    with model.plain() as plain:
        right = torch.cat([oracle.reading(plain, PREFIX, [], ids) for ids in questions])
    same(together, right)
    same(alone, right)
