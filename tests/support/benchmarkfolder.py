"""Small BEIR and LOFT folders, and an embedder whose vectors can be told by eye."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ragkv.retrievers import Embedding, ScoreKind
from ragkv.retrievers.bm25 import tokenise

TEXTS = {
    "d1": ("Halden Works", "Halden Works makes wall clocks in Tarn."),
    "d2": ("Bolt Ltd", "Bolt Ltd makes valves for ships."),
    "d3": ("", "Corvo Mills sells flour in Tarn and in Varn."),
    "d4": ("Varn", "Varn is a town by the sea."),
}
QUESTIONS = {"q1": "Who makes valves?", "q2": "Where is flour sold?", "q3": "Which towns are by the sea?"}
QRELS = [("q1", "d2", 1), ("q2", "d3", 2), ("q2", "d4", 1), ("q3", "d4", 1), ("q3", "d1", 0)]


def write_lines(path: Path, rows: Sequence[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def beir_folder(folder: Path) -> Path:
    write_lines(folder / "corpus.jsonl", [{"_id": i, "title": t, "text": x} for i, (t, x) in TEXTS.items()])
    write_lines(folder / "queries.jsonl", [{"_id": i, "text": x} for i, x in QUESTIONS.items()])
    (folder / "qrels").mkdir()
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in QRELS)]
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder


def loft_folder(folder: Path, name: str = "test_queries.jsonl") -> Path:
    corpus = [{"pid": i, "title_text": t, "passage_text": x, "metadata": {}} for i, (t, x) in TEXTS.items()]
    write_lines(folder / "corpus.jsonl", corpus)
    rows = [
        {"qid": i, "query_text": x, "answers": [[d, s] for q, d, s in QRELS if q == i], "metadata": {}}
        for i, x in QUESTIONS.items()
    ]
    write_lines(folder / name, rows)
    return folder


class WordEmbedder:
    """Words hashed to 32 dimensions: equal words, equal vectors. Counts the texts that it was given."""

    name = "words"
    modes: frozenset[ScoreKind] = frozenset({"dense", "sparse", "colbert"})
    fingerprint = hashlib.sha256(b"words").hexdigest()

    def __init__(self) -> None:
        self.embedded: list[str] = []
        self.asked: list[str] = []

    def embed_documents(self, texts: Sequence[str]) -> Embedding:
        self.embedded += texts
        return self._embed(texts)

    def embed_query(self, text: str) -> Embedding:
        self.asked.append(text)
        return self._embed([text])

    def _embed(self, texts: Sequence[str]) -> Embedding:
        rows = [
            np.stack([_word(word) for word in tokenise(text)]) if tokenise(text) else np.zeros((0, 32), np.float32)
            for text in texts
        ]
        sums = [found.sum(axis=0) for found in rows]
        dense = np.stack([total / max(float(np.linalg.norm(total)), 1e-9) for total in sums]).astype(np.float32)
        sparse: list[Mapping[str, float]] = [dict.fromkeys(tokenise(text), 0.5) for text in texts]
        return Embedding(dense=dense, sparse=sparse, colbert=rows)


def _word(word: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "little")
    vector = np.random.default_rng(seed).standard_normal(32)
    return (vector / np.linalg.norm(vector)).astype(np.float32)
