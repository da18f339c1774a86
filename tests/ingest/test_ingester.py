"""An ingest can be stopped between any two batches of work on a long document."""

import pytest
import words

from ragkv import RagKV
from ragkv.errors import UsageError
from ragkv.ingest import ReadyChunk, ReadyDocument, from_bytes, ingester, sandbox
from ragkv.ingest import ingester as heartbeat
from ragkv.ingest.sandbox import SourceReader
from ragkv.types import Document, Encoding, ScoredChunk

TEXT = b"".join(b"Company %d makes bolts of kind %d.\n\n" % (number, number) for number in range(200))


class EnoughError(Exception):
    """Raised on purpose."""


@pytest.fixture
def rag(tmp_path, monkeypatch):
    """The bundled model with an embedder, and batches of a few chunks."""
    words.install(monkeypatch)
    settings = {"embedder": "words", "reranker": "words", "kv": "on-demand", "chunk_tokens": 64}
    monkeypatch.setattr(heartbeat, "EVERY", 500)
    monkeypatch.setattr(ingester, "BATCH_TOKENS", 256)
    with RagKV.create(tmp_path / "index", model="mini", device="cpu", **settings) as made:
        yield made


@pytest.fixture
def embedded(rag, monkeypatch):
    """Records the texts of each call of the embedder."""
    calls, whole = [], ingester.chunk_vectors

    def watched(embedder, chunks, kinds):
        calls.append([len(chunk.token_ids) for chunk in chunks])
        return whole(embedder, chunks, kinds)

    monkeypatch.setattr(ingester, "chunk_vectors", watched)
    return calls


def test_a_long_document_is_given_up_while_it_is_cut(rag, embedded):
    result = []

    def on_progress(progress):
        result.append(progress.current)
        if len(result) == 5:
            raise EnoughError

    with pytest.raises(EnoughError):
        rag.ingest(from_bytes(TEXT, name="long.md"), on_progress=on_progress)
    assert (result, embedded) == (["long.md"] * 5, [])
    assert rag.store.stats().documents == 0


def test_a_long_document_is_given_up_while_it_is_embedded(rag, embedded):
    def on_progress(progress):
        if len(embedded) == 2:
            raise EnoughError

    with pytest.raises(EnoughError):
        rag.ingest(from_bytes(TEXT, name="long.md"), on_progress=on_progress)
    assert len(embedded) == 2
    assert all(sum(tokens) <= 256 for tokens in embedded)
    assert rag.store.stats().documents == 0
    whole = rag.ingest(from_bytes(TEXT, name="long.md"))
    assert sum(map(len, embedded[2:])) == whole.chunks
    assert rag.maintenance.verify().ok
    assert rag.retrieve("What does Company 117 make?", retrieval="dense", top_k=1)[0].chunk.text.startswith("Company")


def test_a_file_is_given_up_while_it_is_read(monkeypatch):
    def waiting():
        raise EnoughError

    monkeypatch.setattr(sandbox, "WAIT_MILLISECONDS", 0)
    with SourceReader(waiting=waiting) as reader:
        with monkeypatch.context() as patched:
            patched.setattr(sandbox, "_START", "import sys; sys.stdin.buffer.read()")  # never answers
            with pytest.raises(EnoughError):
                reader.read(from_bytes(b"<p>Long.</p>", name="a.html"))
        assert reader._process is None
        reader._waiting = lambda: None
        assert reader.read(from_bytes(b"<p>Short.</p>", name="b.html")).text == "Short."


# ---- ready


def ready(text: str, *chunks: tuple[str, int, str], content_hash: str = "1", name: str = "doc") -> ReadyDocument:
    return ReadyDocument(
        document=Document(document_id=name, source=name, content_hash=content_hash),
        text=text,
        chunks=[ReadyChunk(chunk_id=i, start=start, text=piece) for i, start, piece in chunks],
    )


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([("a", 0, "one"), ("a", 4, "two")], "two chunks called 'a'"),
        ([("a", 3, " ")], "is blank"),
        ([("a", 1, "one")], "is not what document 'doc' holds at character 1"),
        ([("a", -3, "two")], "is not what"),
        ([], "at least one chunk"),
    ],
)
def test_refused(chunks, reason):
    with pytest.raises(UsageError, match=reason):
        ready("one two", *chunks)


def test_overlapping_chunks_under_their_own_ids(tmp_path, model_folder):
    text = "Halden Works was founded by Mira Oskel."
    with RagKV.create(tmp_path / "index", model=str(model_folder), device="cpu", engines=("block",)) as rag:
        document = ready(text, ("a", 0, text[:20]), ("b", 13, text[13:]))
        result = []
        report = rag.add_chunks([document], on_progress=lambda p: result.append(p.done_sources))
        assert (report.added, report.chunks, report.kv_encoded, result[-1]) == (["doc"], 2, 2, 1)
        assert rag.add_chunks([document]).unchanged == ["doc"]
        assert rag.store.text("doc") == text
        chunk = rag.store.chunk("b")
        assert (chunk.start, chunk.end, chunk.ordinal) == (13, len(text), 1)
        assert chunk.token_ids == rag.index.prompt.chunk_ids(rag.model.tokens, text[13:])
        assert rag.query("Who founded it?", engine="block", max_new_tokens=1, top_k=2).kv.misses == 0
        old = chunk

        report = rag.add_chunks([ready(text, ("b", 0, text), content_hash="2")])
        assert (report.updated, report.kv_encoded) == (["doc"], 1)
        assert rag.store.chunk("a") is None
        # a question with the old chunk stores nothing under an id that has other tokens now
        scored = ScoredChunk(chunk=old, source="doc", retrieval_score=1.0, rerank_score=None, score=0.5)
        assert rag.query("Who founded it?", engine="block", max_new_tokens=1, chunks=[scored]).kv.misses == 1
        assert not rag.store.has_kv(rag.kv_source.identity(Encoding.STANDALONE, old.token_ids))
        assert rag.maintenance.verify().ok


@pytest.mark.parametrize("together", [1 << 24, 1])
def test_a_document_takes_over_the_kv_of_one_that_changes_in_the_same_ingest(
    tmp_path, model_folder, monkeypatch, together
):
    """In one transaction and in two."""
    monkeypatch.setattr(ingester, "TOGETHER_BYTES", together)
    (folder := tmp_path / "notes").mkdir()
    (folder / "a.txt").write_text("Mill 1 makes flour.")
    with RagKV.create(tmp_path / "own", model=str(model_folder), device="cpu", engines=("ape",)) as rag:
        rag.ingest(folder)
        (folder / "a.txt").rename(folder / "b.txt")
        (folder / "a.txt").write_text("Mill 2 makes oats.")
        assert rag.ingest(folder).kv_reused == 1
        assert [(each.source, each.kv_bytes > 0) for each in rag.store.document_stats()] == [
            ("a.txt", True),
            ("b.txt", True),
        ]
        assert (rag.store.stats().kv_records, rag.store.stats().orphans) == (2, 0)
