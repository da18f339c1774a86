"""An embedder and a reranker whose results can be computed by hand: a dimension per word, a point per equal word."""

import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ragkv.retrievers import Embedding
from ragkv.retrievers.bm25 import tokenise

WIDTH = 257


class WordEmbedder:
    """dense: unit counts over hashed words; sparse: counts; ColBERT: a one-hot row per word."""

    name = "words"
    modes = frozenset(("dense", "sparse", "colbert"))

    def __init__(self, *, device: str = "cpu", max_tokens: int | None = None, salt: int = 0) -> None:
        self.salt = salt
        self.fingerprint = WordEmbedder.fingerprint_for(max_tokens, salt)
        self.embedded = 0

    @staticmethod
    def fingerprint_for(max_tokens: int | None, salt: int = 0) -> str:
        return hashlib.sha256(f"words:{salt}".encode()).hexdigest()

    def embed_documents(self, texts: Sequence[str]) -> Embedding:
        self.embedded += len(texts)
        rows = [self._rows(text) for text in texts]
        sums = [row.sum(0) for row in rows]
        return Embedding(
            dense=np.array([s / max(float(np.linalg.norm(s)), 1e-9) for s in sums], np.float32).reshape(-1, WIDTH),
            sparse=[{word: float(n) for word, n in Counter(tokenise(text)).items()} for text in texts],
            colbert=rows,
        )

    def embed_query(self, text: str) -> Embedding:
        return self.embed_documents([text])

    def _rows(self, text: str) -> np.ndarray:
        words = tokenise(text)
        rows = np.zeros((len(words), WIDTH), np.float32)
        for row, word in enumerate(words):
            rows[row, zlib.crc32(f"{self.salt}{word}".encode()) % WIDTH] = 1
        return rows


class WordReranker:
    """The logit is the number of the question's words in the text, minus two."""

    name = "words"

    def __init__(self, *, device: str = "cpu", max_tokens: int | None = None) -> None:
        self.judged: list[str] = []

    def score(self, question: str, texts: Sequence[str]) -> list[float]:
        self.judged += texts
        return [float(len(set(tokenise(question)) & set(tokenise(text)))) - 2 for text in texts]


class _Point:
    """An entry point without an installed package."""

    def __init__(self, made: object) -> None:
        self._made = made

    def load(self) -> object:
        return self._made


def install(monkeypatch, embedder: object = WordEmbedder, reranker: object = WordReranker) -> None:
    """Register both as plug-ins under the name "words"."""
    from ragkv.retrievers import embedders, rerankers

    monkeypatch.setattr(embedders.EMBEDDERS, "added", {"words": _Point(embedder)})
    monkeypatch.setattr(rerankers.RERANKERS, "added", {"words": _Point(reranker)})
