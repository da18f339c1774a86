"""Engine apb on an index and on files: whole documents in blocks that are stored, extended and damaged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from longbook import BLOCK, CHUNK, LENGTHS, book, tiny_model

from ragkv import RagKV
from ragkv.config import IndexConfig
from ragkv.errors import ConfigError
from ragkv.index.contexts import Contexts
from ragkv.ingest import encoding as blocks_of
from ragkv.ingest.encoding import Blocks, plan_blocks
from ragkv.model.apb.document import compressor_for
from ragkv.model.self_check import load_model
from ragkv.types import Encoding

BLOCKS = 60
QUESTION = f"What stands after {book(1)}?"
UNEVEN = {"apb": {**LENGTHS, "block": 12}}
"""Block sizes that do not align with chunks."""
SHORT, FEW = book(6), 4
"""A text, and its number of such blocks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model"), model_folder))


def made(folder: Path, model: str, **settings: Any) -> RagKV:
    """An index with exact KV: a new block over rounded KV would differ in the last bits from one encoded with the
    others.
    """
    settings = {"engines": ("apb",), "chunk_tokens": CHUNK, "codec": "raw", "tuning": UNEVEN, **settings}
    return RagKV.create(folder, model=model, **settings)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the numbers of the encoded blocks."""
    from ragkv.model.apb.document import LongDocument

    ran: list[int] = []
    encode = LongDocument.encode
    monkeypatch.setattr(
        LongDocument, "encode", lambda self, block, *rest: ran.append(block) or encode(self, block, *rest)
    )
    return ran


def test_a_book_is_stored_in_blocks_and_answers(tmp_path, model, counted):
    source = tmp_path / "book.txt"
    source.write_text(SHORT)
    with made(tmp_path / "index", model) as rag:
        rag.ingest(source)
        assert counted == list(range(FEW))
        answer = rag.query(QUESTION, engine="apb", max_new_tokens=6)
        assert (answer.kv.hits, answer.kv.misses) == (FEW, 0)
        assert len(counted) == FEW
        assert not rag.store.maintenance.verify().findings
        assert not rag.store.maintenance.verify(quick=True).findings
    with RagKV.open(tmp_path / "index") as rag:
        again = rag.query(QUESTION, engine="apb", max_new_tokens=6)
    assert again.text == answer.text
    assert (again.kv.hits, again.kv.misses) == (FEW, 0)
    # the first question encodes all blocks, and the next one finds them
    with made(tmp_path / "bare", model, engines=("block",)) as rag:
        rag.ingest(source)
        first = rag.query(QUESTION, engine="apb", max_new_tokens=6)
        assert (first.text, first.kv.misses) == (answer.text, FEW)
        rag.maintenance.settle()
        second = rag.query(QUESTION, engine="apb", max_new_tokens=6)
        assert (second.text, second.kv.hits) == (answer.text, FEW)


def test_a_damaged_choice_is_made_again(tmp_path, model, counted, monkeypatch):
    source = tmp_path / "book.txt"
    source.write_text(SHORT)
    with made(tmp_path / "index", model) as rag:
        rag.ingest(source)
        counted.clear()
        monkeypatch.setattr(blocks_of, "stored_block", lambda *_: None)
        source.write_text(book(9))
        rag.ingest(source)
        assert counted == list(range(FEW + 2))


def test_short_documents_and_chunks_alone_are_one_block(tmp_path, model):
    (tmp_path / "note.txt").write_text("The reef lies north.")
    (tmp_path / "other.txt").write_text(SHORT)
    with made(tmp_path / "index", model) as rag:
        rag.ingest(tmp_path / "note.txt", tmp_path / "other.txt")
        answer = rag.query("Where does the reef lie?", engine="apb", max_new_tokens=4)
        assert answer.kv.misses == 0
        note = next(c for c in rag.store.chunks() if c.text.startswith("The reef lies"))
        [record] = rag.store.kv_of(note.chunk_id)
        assert record.encoding == Encoding.PREFIXED


def test_the_attention_of_a_question_is_refused_where_there_is_none(tmp_path, model):
    (tmp_path / "book.txt").write_text(SHORT)
    with (
        made(tmp_path / "index", model, tuning={"apb": {**LENGTHS, "compressor": "attention"}}) as rag,
        pytest.raises(ConfigError, match="needs the question"),
    ):
        rag.ingest(tmp_path / "book.txt")


def test_questions_about_a_file_encode_it_for_themselves(model, counted, caplog):
    loaded = load_model(model)
    with Contexts(loaded, [("book", SHORT), ("note", "A reef.")], IndexConfig(tuning=UNEVEN)) as files:
        stream = files.stream("Where is the reef?", engine="apb", max_new_tokens=4)
        for _ in stream:
            pass
        assert stream.answer.kv.misses == FEW + 1
        assert counted == list(range(FEW))
    assert "one block" not in caplog.text
    # by default, a document below the length at which APB is faster is read with full attention
    with Contexts(loaded, [("book", SHORT)], IndexConfig()) as files:
        streams = [files.stream("Where is the reef?", engine=name, max_new_tokens=6) for name in ("apb", "full")]
        for each in streams:
            for _ in each:
                pass
        assert streams[0].answer.text == streams[1].answer.text
    assert caplog.text.count("is read as one block, by plain attention: apb is for documents of 32768") == 1


# ---- append


def planned(rag: RagKV) -> Blocks:
    """The planned blocks of the index's only document."""
    index = rag.index
    assert index.blocks is not None
    compressor = compressor_for(index.blocks.compressor, index.model)
    chunks = list(rag.store.chunks())
    return plan_blocks(chunks, index.blocks, compressor, model=index.fingerprint, prefix_ids=index.prefix_ids)


