"""Questions over the example corpus with `ragkv query --questions`, killed and resumed."""

import json
import random
import signal
from pathlib import Path

import pytest
from clichild import CliChild
from killed import KILLED
from nightly import NIGHTLY

from ragkv import RagKV
from ragkv.engines import engine_names

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTIONS = [json.loads(line) for line in (EXAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
COUNT, COMPARED = (1000, 100) if NIGHTLY else (8, 2)
SAME = ("question", "answer", "engine", "finish_reason", "sources")
ENGINES = [pytest.param(name, marks=[pytest.mark.nightly] * (name != "pced")) for name in engine_names()]
"""One engine; `make test-all` adds the others. All engines are compared with a reference elsewhere."""


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """An index in fp32, so that no answer depends on the rest of the batch."""
    folder = tmp_path_factory.mktemp("example") / "index"
    settings = {"dtype": "float32"}
    with RagKV.create(folder, model="mini", device="cpu", **settings) as made:
        made.ingest(EXAMPLES / "corpus" / "companies")
    return folder


def asked(folder) -> Path:
    """This many questions with ids: the same 40, in different words."""
    path = folder / "questions.jsonl"
    words = ["{}", "Tell me: {}", "{} Say it in one sentence.", "I ask again: {}", "{} Please answer."]
    rows = [
        {"id": n, "question": words[n // len(QUESTIONS) % len(words)].format(QUESTIONS[n % len(QUESTIONS)]["question"])}
        for n in range(COUNT)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.slow
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("engine", ENGINES)
def test_many_questions_killed_half_way(ragkv, example, tmp_path, engine):
    """After resuming: in order, and with the answers of single queries."""
    output, questions, chance = tmp_path / "answers.jsonl", asked(tmp_path), random.Random(f"{engine} {COUNT}")
    command = [
        "query", "--index", example, "--device", "cpu", "--questions", questions, "--output", output,
        "--engine", engine, "--max-new-tokens", 12,
    ]  # fmt: skip
    left = chance.randrange(COUNT // 4, COUNT // 2)
    assert CliChild(left, chance.randrange(2000), *command, program=KILLED).end()[0] == -signal.SIGKILL
    done = ragkv(*command, "--json")
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["kept"] + summary["answered"] == COUNT
    assert summary["kept"] in (left, left + 1)  # the last line may have been complete
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in found] == list(range(COUNT))
    with RagKV.open(example, device="cpu") as rag:
        for row in chance.sample(found, COMPARED):
            alone = json.loads(json.dumps(rag.query(row["question"], engine=engine, max_new_tokens=12).to_json()))
            assert {key: row[key] for key in SAME} == {key: alone[key] for key in SAME}
