"""An ingest can be ended between any two batches of work, in all that it does with a long document."""

from __future__ import annotations

import pytest

from ragkv import RagKV
from ragkv.ingest import ingester, isolated, pulse, supplied
from ragkv.ingest.isolated import SourceReader

TEXT = b"".join(b"Company %d makes bolts of kind %d.\n\n" % (number, number) for number in range(200))


class EnoughError(Exception):
    """Asked for."""


@pytest.fixture
def rag(tmp_path, monkeypatch):
    """The bundled model, which has an embedder; one batch is a few chunks."""
    monkeypatch.setattr(pulse, "EVERY", 500)
    monkeypatch.setattr(ingester, "BATCH_TOKENS", 256)
    with RagKV.create(tmp_path / "index", model="mini", device="cpu", kv="on-demand", chunk_tokens=64) as made:
        yield made


@pytest.fixture
def embedded(rag, monkeypatch):
    """The texts of each call of the embedder, which the ingest goes on from."""
    calls, whole = [], ingester.chunk_vectors

    def watched(embedder, chunks, kinds):
        calls.append([len(chunk.token_ids) for chunk in chunks])
        return whole(embedder, chunks, kinds)

    monkeypatch.setattr(ingester, "chunk_vectors", watched)
    return calls


def test_a_long_document_is_given_up_while_it_is_cut(rag, embedded):
    told = []

    def on_progress(progress):
        told.append(progress.current)
        if len(told) == 5:
            raise EnoughError

    with pytest.raises(EnoughError):
        rag.ingest(supplied(TEXT, name="long.md"), on_progress=on_progress)
    assert (told, embedded) == (["long.md"] * 5, [])
    assert rag.stats().documents == 0


def test_a_long_document_is_given_up_while_it_is_embedded(rag, embedded):
    def on_progress(progress):
        if len(embedded) == 2:
            raise EnoughError

    with pytest.raises(EnoughError):
        rag.ingest(supplied(TEXT, name="long.md"), on_progress=on_progress)
    assert len(embedded) == 2
    assert all(sum(tokens) <= 256 for tokens in embedded)
    assert rag.stats().documents == 0
    whole = rag.ingest(supplied(TEXT, name="long.md"))
    assert sum(map(len, embedded[2:])) == whole.chunks
    assert rag.verify().ok
    assert rag.retrieve("What does Company 117 make?", retrieval="dense", top_k=1)[0].chunk.text.startswith("Company")


def test_a_file_is_given_up_while_it_is_read(monkeypatch):
    def waiting():
        raise EnoughError

    monkeypatch.setattr(isolated, "WAIT_MILLISECONDS", 0)
    with SourceReader(waiting=waiting) as reader:
        with monkeypatch.context() as patched:
            patched.setattr(isolated, "_START", "import sys; sys.stdin.buffer.read()")  # never answers
            with pytest.raises(EnoughError):
                reader.read(supplied(b"<p>Long.</p>", name="a.html"))
        assert reader._process is None
        reader._waiting = lambda: None
        assert reader.read(supplied(b"<p>Short.</p>", name="b.html")).text == "Short."
