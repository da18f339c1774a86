"""Print the first question about examples/corpus, which CI asks every engine, or about the folder given."""

import json
import sys
from pathlib import Path

name = {"documents": "documents.jsonl"}.get(sys.argv[-1], "questions.jsonl")
first = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()[0]
print(json.loads(first)["question"])
