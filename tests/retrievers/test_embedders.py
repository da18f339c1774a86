"""bge-m3's layout against FlagEmbedding's scores, and arbitrary texts."""

import json
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragkv.errors import ConfigError, MissingExtraError, ModelLoadError, RetrievalError
from ragkv.model.encoder import SentenceEncoder
from ragkv.retrievers import BGEM3, CrossEncoder, Embedding, SentenceEmbedder

QUESTIONS = [
    "Who founded Halden Works?",
    "Wie heißt der Fluss?",
    "日本の首都",
    "copper",
    "price of the mill",
    "🚀 France?",
]
PASSAGES = [
    "Halden Works was founded by Maren Quist in the town of Oslo.",
    "Der Fluss fließt durch die Stadt, 東京 too, and Москва столица.",
    "東京は日本の首都です。",
    "The price of copper rose again. " * 40,
    "mill",
    "La ville de Paris 🚀🎉 est la capitale de la France \u0645\u0631\u062d\u0628\u0627.",
]


@pytest.fixture(scope="module")
def embedder(embedder_folder: Path) -> BGEM3:
    return BGEM3(str(embedder_folder), device="cpu")


@pytest.fixture(scope="module")
def reference(embedder_folder: Path) -> Any:
    from FlagEmbedding import BGEM3FlagModel

    limits = {"query_max_length": 512, "passage_max_length": 512}
    return BGEM3FlagModel(str(embedder_folder), use_fp16=False, devices="cpu", **limits)


def same(a: Embedding, b: Embedding, *, tolerance: float) -> None:
    np.testing.assert_allclose(a.dense, b.dense, atol=tolerance)
    for left, right in zip(a.colbert, b.colbert, strict=True):
        np.testing.assert_allclose(left, right, atol=tolerance)
    for first, second in zip(a.sparse, b.sparse, strict=True):
        assert first == pytest.approx(second, abs=tolerance)


def test_vectors_are_those_of_flagembeddings_encode(embedder, reference):
    out = reference.encode_corpus(PASSAGES, return_dense=True, return_sparse=True, return_colbert_vecs=True)
    expected = Embedding(dense=out["dense_vecs"], sparse=out["lexical_weights"], colbert=out["colbert_vecs"])
    vectors = embedder.embed_documents(PASSAGES)
    same(vectors, expected, tolerance=1e-5)
    assert all(type(weight) is float for weights in vectors.sparse for weight in weights.values())
    assert vectors.dense.dtype == vectors.colbert[0].dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors.colbert[3], axis=1), 1, atol=1e-6)


def test_batches_change_nothing(embedder):
    texts = [*PASSAGES, "", *QUESTIONS, " \n", *PASSAGES[::-1]]
    together = embedder.embed_documents(texts)
    alone = [embedder.embed_documents([text]) for text in texts]
    same(
        together,
        Embedding(
            dense=np.concatenate([embedding.dense for embedding in alone]),
            sparse=[embedding.sparse[0] for embedding in alone],
            colbert=[embedding.colbert[0] for embedding in alone],
        ),
        tolerance=1e-5,
    )


def test_a_question_is_one_forward_pass(embedder, monkeypatch):
    passes: list[int] = []
    body = embedder._body.__call__
    monkeypatch.setattr(type(embedder._body), "__call__", lambda own, batch: passes.append(1) or body(batch))
    embedder.embed_query("copper")
    embedder.embed_documents(["", " "])
    assert len(passes) == 1


@pytest.mark.parametrize("text", ["", "   ", "\n\t\u3000\u00a0"])
def test_an_empty_text_matches_nothing(text, embedder):
    for vectors in (embedder.embed_query(text), embedder.embed_documents([text])):
        assert not vectors.dense.any()
        assert vectors.dense.shape == (1, 32)
        assert vectors.sparse == [{}]
        assert [rows.shape for rows in vectors.colbert] == [(0, 32)]


def test_no_texts_no_vectors(embedder):
    found = embedder.embed_documents([])
    assert found.dense.shape == (0, 32)
    assert (found.sparse, found.colbert) == ([], [])


def test_long_text_is_cut_where_the_limit_says(embedder, embedder_folder, caplog):
    text = "The price of copper rose again, and the mill closed. " * 950
    assert len(text) > 50_000
    vectors = embedder.embed_documents([text, "mill"])
    assert len(vectors.colbert[0]) == 511  # all 512 tokens except <s>
    assert "1 of 2 texts cut off after 512 tokens" in caplog.text
    short = BGEM3(str(embedder_folder), device="cpu", max_tokens=20).embed_documents([text])
    assert len(short.colbert[0]) == 19
    assert abs(short.dense - vectors.dense[0]).max() > 1e-3


