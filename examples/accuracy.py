"""Ask every question of a questions.jsonl through every engine: a gold answer must appear in the output.

`python examples/accuracy.py` ingests examples/corpus into a temporary index; `--folder` takes another folder that
holds corpus/ and questions.jsonl (`examples/build_corpus.py --seed N --output FOLDER` writes one).
"""

import argparse
import json
import tempfile
from pathlib import Path

from ragkv import RagKV

ENGINES = ("full", "block", "ape", "pced")


def accuracy(rag: RagKV, questions: list[dict], engine: str) -> dict[int, list[bool]]:
    """Right or wrong for every question, by its number of hops."""
    found: dict[int, list[bool]] = {}
    for question in questions:
        text = rag.query(question["question"], engine=engine, max_new_tokens=64).text.lower()
        found.setdefault(question["hops"], []).append(any(gold.lower() in text for gold in question["answers"]))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    folder = parser.parse_args().folder
    lines = (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as index, RagKV.create(index) as rag:
        rag.ingest(folder / "corpus")
        for engine in ENGINES:
            found = accuracy(rag, [json.loads(line) for line in lines], engine)
            each = ", ".join(f"{hops} hop: {sum(ok)} of {len(ok)}" for hops, ok in sorted(found.items()))
            every = [ok for oks in found.values() for ok in oks]
            print(f"{engine:6} {each}; all: {sum(every) / len(every):.1%}")
