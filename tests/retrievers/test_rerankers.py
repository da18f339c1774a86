"""The cross-encoder against transformers' forward pass and FlagEmbedding's scores."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragkv.errors import ConfigError, ModelLoadError, RetrievalError
from ragkv.retrievers import CrossEncoder

QUESTION = "Who founded Halden Works?"
TEXTS = [
    "Halden Works was founded by Maren Quist in the town of Oslo.",
    "Der Fluss fließt durch die Stadt. 東京 Москва",
    "",
    "copper",
    "The price of copper rose again. " * 30,
    "La ville de Paris 🚀 \u0645\u0631\u062d\u0628\u0627",
]


@pytest.fixture(scope="module")
def reranker(reranker_folder: Path) -> CrossEncoder:
    return CrossEncoder(str(reranker_folder), device="cpu")


@pytest.fixture(scope="module")
def short(reranker_folder: Path) -> CrossEncoder:
    return CrossEncoder(str(reranker_folder), device="cpu", max_tokens=40)


@pytest.fixture(scope="module")
def plain(reranker_folder: Path) -> Any:
    """Score one pair at a time with transformers; the text is truncated to fit."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(reranker_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(reranker_folder)

    def score(question: str, text: str, limit: int = 512) -> float:
        # as lists: transformers ignores an empty second string
        pair = tokenizer([question], [text], truncation="only_second", max_length=limit, return_tensors="pt")
        with torch.inference_mode():
            return float(model(**pair).logits)

    return score


def test_scores_are_transformers_logits(reranker, plain):
    found = reranker.score(QUESTION, TEXTS)
    assert np.std(found) > 0.1
    np.testing.assert_allclose(found, [plain(QUESTION, text) for text in TEXTS], atol=1e-4)
    assert all(type(logit) is float for logit in found)


def test_the_text_is_cut_never_the_question(short, plain):
    long = TEXTS[4] * 60
    assert len(long) > 50_000
    assert short.score(QUESTION, [long])[0] == pytest.approx(plain(QUESTION, long, 40), abs=1e-4)
    assert short.score(QUESTION, [long])[0] == pytest.approx(short.score(QUESTION, [long + " mill"])[0], abs=1e-4)
    assert abs(short.score(QUESTION + " Oslo", [long])[0] - short.score(QUESTION, [long])[0]) > 1e-3


def test_a_question_beyond_three_quarters_is_cut_there(short, plain):
    words = "the mill in the north closed its doors and " * 2000
    kept = short._tokenizer.beginning(words, 30)
    assert 0 < len(short._tokenizer([kept])[0].ids) - 2 <= 30
    assert words.startswith(kept)
    assert short.score(words, ["Oslo", TEXTS[4]]) == pytest.approx([plain(kept, t, 40) for t in ("Oslo", TEXTS[4])])


def test_candidates_of_one_batch_are_one_forward_pass(reranker, monkeypatch):
    passes: list[int] = []
    forward = reranker._forward
    monkeypatch.setattr(reranker, "_forward", lambda rows: passes.append(1) or forward(rows))
    reranker.score(QUESTION, TEXTS[:4])
    assert len(passes) == 1


@pytest.mark.parametrize("question", ["", "  ", "🚀", "half \ud83d"])
def test_questions_without_words_get_the_models_logit(question, reranker, plain):
    read = question.replace("\ud83d", "\ufffd")
    np.testing.assert_allclose(reranker.score(question, TEXTS), [plain(read, text) for text in TEXTS], atol=1e-4)


def test_batches_change_nothing(reranker, capfd):
    texts = [f"{TEXTS[i % 6]} {i}" for i in range(60)]
    found = reranker.score(QUESTION, texts)
    np.testing.assert_allclose(found, [reranker.score(QUESTION, [text])[0] for text in texts], atol=1e-5)
    assert capfd.readouterr().err == ""


def test_fifty_threads_at_once(reranker):
    questions = [f"{QUESTION} {i}" for i in range(50)]
    alone = [reranker.score(question, TEXTS[:2]) for question in questions]
    start = threading.Barrier(50)

    def ask(question: str) -> list[float]:
        start.wait()
        return reranker.score(question, TEXTS[:2])

    with ThreadPoolExecutor(50) as pool:
        np.testing.assert_allclose(list(pool.map(ask, questions)), alone, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"max_tokens": 513}, {"max_tokens": 15}])
def test_wrong_options(wrong, reranker_folder):
    with pytest.raises(ConfigError):
        CrossEncoder(str(reranker_folder), device="cpu", **wrong)


def test_what_is_no_reranker(embedder_folder, reranker_folder, tmp_path, tokenizer):
    with pytest.raises(ModelLoadError, match=r"no classification head .*XLMRobertaModel"):
        CrossEncoder(str(embedder_folder), device="cpu")
    # transformers would initialise it at random.
    copy = shutil.copytree(reranker_folder, tmp_path / "copy")
    shutil.copy(embedder_folder / "model.safetensors", copy / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"lacks weights \(classifier"):
        CrossEncoder(str(copy), device="cpu")
    from transformers import XLMRobertaConfig, XLMRobertaForSequenceClassification

    config = XLMRobertaConfig.from_pretrained(reranker_folder, num_labels=3)
    XLMRobertaForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="has 3 output classes"):
        CrossEncoder(str(tmp_path), device="cpu")


def test_numbers_that_are_none_are_an_error(reranker, monkeypatch):
    monkeypatch.setattr(reranker, "_forward", lambda rows: [float("nan")] * len(rows))
    with pytest.raises(RetrievalError, match="infinite or undefined"):
        reranker.score(QUESTION, TEXTS)
