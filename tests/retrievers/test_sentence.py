"""Any sentence-transformers model beside its own `encode`."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragkv.errors import ConfigError, ModelLoadError
from ragkv.retrievers import Embedder, SentenceEmbedder

TEXTS = ["Halden Works was founded by Maren Quist.", "Der Fluss 東京 Москва 🚀", "copper", "The mill closed. " * 400]


@pytest.fixture(scope="module")
def embedder(sentence_folder: Path) -> SentenceEmbedder:
    return SentenceEmbedder(str(sentence_folder), device="cpu", batch_size=2)


@pytest.fixture(scope="module")
def reference(sentence_folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(sentence_folder), device="cpu")


def test_documents_and_questions_have_their_own_prompts(embedder: SentenceEmbedder, reference: Any) -> None:
    plain = reference.encode(TEXTS, prompt="", normalize_embeddings=True)
    np.testing.assert_allclose(embedder.embed_documents(TEXTS).dense, plain, atol=1e-5)
    asked = reference.encode([f"The question of the town: {text}" for text in TEXTS], normalize_embeddings=True)
    found = np.concatenate([embedder.embed_query(text).dense for text in TEXTS])
    np.testing.assert_allclose(found, asked, atol=1e-5)
    assert abs(asked - plain).max() > 1e-2
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


def test_empty_texts_match_nothing(embedder: SentenceEmbedder) -> None:
    found = embedder.embed_documents(["", "copper", " \n"]).dense
    assert not found[[0, 2]].any()
    np.testing.assert_allclose(found[1], embedder.embed_documents(["copper"]).dense[0], atol=1e-5)
    assert not embedder.embed_query(" ").dense.any()
    assert embedder.embed_documents([]).dense.shape == (0, 32)


def test_it_gives_dense_vectors_only(embedder: SentenceEmbedder) -> None:
    assert isinstance(embedder, Embedder)
    found = embedder.embed_query("half \ud83d")
    assert (found.sparse, found.colbert, found.dense.dtype) == (None, None, np.float32)


def test_fifty_threads_at_once(embedder: SentenceEmbedder) -> None:
    texts = [f"copper {i}" for i in range(50)]
    alone = [embedder.embed_query(text).dense for text in texts]
    with ThreadPoolExecutor(50) as pool:
        found = [one.dense for one in pool.map(embedder.embed_query, texts)]
    np.testing.assert_allclose(found, alone, atol=1e-5)


def test_the_limit_counts_and_is_refused_beyond_the_positions(
    embedder: SentenceEmbedder, sentence_folder: Path
) -> None:
    assert embedder.max_tokens == 512
    short = SentenceEmbedder(str(sentence_folder), device="cpu", max_tokens=8)
    cut = short.embed_documents(["copper mill Oslo town north Oslo Oslo Oslo Oslo Oslo", "copper mill"]).dense
    long = embedder.embed_documents(["copper mill Oslo town north Oslo Oslo Oslo Oslo Oslo", "copper mill"]).dense
    assert abs(cut - long)[0].max() > 1e-3
    assert short.fingerprint != embedder.fingerprint
    with pytest.raises(ConfigError, match="at most 512 tokens"):
        SentenceEmbedder(str(sentence_folder), device="cpu", max_tokens=600)


def test_a_broken_model_is_one_clear_error(sentence_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sentence_folder, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        SentenceEmbedder(str(copy), device="cpu")
    (copy / "modules.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="list of modules"):
        SentenceEmbedder(str(copy), device="cpu")


def test_the_other_layout_is_refused(embedder_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no modules\.json"):
        SentenceEmbedder(str(embedder_folder), device="cpu")


def test_static_vectors_have_no_length_limit(tokenizer: Any, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    weights = np.random.default_rng(5).standard_normal((len(tokenizer), 16), dtype=np.float32)
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)], device="cpu")
    model.save(str(tmp_path / "static"), create_model_card=False)
    static = SentenceEmbedder(str(tmp_path / "static"), device="cpu")
    long = "copper mill " * 2000 + "Oslo"
    expected = model.encode([*TEXTS, long], normalize_embeddings=True)
    np.testing.assert_allclose(static.embed_documents([*TEXTS, long]).dense, expected, atol=1e-6)
    np.testing.assert_allclose(static.embed_query(TEXTS[0]).dense[0], expected[0], atol=1e-6)
    assert static.fingerprint == SentenceEmbedder(str(tmp_path / "static"), device="cpu").fingerprint
    with pytest.raises(ConfigError, match="any length"):
        SentenceEmbedder(str(tmp_path / "static"), device="cpu", max_tokens=64)


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"])
@pytest.mark.parametrize("tail", ["", "dense, normalised"])
def test_every_pooling_and_what_follows_it(sentence_folder: Path, tmp_path: Path, pooling: str, tail: str) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    torch.manual_seed(6)
    parts: list[Any] = [Transformer(str(sentence_folder)), Pooling(32, pooling_mode=pooling)]
    if tail:
        parts += [Dense(32, 24, activation_function=torch.nn.Tanh()), Normalize()]
    prompts = {"query": "query: ", "document": "passage: "}
    model = SentenceTransformer(modules=parts, device="cpu", prompts=prompts)
    model.save(str(tmp_path / "model"), create_model_card=False)
    found = SentenceEmbedder(str(tmp_path / "model"), device="cpu", batch_size=2)
    passages = model.encode([f"passage: {text}" for text in TEXTS], prompt="", normalize_embeddings=True)
    np.testing.assert_allclose(found.embed_documents(TEXTS).dense, passages, atol=1e-5)
    question = model.encode(f"query: {TEXTS[0]}", prompt="", normalize_embeddings=True)
    np.testing.assert_allclose(found.embed_query(TEXTS[0]).dense[0], question, atol=1e-5)
    assert found.embed_documents(["copper"]).dense.shape == (1, 24 if tail else 32)
