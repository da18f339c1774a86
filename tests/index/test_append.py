"""Text that is appended to a long document: of 200 blocks and one, one is encoded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from longbook import BLOCK, CHUNK, LENGTHS, book, tiny_model

from ragkv import RagKV
from ragkv.ingest.block import Blocks, plan_blocks
from ragkv.model.apb.choice import compressor_for

QUESTION = f"What stands after {book(1)}?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model"), model_folder))


def made(folder: Path, model: str) -> RagKV:
    return RagKV.create(folder, model=model, engines=("apb",), chunk_tokens=CHUNK, tuning={"apb": LENGTHS})


def planned(rag: RagKV) -> Blocks:
    """The blocks of the one document that the index holds."""
    index = rag.index
    assert index.blocks is not None
    compressor = compressor_for(index.blocks.compressor, index.model)
    chunks = list(rag.store.chunks())
    return plan_blocks(chunks, index.blocks, compressor, model=index.fingerprint, prefix_ids=index.prefix_ids)


def answered(rag: RagKV) -> str:
    answer = rag.query(QUESTION, engine="apb", max_new_tokens=8)
    assert (answer.kv.hits, answer.kv.misses) == (201, 0)
    return answer.text


def test_a_book_of_200_blocks_and_one_encodes_one(tmp_path: Path, model: str) -> None:
    source = tmp_path / "book.txt"
    source.write_text(book(200))
    with made(tmp_path / "index", model) as rag:
        whole = rag.ingest(source)
        old = planned(rag)
        assert (old.layout.tokens, old.layout.blocks) == (200 * BLOCK, 200)
        assert (whole.kv_encoded, whole.kv_reused) == (201, 0)  # the anchor too
        source.write_text(book(201))
        more = rag.ingest(source)
        assert (more.kv_encoded, more.kv_reused, more.tokens) == (1, 201, BLOCK)
        new = planned(rag)
        assert new.anchor == old.anchor
        assert new.identities[:200] == old.identities
        assert rag.store.has_many([*new.all]) == {*new.all}
        assert rag.store.stats().kv_records == 202
        assert not rag.store.verify().findings
        grown = [rag.store.get_kv(identity) for identity in new.all]
        text = answered(rag)
    with made(tmp_path / "fresh", model) as rag:
        assert rag.ingest(source).kv_encoded == 202
        assert planned(rag).all == new.all
        for identity, kept in zip(new.all, grown, strict=True):
            fresh = rag.store.get_kv(identity)
            assert fresh is not None
            assert kept is not None
            pairs = zip((*fresh.keys, *fresh.values), (*kept.keys, *kept.values), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
        assert answered(rag) == text
