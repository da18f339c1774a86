"""Chunks, shards of an index, and APB's blocks on several ranks; the answers equal those of one process."""

from dataclasses import replace
from pathlib import Path

import asking
import pytest
import torch
from longbook import CHUNK, LENGTHS, tiny_model
from longbook import book as long_text
from rankthreads import on_ranks

from ragkv import RagKV
from ragkv.attention.kv import ChunkKV, PlacedChunk
from ragkv.attention.sequence import TokenSequence
from ragkv.distributed import sharding
from ragkv.distributed.session import IndexRankBackend
from ragkv.distributed.sharding import RankExecutor
from ragkv.engines import make_engine
from ragkv.errors import PromptTooLongError, UsageError
from ragkv.index.answer import AnswerStream, validate_task
from ragkv.model.apb.compressors import KeyNorm, Random
from ragkv.model.apb.document import (
    BlockLayout,
    BlockLengths,
    LongDocument,
    SequentialExecutor,
    query_aware_compressor,
)
from ragkv.model.language_model import LanguageModel
from ragkv.runtime import Runtime, Stream
from ragkv.runtime.step import step_across
from ragkv.types import Encoding

STEPS = 4
ENGINES = {
    "block": {},
    "ape": {"temperature": 0.7, "scale": 0.8},
    "pced": {},
}
CHUNKS = [*asking.CHUNKS, [90, 91, 92, 93, 94], [100 + i for i in range(21)]]
SCORES = [0.31, 0.82, 0.57, 0.12, 0.44]


def shared_out(request, owners, rank):
    """The request of `rank`: for other ranks' chunks it only has the lengths."""

    def seen(chunk, owner):
        kv = chunk.kv
        if owner == rank:
            return replace(chunk, kv=replace(kv, owner=rank))
        elsewhere = ChunkKV.elsewhere(owner=owner, layers=kv.layers, tokens=kv.tokens, encoded_at=kv.encoded_at)
        return replace(chunk, kv=elsewhere)

    return replace(request, chunks=tuple(seen(c, o) for c, o in zip(request.chunks, owners, strict=True)))


def led(runtime, engine, request):
    """Greedy ids, winners and every step's scores, ignoring end tokens."""
    scores = []
    return *asking.greedy(Stream(runtime, engine, request), STEPS, scores), torch.stack(scores)


def compare_answers(model, size, owners):
    for name, tuning in ENGINES.items():
        engine = make_engine(name, {name: tuning})
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


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_answers_over_ranks_are_those_of_one_process(make_model, family):
    compare_answers(make_model(family), 3, [2, 0, 2, 0, 2])  # rank 1 has no chunks


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma2", "mistral-sliding", "cohere2", "deepseek3"])
@pytest.mark.parametrize(
    ("size", "owners"),
    [(1, [0] * 5), (2, [1] * 5), (2, [0, 1, 0, 1, 0]), (4, [3, 2, 1, 0, 3]), (4, [3, 3, 3, 3, 1])],
)
def test_answers_over_any_ranks(make_model, family, size, owners):
    compare_answers(make_model(family), size, owners)


PREFIX = (0, 45, 46, 47, 48)
QUESTION_IDS = (90, 91, 92, 93)
IDS = tuple(torch.randint(3, 259, (75,), generator=torch.Generator().manual_seed(3)).tolist())
CUT = BlockLengths(block=20, anchor=6, passing=4)  # four blocks, the last of 15 tokens


def book_of(model, cut=CUT, ids=IDS, compressor=None, asked=()):
    layout = BlockLayout(tokens=len(ids), lengths=cut, start=len(PREFIX), question=len(asked))
    made = compressor or (KeyNorm() if model.checkpoint.name == "llama" else Random(seed=5))
    return LongDocument(
        model=model, layout=layout, ids=ids, compressor=made, prefix=model.encode([PREFIX])[0], question_ids=asked
    )


def row_of(long_document, blocks):
    seen = [
        PlacedChunk(kv=long_document.prefix, start=0),
        *(PlacedChunk(kv=b.kv, start=b.kv.encoded_at) for b in blocks),
    ]
    return TokenSequence.over(seen, position=long_document.layout.end)


def compare_blocks(long_document, size, known=lambda rank: ()):
    """The bytes that each rank passed on; `known(rank)` are the blocks that it has already."""
    oracle = list(SequentialExecutor().run(long_document))
    wanted = long_document.model.step([row_of(long_document, oracle)], [QUESTION_IDS])

    def work(group):
        executor = RankExecutor(group)
        blocks = list(executor.run(long_document, {h: oracle[h] for h in known(group.rank)}))
        return (
            blocks,
            executor.passed,
            step_across(long_document.model, [row_of(long_document, blocks)], [QUESTION_IDS], group),
        )

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


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_blocks_on_ranks_are_those_of_one_process(make_model, family):
    long_document = book_of(make_model(family))
    each = long_document.model.kv_shape.token_bytes * long_document.layout.lengths.passing
    assert compare_blocks(long_document, 3) == [2 * each, each, each]  # more blocks than ranks: 4 on 3