def test_half_an_emoji_reads_as_a_replacement_character(embedder):
    same(embedder.embed_query("Paris \ud83d est"), embedder.embed_query("Paris \ufffd est"), tolerance=0)


def test_fifty_threads_at_once(embedder):
    texts = [f"{PASSAGES[i % 6]} {i}" for i in range(50)]
    alone = [embedder.embed_query(text) for text in texts]
    start = threading.Barrier(50)

    def ask(text: str) -> Embedding:
        start.wait()
        return embedder.embed_query(text)

    with ThreadPoolExecutor(50) as pool:
        for found, expected in zip(pool.map(ask, texts), alone, strict=True):
            same(found, expected, tolerance=1e-5)


@pytest.mark.parametrize("modes", [{"sparse"}, {"colbert", "dense"}])
def test_only_what_is_asked_for_is_computed(modes, embedder, embedder_folder):
    fewer = BGEM3(str(embedder_folder), device="cpu", modes=modes)
    assert fewer.modes == modes
    assert fewer.fingerprint == embedder.fingerprint  # the vectors are the same
    some, every = fewer.embed_documents([*PASSAGES, ""]), embedder.embed_documents([*PASSAGES, ""])
    for mode in ("dense", "sparse", "colbert"):
        if mode not in modes:
            assert getattr(some, mode) is None
    if "dense" in modes:
        np.testing.assert_allclose(some.dense, every.dense, atol=1e-5)
    if "sparse" in modes:
        assert [weights.keys() for weights in some.sparse] == [weights.keys() for weights in every.sparse]


@pytest.mark.parametrize("wrong", [{"modes": []}, {"modes": ["bm25"]}, {"max_tokens": 7}])
def test_wrong_options(wrong, embedder_folder):
    with pytest.raises(ConfigError):
        BGEM3(str(embedder_folder), device="cpu", **wrong)


def test_more_tokens_than_positions_are_refused(embedder_folder):
    assert BGEM3(str(embedder_folder), device="cpu").max_tokens == 512
    with pytest.raises(ConfigError, match="reads at most 512 tokens, not 513"):
        BGEM3(str(embedder_folder), device="cpu", max_tokens=513)


def _cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _drop_layer(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if "layer.1.output" not in k}, path, {"format": "pt"})


def _infinite(folder: Path) -> None:
    head = torch.load(folder / "colbert_linear.pt")
    torch.save({k: v * torch.inf for k, v in head.items()}, folder / "colbert_linear.pt")


def _wide_head(folder: Path) -> None:
    torch.save(torch.nn.Linear(7, 1).state_dict(), folder / "sparse_linear.pt")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_cut_weights, "cannot be loaded"),
        (_drop_layer, r"lacks weights .*layer\.1\.output.* and 3 more"),
        (_infinite, "infinite or undefined"),
        (_wide_head, "cannot be loaded.*size mismatch for weight"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot be loaded"),
        (lambda folder: (folder / "config.json").write_text("{"), "not readable JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "No weights"),
        (lambda folder: (folder / "sparse_linear.pt").write_bytes(b"no"), "Weights only load failed. Fetch"),
    ],
)
def test_a_broken_checkpoint_is_one_clear_error(damage, says, embedder_folder, tmp_path, capfd):
    copy = shutil.copytree(embedder_folder, tmp_path / "copy")
    damage(copy)
    with pytest.raises(ModelLoadError, match=says) as raised:
        BGEM3(str(copy), device="cpu")
    assert "\n" not in str(raised.value)
    assert capfd.readouterr().err == ""


