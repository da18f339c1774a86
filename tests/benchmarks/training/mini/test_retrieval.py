"""The bundled embedder and reranker are trained, exported and measured."""

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from ragkv.benchmarks.training.mini import retrieval
from ragkv.benchmarks.training.mini.retrieval import (
    EmbedderTrainConfig,
    EncoderShape,
    RerankerTrainConfig,
    build_embedder,
    english_texts,
    export,
    measure_retrieval,
    pad,
    train_embedder,
    train_encoder_tokenizer,
    train_reranker,
    world_texts,
)
from ragkv.mini import embedder_path, reranker_path
from ragkv.retrievers import CrossEncoder, load_embedder

SHAPE = EncoderShape(hidden=32, layers=1, heads=2, intermediate=48, vocab=500)
CONFIG = EmbedderTrainConfig(shape=SHAPE, steps=4, worlds=1, size=8, asks=8, checkpoint_every=2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_encoder_tokenizer(world_texts(8), SHAPE.vocab).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def short_texts():
    """A little prose: reading all of it takes longer than the training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "english_texts", lambda _: english_texts(100_000))
        yield


@pytest.fixture(scope="module")
def whole(tokenizer, short_texts, tmp_path_factory):
    return train_embedder(CONFIG, tokenizer, tmp_path_factory.mktemp("whole"))


def test_what_is_loaded_is_what_was_trained(tokenizer, whole, tmp_path):
    export(whole.encoder, tokenizer, tmp_path / "model", notes={}, heads=whole.heads)
    texts = ["Halden Works was founded in 1907.", "a much longer text about a mill, a town and its river " * 3]
    loaded = load_embedder(str(tmp_path / "model"), device="cpu").embed_documents(texts)
    with torch.inference_mode():
        wanted = whole(*pad(tokenizer, texts, "cpu"))
    np.testing.assert_allclose(loaded.dense, wanted.dense.numpy(), atol=5e-3)  # fp16 weights
    for row, rows in enumerate(loaded.colbert):
        np.testing.assert_allclose(rows, wanted.colbert[row, : len(rows)].numpy(), atol=5e-3)
        weights = {str(i): float(w) for i, w in enumerate(wanted.sparse[row]) if w > 0}
        assert loaded.sparse[row].keys() == weights.keys()
        assert loaded.sparse[row] == pytest.approx(weights, abs=5e-3)


@pytest.mark.usefixtures("short_texts")
def test_the_reranker_learns_from_the_embedder_and_is_loaded_as_it_was_trained(tokenizer, tmp_path):
    embedder = build_embedder(CONFIG, len(tokenizer))
    config = RerankerTrainConfig(shape=SHAPE, steps=6, asks=3, hard=1, easy=1, size=10, checkpoint_every=3)
    result = []
    model = train_reranker(config, embedder, tokenizer, tmp_path, on_progress=result.append)
    assert [t["step"] for t in result] == [1, 2, 3, 4, 5, 6]
    again = train_reranker(config, embedder, tokenizer, tmp_path)  # already at its end
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    export(model, tokenizer, tmp_path / "model", notes={})
    pairs = [("who?", "Mira Oskel."), ("who?", "a town")]
    batch = tokenizer([q for q, _ in pairs], [p for _, p in pairs], padding=True, return_tensors="pt")
    with torch.inference_mode():
        wanted = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    got = CrossEncoder(str(tmp_path / "model"), device="cpu").score("who?", [p for _, p in pairs])
    assert got == pytest.approx(wanted.tolist(), abs=5e-3)


@pytest.mark.slow
def test_the_shipped_models_beat_bm25_where_words_differ(monkeypatch):
    """With a smaller world than the four of docs/mini.md, and fewer candidates for the reranker."""
    monkeypatch.setattr(retrieval, "RERANKED", 10)
    rows = measure_retrieval(embedder_path(), reranker_path(), seeds=[0], size=12, asks=40)
    few = {row["system"]: row for row in rows if row["slice"] == "few"}
    assert few["dense"]["n"] > 20
    assert few["dense"]["recall_5"] >= 0.9
    assert few["dense"]["recall_5"] >= few["bm25"]["recall_5"] + 0.1
    assert few["dense+rerank"]["ndcg_10"] > few["dense"]["ndcg_10"]
