"""Questions over the example corpus through `ragkv query --questions`, by every engine, and killed on the way."""

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
OTHERWISE = ("full", "block", "pced", "mapreduce")
"""Engines that each read otherwise than the rest: no KV, all chunks at once, a chunk a sequence, in two stages."""
SAME = ("question", "answer", "engine", "finish_reason", "sources")


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """In fp32, so that no answer depends on what else is in the batch."""
    folder = tmp_path_factory.mktemp("example") / "index"
    settings = {"dtype": "float32", "tuning": {"mapreduce": {"summary_tokens": 8}}}
    with RagKV.create(folder, model="mini", device="cpu", **settings) as made:
        made.ingest(EXAMPLES / "corpus")
    return folder


def asked(folder, count: int) -> Path:
    """`count` questions with ids, the 40 again and again, in different words."""
    path = folder / "questions.jsonl"
    words = ["{}", "Tell me: {}", "{} Say it in one sentence.", "I ask again: {}", "{} Please answer."]
    rows = [
        {"id": n, "question": words[n // len(QUESTIONS) % len(words)].format(QUESTIONS[n % len(QUESTIONS)]["question"])}
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def answered(output: Path) -> list[dict]:
    return [json.loads(line) for line in output.read_text().splitlines()]


ENGINES = [pytest.param(name, marks=[pytest.mark.nightly] * (name not in OTHERWISE)) for name in engine_names()]
"""The others by `make test-all`: each engine is held against its reference elsewhere."""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_questions_by_every_engine(ragkv, example, tmp_path, engine):
    check(ragkv, example, tmp_path, engine, count=8, compared=2, kill=engine == "pced" or NIGHTLY)


@pytest.mark.nightly
@pytest.mark.skipif(not NIGHTLY, reason="hours: set RAGKV_NIGHTLY=1")
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("engine", engine_names())
def test_a_thousand_questions_by_every_engine(ragkv, example, tmp_path, engine):
    check(ragkv, example, tmp_path, engine, count=1000, compared=100, kill=True)


def check(ragkv, example, tmp_path, engine, *, count: int, compared: int, kill: bool) -> None:
    """Killed half-way and resumed, if `kill`; in order, and the answers of single queries."""
    output, questions, chance = tmp_path / "answers.jsonl", asked(tmp_path, count), random.Random(f"{engine} {count}")
    command = [
        "query", "--index", example, "--device", "cpu", "--questions", questions, "--output", output,
        "--engine", engine, "--max-new-tokens", 12,
    ]  # fmt: skip
    left = chance.randrange(count // 4, count // 2) if kill else 0
    if kill:
        killed = CliChild(left, chance.randrange(2000), *command, program=KILLED)
        assert killed.end()[0] == -signal.SIGKILL
    done = ragkv(*command, "--json")
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["kept"] + summary["answered"] == count
    assert summary["kept"] in (left, left + kill)  # the last line may have been whole
    found = answered(output)
    assert [row["id"] for row in found] == list(range(count))
    with RagKV.open(example, device="cpu") as rag:
        for row in chance.sample(found, compared):
            alone = json.loads(json.dumps(rag.query(row["question"], engine=engine, max_new_tokens=12).to_json()))
            assert {key: row[key] for key in SAME} == {key: alone[key] for key in SAME}