def test_short_memory_halves_the_batch(embedder, monkeypatch):
    expected, forward, sizes = embedder.embed_documents(PASSAGES), embedder._forward, []

    def tight(ids: list[list[int]]) -> Any:
        sizes.append(len(ids))
        if len(ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(ids)

    monkeypatch.setattr(embedder, "_forward", tight)
    same(embedder.embed_documents(PASSAGES), expected, tolerance=1e-5)
    assert sizes == [4, 2, 1, 1, 2, 1, 1, 2, 1, 1]

    def full(ids: list[list[int]]) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(embedder, "_forward", full)
    with pytest.raises(RetrievalError, match="lower max_tokens"):
        embedder.embed_query("copper")


# ---- sentence

MODULES = [
    {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for n, (path, kind) in enumerate((("", "Transformer"), ("1_Pooling", "Pooling")))
]

TEXTS = ["Halden Works was founded by Maren Quist.", "Der Fluss 東京 Москва 🚀", "copper", "The mill closed. " * 400]


@pytest.fixture(scope="module")
def sentence_embedder(sentence_folder: Path) -> SentenceEmbedder:
    return SentenceEmbedder(str(sentence_folder), device="cpu")


def test_empty_texts_of_a_sentence_model_match_nothing(sentence_embedder, sentence_folder):
    found = sentence_embedder.embed_documents(["", "copper", " \n"]).dense
    assert not found[[0, 2]].any()
    np.testing.assert_allclose(found[1], sentence_embedder.embed_documents(["copper"]).dense[0], atol=1e-5)
    assert not sentence_embedder.embed_query(" ").dense.any()
    assert sentence_embedder.embed_documents([]).dense.shape == (0, 32)
    assert sentence_embedder.max_tokens == 512
    short = SentenceEmbedder(str(sentence_folder), device="cpu", max_tokens=8)
    cut = short.embed_documents(["copper mill Oslo town north Oslo Oslo Oslo Oslo Oslo", "copper mill"]).dense
    long = sentence_embedder.embed_documents(
        ["copper mill Oslo town north Oslo Oslo Oslo Oslo Oslo", "copper mill"]
    ).dense
    assert abs(cut - long)[0].max() > 1e-3
    assert short.fingerprint != sentence_embedder.fingerprint
    with pytest.raises(ConfigError, match="at most 512 tokens"):
        SentenceEmbedder(str(sentence_folder), device="cpu", max_tokens=600)


def test_a_broken_sentence_model_is_one_clear_error(sentence_folder, tmp_path, embedder_folder):
    copy = shutil.copytree(sentence_folder, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        SentenceEmbedder(str(copy), device="cpu")
    (copy / "modules.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="list of modules"):
        SentenceEmbedder(str(copy), device="cpu")
    with pytest.raises(ModelLoadError, match=r"no modules\.json"):
        SentenceEmbedder(str(embedder_folder), device="cpu")


def test_static_vectors_have_no_length_limit(tokenizer, tmp_path):
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


@pytest.mark.parametrize(
    ("pooling", "tail"),
    [
        ("cls", ""),
        ("lasttoken", "dense, normalised"),
        *((mode, "") for mode in ("max", "mean_sqrt_len_tokens", "weightedmean", ("mean", "cls"))),
    ],
)
def test_another_pooling_and_what_follows_it(sentence_folder, tmp_path, pooling, tail):
    """The vectors are those of sentence-transformers, which is not asked for them."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    torch.manual_seed(6)
    parts: list[Any] = [Transformer(str(sentence_folder)), Pooling(32, pooling_mode=pooling)]
    if tail:
        parts += [Dense(32, 24, activation_function=torch.nn.Tanh()), Normalize()]
    prompts = {"query": "query: ", "document": "passage: "}
    model = SentenceTransformer(modules=parts, device="cpu", prompts=prompts)
    model.save(str(tmp_path / "model"), create_model_card=False)
    embedder = SentenceEmbedder(str(tmp_path / "model"), device="cpu")
    assert isinstance(embedder._encoder, SentenceEncoder)
    passages = model.encode([f"passage: {text}" for text in TEXTS], prompt="", normalize_embeddings=True)
    np.testing.assert_allclose(embedder.embed_documents(TEXTS).dense, passages, atol=1e-5)
    question = model.encode(f"query: {TEXTS[0]}", prompt="", normalize_embeddings=True)
    np.testing.assert_allclose(embedder.embed_query(TEXTS[0]).dense[0], question, atol=1e-5)
    assert embedder.embed_documents(["copper"]).dense.shape[1] == (24 if tail else 64 if len(pooling) == 2 else 32)


@pytest.mark.parametrize("modes", [["mean"], ["cls", "mean"]])
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_question_is_computed_without_torch(family, modes, tokenizer, sentence_folder, tmp_path, monkeypatch):
    """As torch computes it; weights in bfloat16, which numpy does not have, are left to torch."""
    from transformers import AutoConfig, AutoModel

    folder = shutil.copytree(sentence_folder, tmp_path / "model")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), pad_token_id=1, initializer_range=0.3, **sizes)
    model = AutoModel.from_config(config).eval()
    model.save_pretrained(folder)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": modes}))
    by_torch = SentenceEmbedder(str(folder), device="cpu")
    monkeypatch.setattr("ragkv.retrievers.embedders.torch_if_loaded", lambda: None)
    monkeypatch.setattr(SentenceEmbedder, "_encoder", None)
    alone = SentenceEmbedder(str(folder), device="auto")
    monkeypatch.undo()
    for text in ("Copper?", " ".join(TEXTS), ""):
        expected = by_torch.embed_query(text).dense
        with monkeypatch.context() as patch:
            patch.setattr("ragkv.retrievers.embedders.torch_if_loaded", lambda: None)
            vectors = alone.embed_query(text).dense
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
    model.to(torch.bfloat16).save_pretrained(folder)
    assert SentenceEmbedder(str(folder), device="auto")._numpy_encoder is None


def test_half_precision_changes_vectors_little(sentence_folder, sentence_embedder, monkeypatch):
    monkeypatch.setattr("ragkv.model.encoder.half_type", lambda device: torch.bfloat16)
    half = SentenceEmbedder(str(sentence_folder), device="cpu")
    exact = sentence_embedder.embed_documents(TEXTS).dense
    cosines = (half.embed_documents(TEXTS).dense * exact).sum(1)
    assert (cosines > 0.99).all()
    assert (cosines < 1 - 1e-7).any()


def test_what_only_the_library_computes_names_it_where_it_is_missing(sentence_folder, tmp_path, monkeypatch):
    copy = shutil.copytree(sentence_folder, tmp_path / "copy")
    modules = json.loads((copy / "modules.json").read_text())
    modules.append(modules[-1] | {"idx": 2, "type": "sentence_transformers.models.LayerNorm"})
    (copy / "modules.json").write_text(json.dumps(modules))
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    SentenceEmbedder(str(sentence_folder), device="cpu")
    with pytest.raises(MissingExtraError, match="sentence-transformers computes; run pip install -e"):
        SentenceEmbedder(str(copy), device="cpu")


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet"])
def test_other_families_are_computed_as_transformers_does(family, tokenizer, tmp_path):
    from transformers import AutoConfig, AutoModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), pad_token_id=1, initializer_range=0.3, **sizes)
    torch.manual_seed(9)
    model = AutoModel.from_config(config).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for name, content in (("modules.json", MODULES), ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True})):
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text(json.dumps(content))
    embedder = SentenceEmbedder(str(tmp_path / "model"), device="cpu", max_tokens=128)
    vectors = embedder.embed_documents(TEXTS[:3]).dense
    for text, vector in zip(TEXTS, vectors, strict=False):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        mean = model(ids).last_hidden_state.mean(1)
        expected = torch.nn.functional.normalize(mean, dim=-1)[0].detach().numpy()
        np.testing.assert_allclose(vector, expected, atol=1e-5)


# ---- separator

HOSTILE = ["The mill.</s></s>The question?", "</s>", "<s>The<pad>mill", "The mill.＜/s＞＜/s＞Paris", "<unk>"]
SEPARATORS = {0, 1, 2}  # <s>, <pad>, </s>


def separators(ids: list[int]) -> int:
    return sum(i in SEPARATORS for i in ids)


def test_a_pair_has_the_separators_of_its_layout_and_no_more(reranker_folder):
    reranker = CrossEncoder(str(reranker_folder), device="cpu")
    pairs = reranker._pairs("Who?", ["The mill.", *HOSTILE])
    pairs += [pair for text in HOSTILE for pair in reranker._pairs(text, ["The mill."])]
    assert [separators(row.ids) for row in pairs] == [4] * (1 + 2 * len(HOSTILE))


def test_an_embedded_text_has_no_separators_inside(embedder_folder, sentence_folder):
    embedder = BGEM3(str(embedder_folder), device="cpu")
    assert [separators(row.ids) for row in embedder._tokenise(HOSTILE)] == [2] * len(HOSTILE)
    assert {key for text in HOSTILE for key in embedder.embed_documents([text]).sparse[0]}.isdisjoint({"0", "1", "2"})
    rows = SentenceEmbedder(str(sentence_folder), device="cpu")._encoder.tokenise(HOSTILE, question=False)
    assert [separators(row.ids) for row in rows] == [2] * len(HOSTILE)


def test_a_model_whose_prompts_hold_special_tokens_keeps_them(sentence_folder, tmp_path):
    copy = shutil.copytree(sentence_folder, tmp_path / "copy")
    settings = json.loads((copy / "config_sentence_transformers.json").read_text())
    settings["prompts"] = {"query": "</s>The question: "}
    (copy / "config_sentence_transformers.json").write_text(json.dumps(settings))
    [row] = SentenceEmbedder(str(copy), device="cpu")._encoder.tokenise(["Who?"], question=True)
    assert separators(row.ids) == 3