@pytest.mark.parametrize(
    ("size", "known", "passed"),
    [
        (2, [(0, 1, 2)] * 2, [2, 2]),  # the encoded block needs block 2
        (2, [(2, 3)] * 2, [1, 1]),  # the second round encodes nothing
        (3, [(0, 1, 2, 3)] * 3, [0, 0, 0]),
        (2, [(0, 1, 2), (3,)], [1, 1]),  # rank 0 has no use for its copies of rank 1's blocks
    ],
)
def test_known_blocks_are_not_encoded_again_but_passed_on(make_model, monkeypatch, size, known, passed):
    long_document, encoded = book_of(make_model("llama")), []
    encode = LongDocument.encode
    each = long_document.model.kv_shape.token_bytes * long_document.layout.lengths.passing
    monkeypatch.setattr(
        LongDocument, "encode", lambda self, block, *rest: encoded.append(block) or encode(self, block, *rest)
    )
    assert compare_blocks(long_document, size, known.__getitem__) == [each * rounds for rounds in passed]
    given = {h for rank, blocks in enumerate(known) for h in blocks if h % size == rank}
    assert sorted(encoded) == sorted([0, 1, 2, 3] + [h for h in range(4) if h not in given])  # the oracle encodes all


def test_a_block_passes_on_what_it_has(make_model):
    compare_blocks(book_of(make_model("llama"), BlockLengths(block=20, anchor=6, passing=18), IDS[:47]), 2)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma2", "mistral-sliding"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("cut", "tokens"),
    [
        (CUT, 61),  # one token in the last block
        (CUT, 20),  # one block: only the first rank has work
        (BlockLengths(block=20, anchor=6, passing=18), 47),
        (BlockLengths(block=16, anchor=16, passing=5), 75),  # block 0 passes nothing on
        (BlockLengths(block=16, anchor=16, passing=0), 75),  # Star
    ],
)
def test_blocks_of_any_cut_on_any_ranks(make_model, family, size, cut, tokens):
    compare_blocks(book_of(make_model(family), cut, IDS[:tokens]), size)


@pytest.mark.nightly
def test_blocks_that_know_the_question(make_model):
    model = make_model("llama")
    prefix = model.encode([PREFIX])[0]
    compressor = query_aware_compressor(model, QUESTION_IDS, prefix, position=len(PREFIX) + len(IDS))
    compare_blocks(book_of(model, compressor=compressor, asked=QUESTION_IDS), 3)


NOTE = "A note on reefs."
QUESTION = f"What is between {long_text(1)}, {long_text(1, 6)} and reefs?"
ASKED = {"engine": "apb", "max_new_tokens": 8}
BLOCKS = 30 + 22 + 1


@pytest.fixture(scope="module")
def places(tmp_path_factory, model_folder) -> Path:
    """Two books and a note, with a checkpoint."""
    folder = tmp_path_factory.mktemp("books")
    tiny_model(folder / "model", model_folder)
    for name, text in {"one": long_text(30), "other": long_text(22, 6), "note": NOTE}.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def made(places, folder, *names, engines=("apb",), **settings) -> RagKV:
    settings = {"chunk_tokens": CHUNK, "tuning": {"apb": LENGTHS}, "device": "cpu", **settings}
    rag = RagKV.create(folder, model=str(places / "model"), engines=engines, **settings)
    if names:
        rag.ingest(*(places / f"{name}.txt" for name in names))
    return rag


@pytest.fixture(scope="module")
def whole(places):
    """All documents in one index, and the answer of one process."""
    with made(places, places / "whole", "one", "other", "note") as rag:
        answer = rag.query(QUESTION, **ASKED)
        assert (answer.kv.hits, answer.kv.misses) == (BLOCKS, 0)
        assert len({source.document for source in answer.sources}) == 3
        yield rag, answer


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """Records the numbers of the blocks encoded on all ranks."""
    ran: list[int] = []
    encode = LongDocument.encode
    monkeypatch.setattr(
        LongDocument, "encode", lambda self, block, *rest: ran.append(block) or encode(self, block, *rest)
    )
    return ran


def ask(indexes, *, shards=False):
    """Each rank's answer, and the blocks passed to its engine."""

    def work(group):
        index = indexes[group.rank]
        backend = IndexRankBackend(index, shards=shards).backend(group, Runtime(index.model, ranks=group))
        given, request = [], backend.request
        backend.request = lambda *asked: given.append(request(*asked)) or given[-1]
        stream = AnswerStream(backend, validate_task(index.config, QUESTION, **ASKED))
        list(stream)
        return stream.answer, [chunk.kv for chunk in given[0][0].chunks]

    return on_ranks(len(indexes), work)


def same_answers(found, wanted):
    for answer, _ in found:
        assert [token.token_id for token in answer.trace] == [token.token_id for token in wanted.trace]
        assert [source.chunk_id for source in answer.sources] == [source.chunk_id for source in wanted.sources]
        assert answer.kv.hits + answer.kv.misses == BLOCKS


