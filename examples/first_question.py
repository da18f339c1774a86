"""Print the first question of examples/questions.jsonl: what `make demo` and CI ask every engine."""

import json
from pathlib import Path

first = (Path(__file__).parent / "questions.jsonl").read_text(encoding="utf-8").splitlines()[0]
print(json.loads(first)["question"])