def answered(rag: RagKV) -> str:
    answer = rag.query(QUESTION, engine="apb", max_new_tokens=8)
    assert (answer.kv.hits, answer.kv.misses) == (BLOCKS + 1, 0)
    return answer.text


def test_a_book_that_grows_by_a_block_encodes_one(tmp_path, model):
    source = tmp_path / "book.txt"
    source.write_text(book(BLOCKS)[:-3])
    with made(tmp_path / "index", model, tuning={"apb": LENGTHS}) as rag:
        short = rag.ingest(source)
        assert planned(rag).layout.blocks == BLOCKS
        assert (short.kv_encoded, short.kv_reused) == (BLOCKS + 1, 0)  # including the anchor
        source.write_text(book(BLOCKS))
        whole = rag.ingest(source)
        old = planned(rag)
        assert (old.layout.tokens, old.layout.blocks) == (BLOCKS * BLOCK, BLOCKS)
        assert (whole.kv_encoded, whole.kv_reused) == (1, BLOCKS)  # the last block was incomplete
        source.write_text(book(BLOCKS + 1))
        more = rag.ingest(source)
        assert (more.kv_encoded, more.kv_reused, more.tokens) == (1, BLOCKS + 1, BLOCK)
        new = planned(rag)
        assert new.anchor == old.anchor
        assert new.identities[:BLOCKS] == old.identities
        chunks = [chunk.chunk_id for chunk in rag.store.chunks()]
        assert [*new.owners] == [chunks[block * BLOCK // CHUNK] for block in range(BLOCKS + 1)]
        assert rag.store.has_many([*new.all]) == {*new.all}
        assert rag.store.stats().kv_records == BLOCKS + 2
        assert not rag.store.maintenance.verify().findings
        grown = [rag.store.get_kv(identity) for identity in new.all]
        text = answered(rag)
    with made(tmp_path / "fresh", model, tuning={"apb": LENGTHS}) as rag:
        assert rag.ingest(source).kv_encoded == BLOCKS + 2
        assert planned(rag).all == new.all
        for identity, kept in zip(new.all, grown, strict=True):
            fresh = rag.store.get_kv(identity)
            assert fresh is not None
            assert kept is not None
            pairs = zip((*fresh.keys, *fresh.values), (*kept.keys, *kept.values), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
        assert answered(rag) == text
        letters, middle = list(book(BLOCKS + 1)), BLOCKS // 2
        letters[middle * BLOCK] = "x"
        source.write_text("".join(letters))
        assert rag.ingest(source).kv_encoded == BLOCKS + 1 - middle  # a block's KV depends on all blocks before it
        kept = [one == other for one, other in zip(planned(rag).identities, new.identities, strict=True)]
        assert kept == [True] * middle + [False] * (BLOCKS + 1 - middle)
