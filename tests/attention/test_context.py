"""A batch whose rows see different chunks, read where they lie or laid out, against one dense forward per row.

Rows have groups of their own beside the shared ones, stand at different positions, and chunks are moved.
"""

from __future__ import annotations

import oracle
import pytest
import torch

from ragkv.attention.context import Context, ContextGroup
from ragkv.attention.kv import PlacedKV
from ragkv.attention.settle import LONG, settle

BLOCKS = {
    "a": [0, 41, 42, 43, 44],
    "b": [50 + i for i in range(9)],
    "c": [70, 71, 72],
    "d": [80 + i for i in range(11)],
    "e": [95, 96],
}
QUESTIONS = [[100, 101, 102], [110, 111, 112], [120, 121, 122], [130, 131, 132]]
FAMILIES = ["llama-yarn", "gemma2", "gemma2-unwindowed", "gemma3", "mistral-sliding", "smollm3"]


def placed(model, names, start=0):
    """The blocks, each encoded alone, one after another from `start`."""
    found = []
    for name in names:
        [kv] = model.encode([BLOCKS[name]])
        found.append(PlacedKV(kv=kv, start=start))
        start += kv.tokens
    return tuple(found)


def contexts(model, shared, rows):
    """`shared` blocks under one group each, then of every row its groups, each a string of block names."""
    groups = []
    at = 0
    for name in shared:
        groups.append(ContextGroup(chunks=placed(model, name, at)))
        at += len(BLOCKS[name])
    ends = []
    for row, own in enumerate(rows):
        end = at
        for names in own:
            groups.append(ContextGroup(chunks=placed(model, names, end), row=row))
            end += sum(len(BLOCKS[name]) for name in names)
        ends.append(end)
    return Context(groups=tuple(groups)), ends


def logits(model, context, ends, *, settled):
    """Of every row's question, `(rows, n, vocab)`; its first token is read in a pass of its own, in place."""
    questions = torch.tensor(QUESTIONS[: len(ends)])
    positions = torch.tensor(ends)[:, None] + torch.arange(3)
    own = model.own()
    first = model.forward(questions[:, :1], positions[:, :1], context=context, own=own, every=True)
    if settled:
        context = settle(context, model.rotary, windowed=bool(model.windows))
    rest = model.forward(questions[:, 1:], positions[:, 1:], context=context, own=own, every=True)
    return torch.cat([first, rest], 1)


def expected(model, shared, rows):
    with model.plain() as plain:
        plain.set_attn_implementation("ragkv-oracle")
        return torch.stack(
            [
                oracle.reading(plain, [BLOCKS[name] for name in (*shared, *"".join(own))], question)
                for own, question in zip(rows, QUESTIONS, strict=False)
            ]
        )


def same(found, truth):
    torch.testing.assert_close(found, truth, atol=3e-5 * float(truth.abs().max()), rtol=0)


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        [["c"], [], ["c", "d"]],  # two groups in one row; the highest and the lowest row are neither first nor last
        [[], ["cd"], ["e"]],  # two chunks in one group
        [["d"], ["c"], ["b"], ["e"]],  # what can be laid side by side but for being moved
        [["c"], [], ["d"], ["e"]],  # a row between two that sees nothing of its own
        [[], [], []],
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_see_the_shared_chunks_and_their_own(family, rows, settled, make_model):
    model = make_model(family)
    context, ends = contexts(model, "ab", rows)
    same(logits(model, context, ends, settled=settled), expected(model, "ab", rows))


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize(
    ("rows", "backwards"),
    [
        ([["a"], ["c"], ["b"], ["e"]], False),
        ([["a"], [], ["b"], ["d"]], False),
        ([["a"], ["c"], ["b"]], True),
        ([["a"], ["cd"], ["b"]], False),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama-yarn", "gemma2-unwindowed", "mistral-sliding"])
def test_rows_that_see_nothing_shared(family, rows, backwards, settled, make_model):
    """Chunks from position 0, which nobody moved: laid side by side where there is no window, some of them padded.

    Not where a row between two others sees nothing, where rows are given in another order, or one sees two chunks.
    """
    model = make_model(family)
    context, ends = contexts(model, "", rows)
    if backwards:
        context = Context(groups=context.groups[::-1])
    same(logits(model, context, ends, settled=settled), expected(model, "", rows))


def in_rows(model, names, *, first=0, start=0, **weights):
    """One unmoved chunk for each row from `first` on."""
    prefix = model.encode([[7] * start])[0] if start else None
    return tuple(
        ContextGroup(chunks=(PlacedKV(kv=kv, start=start),), row=row, **weights)
        for row, kv in enumerate(model.encode([BLOCKS[n] for n in names], prefix=prefix), first)
    )


@pytest.mark.parametrize("first", [0, 1, 2])
def test_rows_side_by_side_are_the_rows_that_were_given(first, make_model):
    """The rows before and after those that are laid side by side see nothing of them."""
    model = make_model("llama")
    context = Context(groups=in_rows(model, "abcd"[: 4 - first], first=first))
    [stack] = settle(context, model.rotary, windowed=False).stacks
    assert (stack.first, len(stack.keys[0])) == (first, 4 - first)
    rows = [[] for _ in range(first)] + [[n] for n in "abcd"[: 4 - first]]
    ends = [sum(len(BLOCKS[n]) for n in own) for own in rows]
    same(logits(model, context, ends, settled=True), expected(model, "", rows))


@pytest.mark.parametrize("weights", [{"temperature": 0.5}, {"scale": 0.7}])
def test_a_weighed_group_of_a_row_keeps_its_weight(weights, make_model):
    model = make_model("llama")
    context = Context(groups=in_rows(model, "abc", **weights))
    plain = Context(groups=in_rows(model, "abc"))
    ends = [len(BLOCKS[n]) for n in "abc"]
    found = logits(model, context, ends, settled=True)
    same(found, logits(model, context, ends, settled=False))
    assert not torch.allclose(found, logits(model, plain, ends, settled=False), atol=1e-3)


def test_what_was_laid_out_before_stays(make_model):
    """A context that is settled again, with more rows, loses none of what it has."""
    model = make_model("llama")
    once = settle(Context(groups=in_rows(model, "ab")), model.rotary, windowed=False)
    more = Context(groups=in_rows(model, "cd", first=2), stacks=once.stacks)
    twice = settle(more, model.rotary, windowed=False)
    rows = [["a"], ["b"], ["c"], ["d"]]
    ends = [len(BLOCKS[own]) for [own] in rows]
    same(logits(model, twice, ends, settled=False), expected(model, "", rows))
    same(logits(model, settle(twice, model.rotary, windowed=False), ends, settled=False), expected(model, "", rows))


def test_padding_never_doubles_the_memory(make_model):
    """Rows side by side are padded to the longest; very uneven ones, and long ones, are left as they are."""
    model = make_model("llama-long")
    kvs = model.encode([[5] * 40, [6], [7, 8], [9] * LONG, [4] * (LONG + 5)])

    def laid(*chosen):
        groups = tuple(ContextGroup(chunks=(PlacedKV(kv=kvs[i], start=0),), row=r) for r, i in enumerate(chosen))
        return settle(Context(groups=groups), model.rotary, windowed=False).stacks

    assert len(laid(0, 0, 1)) == 1
    assert laid(0, 1, 2) == ()
    assert laid(3, 4) == ()
