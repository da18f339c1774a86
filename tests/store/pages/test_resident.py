"""Pages that are given back are mapped again when they are read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ragkv.store import Store
from ragkv.store.pages.resident import give_back
from ragkv.types import Document


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells where a file is mapped")
def test_what_is_given_back_reads_the_same(tmp_path: Path) -> None:
    with Store.create(tmp_path) as store:
        texts = {f"doc-{n}": f"text {n} " * 200 for n in range(50)}
        for name, text in texts.items():
            store.write_document(
                Document(document_id=name, source=name, content_hash="1"), text, [], recipe="r", references={}
            )
        reading = iter(store.documents())
        next(reading)
        assert store.give_back_pages() >= (store.directory / "data.mdb").stat().st_size
        assert sum(1 for _ in reading) == 49
        assert {name: store.text(name) for name in texts} == texts
        store.delete_document("doc-7")
        store.give_back_pages()
        assert store.document("doc-7") is None
        assert store.verify().ok


def test_a_file_that_is_not_mapped_has_nothing_to_give_back(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"x" * 4096)
    assert give_back(tmp_path / "data.mdb") == 0
    assert give_back(tmp_path / "none") == 0
