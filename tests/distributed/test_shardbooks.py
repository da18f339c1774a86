"""Engine apb over ranks, from an index: the answers of one process, each rank with its part of the blocks."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from longbook import CHUNK, LENGTHS, book, tiny_model
from rankthreads import on_ranks

from ragkv import RagKV
from ragkv.distributed import shardbooks
from ragkv.distributed.rankpart import IndexPart
from ragkv.errors import PromptTooLongError, UsageError
from ragkv.index.answer import AnswerStream
from ragkv.index.task import settle_task
from ragkv.model.apb import Book
from ragkv.model.language import LanguageModel
from ragkv.runtime import Runtime
from ragkv.types import Encoding

NOTE = "A note on reefs."
QUESTION = f"What is between {book(1)}, {book(1, 6)} and reefs?"
ASKED = {"engine": "apb", "max_new_tokens": 8}
BLOCKS = 30 + 22 + 1


@pytest.fixture(scope="module", autouse=True)
def loaded_once():
    """The indexes of this file share their model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModel, "load", functools.cache(LanguageModel.load))
        yield


@pytest.fixture(scope="module")
def places(tmp_path_factory, model_folder) -> Path:
    """Two books and a note; a checkpoint beside them."""
    folder = tmp_path_factory.mktemp("books")
    tiny_model(folder / "model", model_folder)
    for name, text in {"one": book(30), "other": book(22, 6), "note": NOTE}.items():
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
    """All of them in one index, and the answer of one process."""
    with made(places, places / "whole", "one", "other", "note") as rag:
        answer = rag.query(QUESTION, **ASKED)
        assert (answer.kv.hits, answer.kv.misses) == (BLOCKS, 0)
        assert len({source.document for source in answer.sources}) == 3
        yield rag, answer


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """The blocks that are encoded on all ranks, by number."""
    ran: list[int] = []
    encode = Book.encode
    monkeypatch.setattr(Book, "encode", lambda self, block, *rest: ran.append(block) or encode(self, block, *rest))
    return ran


def ask(indexes, *, shards=False):
    """Each rank's answer, and the blocks that its engine was given."""

    def work(group):
        index = indexes[group.rank]
        ground = IndexPart(index, shards=shards).ground(group, Runtime(index.model, ranks=group))
        given, request = [], ground.request
        ground.request = lambda *asked: given.append(request(*asked)) or given[-1]
        stream = AnswerStream(ground, settle_task(index.config, QUESTION, **ASKED))
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
    assert min(map(len, here)) >= 26  # every second one of the books, and perhaps the note
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
        again = ask([bare.index] * 2)  # other parts than before
        same_answers(again, wanted)
        assert (again[0][0].kv.hits, encoded) == (BLOCKS, [])
        assert bare.query(QUESTION, **ASKED).kv.misses == 0
        assert not bare.store.verify().findings
        records = {record.key for chunk in rag.store.chunks() for record in rag.store.kv_of(chunk.chunk_id)}
        assert records == {r.key for chunk in bare.store.chunks() for r in bare.store.kv_of(chunk.chunk_id)}


def test_a_longer_book_encodes_its_new_blocks_alone(places, tmp_path, encoded):
    source = tmp_path / "book.txt"
    source.write_text(book(20))
    with made(places, tmp_path / "index", kv="on-demand") as rag:
        rag.ingest(source)
        ask([rag.index] * 2)
        rag.settle()
        encoded.clear()
        source.write_text(book(23))
        rag.ingest(source)
        answers = [answer for answer, _ in ask([rag.index] * 2)]
        assert sorted(encoded) == [20, 21, 22]
        assert (answers[0].kv.hits, answers[0].kv.misses) == (20, 3)
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


def test_a_damaged_choice_of_what_is_passed_on_is_made_again(places, tmp_path, encoded, monkeypatch):
    source = tmp_path / "book.txt"
    source.write_text(book(6))
    with made(places, tmp_path / "index", kv="on-demand") as rag:
        rag.ingest(source)
        ask([rag.index] * 2)
        rag.settle()
        encoded.clear()
        source.write_text(book(8))
        rag.ingest(source)
        damaged = len(rag.index.prefix_ids) + 3 * LENGTHS["block"]
        read = shardbooks.stored_block
        monkeypatch.setattr(
            shardbooks, "stored_block", lambda kv, *rest: None if kv.encoded_at == damaged else read(kv, *rest)
        )
        answers = [answer for answer, _ in ask([rag.index] * 2)]
        assert sorted(encoded) == [3, 6, 7]
    with made(places, tmp_path / "fresh") as fresh:
        fresh.ingest(source)
        assert {answer.text for answer in answers} == {fresh.query(QUESTION, **ASKED).text}


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
        ground = IndexPart(index, shards=True).ground(group, Runtime(index.model, ranks=group))
        stream = AnswerStream(ground, settle_task(index.config, QUESTION, **ASKED))
        with pytest.raises(UsageError, match="too many") as error:
            list(stream)
        group.gather(torch.zeros(1))  # they are still together
        return str(error.value)

    assert len(set(on_ranks(2, work))) == 1
    for rag in shards:
        rag.close()


def test_ranks_with_other_documents_are_refused(whole, places, tmp_path):
    rag, _ = whole
    with made(places, tmp_path / "copy", "one", "note") as copy:

        def work(group):
            index = (rag, copy)[group.rank].index
            ground = IndexPart(index, shards=False).ground(group, Runtime(index.model, ranks=group))
            stream = AnswerStream(ground, settle_task(index.config, QUESTION, **ASKED))
            with pytest.raises(UsageError, match="Rank 1 has other versions of the documents than rank 0"):
                list(stream)

        on_ranks(2, work)
