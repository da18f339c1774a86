"""A small BEIR folder, and an embedder that records its input."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from words import WordEmbedder

from ragkv.retrievers import Embedding

TEXTS = {
    "d1": ("Halden Works", "Halden Works makes wall clocks in Tarn."),
    "d2": ("Bolt Ltd", "Bolt Ltd makes valves for ships."),
    "d3": ("", "Corvo Mills sells flour in Tarn and in Varn."),
    "d4": ("Varn", "Varn is a town by the sea."),
}
QUESTIONS = {"q1": "Who makes valves?", "q2": "Where is flour sold?", "q3": "Which towns are by the sea?"}
QRELS = [("q1", "d2", 1), ("q2", "d3", 2), ("q2", "d1", 1), ("q3", "d4", 1), ("q3", "d1", 0)]


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


class CountingEmbedder(WordEmbedder):
    """A `WordEmbedder` that records the texts that it embeds."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.texts: list[str] = []
        self.asked: list[str] = []

    def embed_documents(self, texts: Sequence[str]) -> Embedding:
        self.texts += texts
        return super().embed_documents(texts)

    def embed_query(self, text: str) -> Embedding:
        self.asked.append(text)
        return super().embed_documents([text])
