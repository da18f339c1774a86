"""APB's blocks on several ranks: those that one process encodes, bit for bit, and the same answers after them."""

from __future__ import annotations

import pytest
import torch
from rankthreads import on_ranks

from ragkv.attention.kv import Segment
from ragkv.attention.row import Row
from ragkv.distributed.lockstep import Lockstep
from ragkv.model.apb import Book, KeyNorm, Layout, Lengths, Random, Sequential
from ragkv.model.apb.book import question_score
from ragkv.model.apb.flops import Shape, passing_bytes
from ragkv.runtime.spread import step_across

PREFIX = (0, 45, 46, 47, 48)
QUESTION = (90, 91, 92, 93)
IDS = tuple(torch.randint(3, 259, (75,), generator=torch.Generator().manual_seed(3)).tolist())
CUT = Lengths(block=20, anchor=6, passing=4)  # four blocks, the last of 15 tokens


def book_of(model, cut=CUT, ids=IDS, compressor=None, asked=()):
    layout = Layout(tokens=len(ids), lengths=cut, start=len(PREFIX), question=len(asked))
    made = compressor or (KeyNorm() if model.checkpoint.name == "llama" else Random(seed=5))
    return Book(
        model=model, layout=layout, ids=ids, compressor=made, prefix=model.encode([PREFIX])[0], question_ids=asked
    )


def row_of(book, blocks):
    seen = [Segment(kv=book.prefix, start=0), *(Segment(kv=b.kv, start=b.kv.encoded_at) for b in blocks)]
    return Row.over(seen, position=book.layout.end)


def compare(book, size, known=()):
    oracle = list(Sequential().run(book))
    wanted = book.model.step([row_of(book, oracle)], [QUESTION])

    def work(group):
        lockstep = Lockstep(group)
        blocks = list(lockstep.run(book, {h: oracle[h] for h in known}))
        return blocks, lockstep.passed, step_across(book.model, [row_of(book, blocks)], [QUESTION], group)

    found = on_ranks(size, work)
    for h, block in enumerate(oracle):
        for rank, (blocks, _, _) in enumerate(found):
            assert len(blocks) == len(oracle)
            assert blocks[h].kv.here == (rank == h % size)
            assert (blocks[h].kv.tokens, blocks[h].kv.encoded_at) == (block.kv.tokens, block.kv.encoded_at)
        mine = found[h % size][0][h]
        assert all(torch.equal(one, other) for one, other in zip(mine.kv.tensors, block.kv.tensors, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(mine.chosen, block.chosen, strict=True))
    for _, _, logits in found:
        assert torch.equal(logits, found[0][2])
        assert (logits - wanted).abs().max() < 1e-5
    return [passed for _, passed, _ in found]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_blocks_on_ranks_are_those_of_one_process(make_model, family):
    book = book_of(make_model(family))
    each = passing_bytes(Shape.of(book.model.config), book.layout, 4)
    assert compare(book, 3) == [2 * each, each, each]  # more blocks than ranks: 4 on 3


def test_known_blocks_are_not_encoded_again_but_passed_on(make_model, monkeypatch):
    book, encoded = book_of(make_model("llama")), []
    encode = Book.encode
    list(Sequential().run(book))
    compare(book, 2, known=(0, 1, 2))
    monkeypatch.setattr(Book, "encode", lambda self, block, *rest: encoded.append(block) or encode(self, block, *rest))
    oracle = list(Sequential().run(book))
    encoded.clear()
    on_ranks(2, lambda group: list(Lockstep(group).run(book, dict(enumerate(oracle[:3])))))
    assert encoded == [3]


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma2", "mistral-sliding"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("cut", "tokens"),
    [
        (CUT, 61),  # one token in the last block
        (CUT, 20),  # one block: all ranks but the first are empty
        (Lengths(block=20, anchor=6, passing=18), 47),
        (Lengths(block=16, anchor=16, passing=5), 75),  # block 0 passes nothing on
        (Lengths(block=16, anchor=16, passing=0), 75),  # Star
    ],
)
def test_blocks_of_any_cut_on_any_ranks(make_model, family, size, cut, tokens):
    compare(book_of(make_model(family), cut, IDS[:tokens]), size)


@pytest.mark.nightly
def test_blocks_that_know_the_question(make_model):
    model = make_model("llama")
    prefix = model.encode([PREFIX])[0]
    compressor = question_score(model, QUESTION, prefix, position=len(PREFIX) + len(IDS))
    compare(book_of(model, compressor=compressor, asked=QUESTION), 3)