def test_each_rank_loads_its_part_of_the_blocks(whole, encoded):
    rag, wanted = whole
    found = ask([rag.index] * 2)
    same_answers(found, wanted)
    here = [{at for at, kv in enumerate(kvs) if kv.here} for _, kvs in found]
    assert not here[0] & here[1]
    assert here[0] | here[1] == set(range(BLOCKS))
    assert min(map(len, here)) >= 26  # half of the books' blocks, perhaps also the note
    for answer, _ in found:
        assert (answer.kv.hits, answer.kv.misses, answer.kv.tokens) == (BLOCKS, 0, wanted.kv.tokens)
    assert not encoded


def test_what_is_not_stored_is_encoded_once_and_kept(whole, places, tmp_path, encoded):
    rag, wanted = whole
    with made(places, tmp_path / "bare", "one", "other", "note", kv="on-demand") as bare:
        found = ask([bare.index] * 3)
        same_answers(found, wanted)
        assert found[0][0].kv.misses == BLOCKS
        assert sorted(encoded) == sorted([*range(30), *range(22)])
        encoded.clear()
        bare.settle()
        again = ask([bare.index] * 2)  # another partition than before
        same_answers(again, wanted)
        assert (again[0][0].kv.hits, encoded) == (BLOCKS, [])
        assert bare.query(QUESTION, **ASKED).kv.misses == 0
        assert not bare.store.verify().findings
        records = {record.key for chunk in rag.store.chunks() for record in rag.store.kv_of(chunk.chunk_id)}
        assert records == {r.key for chunk in bare.store.chunks() for r in bare.store.kv_of(chunk.chunk_id)}


def test_a_longer_book_encodes_its_new_blocks_alone_and_what_is_damaged(places, tmp_path, encoded, monkeypatch):
    source = tmp_path / "book.txt"
    source.write_text(long_text(20))
    with made(places, tmp_path / "index", kv="on-demand") as rag:
        rag.ingest(source)
        ask([rag.index] * 2)
        rag.settle()
        encoded.clear()
        source.write_text(long_text(22))
        rag.ingest(source)
        answers = [answer for answer, _ in ask([rag.index] * 2)]
        assert sorted(encoded) == [20, 21]
        assert (answers[0].kv.hits, answers[0].kv.misses) == (20, 2)
        rag.settle()
        encoded.clear()
        source.write_text(long_text(23))
        rag.ingest(source)
        damaged = len(rag.index.prefix_ids) + 3 * LENGTHS["block"]  # the block's passed-on selection
        read = sharding.stored_block
        monkeypatch.setattr(
            sharding, "stored_block", lambda kv, *rest: None if kv.encoded_at == damaged else read(kv, *rest)
        )
        answers = [answer for answer, _ in ask([rag.index] * 2)]
        assert sorted(encoded) == [3, 22]
        rag.settle()
    with made(places, tmp_path / "fresh") as fresh:
        fresh.ingest(source)
        wanted = fresh.query(QUESTION, **ASKED)
        assert {answer.text for answer in answers} == {wanted.text}
        with RagKV.open(tmp_path / "index") as rag:
            for chunk in fresh.store.chunks():
                kept, anew = ({r.key: r.encoding for r in each.store.kv_of(chunk.chunk_id)} for each in (rag, fresh))
                assert kept == anew
                assert set(kept.values()) <= {Encoding.LONG}


def test_documents_of_shards_lie_whole_on_their_rank(whole, places, tmp_path, encoded):
    _, wanted = whole
    names = (("other",), (), ("one", "note"))
    shards = [made(places, tmp_path / str(rank), *each) for rank, each in enumerate(names)]
    encoded.clear()
    found = ask([rag.index for rag in shards], shards=True)
    same_answers(found, wanted)
    assert not encoded
    assert [sum(kv.here for kv in kvs) for _, kvs in found] == [22, 0, 31]
    for rag in shards:
        rag.close()


def test_a_document_that_is_too_long_is_refused_by_all_ranks(places, tmp_path, monkeypatch):
    def limited(_, end):
        if end > 230:
            raise PromptTooLongError(f"{end} tokens are too many.")

    shards = [made(places, tmp_path / name, name) for name in ("one", "note")]
    monkeypatch.setattr(LanguageModel, "require_positions", limited)

    def work(group):
        index = shards[group.rank].index
        backend = IndexRankBackend(index, shards=True).backend(group, Runtime(index.model, ranks=group))
        stream = AnswerStream(backend, validate_task(index.config, QUESTION, **ASKED))
        with pytest.raises(UsageError, match="too many") as error:
            list(stream)
        group.gather(torch.zeros(1))  # the ranks are still in step
        return str(error.value)

    assert len(set(on_ranks(2, work))) == 1
    for rag in shards:
        rag.close()


def test_ranks_with_other_documents_are_refused(whole, places, tmp_path):
    rag, _ = whole
    with made(places, tmp_path / "copy", "one", "note") as copy:

        def work(group):
            index = (rag, copy)[group.rank].index
            backend = IndexRankBackend(index, shards=False).backend(group, Runtime(index.model, ranks=group))
            stream = AnswerStream(backend, validate_task(index.config, QUESTION, **ASKED))
            with pytest.raises(UsageError, match="Rank 1 has other versions of the documents than rank 0"):
                list(stream)

        on_ranks(2, work)
