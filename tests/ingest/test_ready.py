"""Documents that were cut elsewhere: what is refused, and what the store makes of ids of a caller's own."""

from __future__ import annotations

import pytest

from ragkv import RagKV
from ragkv.errors import UsageError
from ragkv.ingest import ReadyChunk, ReadyDocument
from ragkv.types import Document, Encoding, ScoredChunk


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
        told = []
        report = rag.add_chunks([document], on_progress=lambda p: told.append(p.done_sources))
        assert (report.added, report.chunks, report.kv_encoded, told[-1]) == (["doc"], 2, 2, 1)
        assert rag.add_chunks([document]).unchanged == ["doc"]
        assert rag.store.text("doc") == text
        chunk = rag.store.chunk("b")
        assert (chunk.start, chunk.end, chunk.ordinal) == (13, len(text), 1)
        assert chunk.token_ids == rag.prompt.chunk_ids(rag.model.tokens, text[13:])
        assert rag.query("Who founded it?", engine="block", max_new_tokens=1, top_k=2).kv.misses == 0
        old = chunk

        report = rag.add_chunks([ready(text, ("b", 0, text), content_hash="2")])
        assert (report.updated, report.kv_encoded) == (["doc"], 1)
        assert rag.store.chunk("a") is None
        # a question that began before keeps nothing under an id that means other tokens by now
        scored = ScoredChunk(chunk=old, source="doc", retrieval_score=1.0, rerank_score=None, score=0.5)
        assert rag.query("Who founded it?", engine="block", max_new_tokens=1, chunks=[scored]).kv.misses == 1
        assert not rag.store.has_kv(rag.recall.identity(Encoding.STANDALONE, old.token_ids))
        assert rag.verify().ok
