"""`ragkv query --questions`: input and output lines, resuming, errors by line."""

import fcntl
import json
import signal

import pytest
from clichild import CliChild
from killed import KILLED
from nightly import NIGHTLY

ROWS = [
    {"id": "a", "question": "Who founded Halden Works?", "answers": ["Mira"]},
    {"id": 2, "question": "What does Bolt Ltd make?"},
    {"question": "Who founded Halden Works?"},
]


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def ask(ragkv, index, tmp_path):
    def run(rows, *arguments: object):
        questions = tmp_path / "many.jsonl"
        made = (row if isinstance(row, (str, bytes)) else json.dumps(row) for row in rows)
        questions.write_bytes(b"\n".join(row if isinstance(row, bytes) else row.encode() for row in made))
        return ragkv(
            "query", "--index", index, "--device", "cpu", "--questions", questions, "--max-new-tokens", 2,
            "--output", tmp_path / "answers.jsonl", *arguments,
        )  # fmt: skip

    return run


def test_every_question_is_answered_as_one_by_one(ragkv, ask, index, tmp_path):
    done = ask(ROWS, "--engine", "block")
    assert done.code == 0
    assert "3 answers in" in done.out
    found = lines(tmp_path / "answers.jsonl")
    assert [row.get("id") for row in found] == ["a", 2, None]
    assert [row["question"] for row in found] == [row["question"] for row in ROWS]
    alone = ragkv(
        "query", ROWS[1]["question"], "--index", index, "--device", "cpu", "--engine", "block", "--json",
        "--max-new-tokens", 2,
    )  # fmt: skip
    alone = json.loads(alone.out)
    same = ("question", "answer", "engine", "finish_reason", "sources", "decoding")
    assert {key: found[1][key] for key in same} == {key: alone[key] for key in same}
    assert found[2]["kv"]["memory_hits"] == found[2]["kv"]["hits"] > 0  # the first question loaded them


def test_it_goes_on_where_it_was(ask, tmp_path):
    output = tmp_path / "answers.jsonl"
    assert ask(ROWS[:1]).code == 0
    with output.open("a") as file:
        file.write('{"id": 2, "question": "What does B')  # killed during a write
    kept = output.read_text().splitlines()[0]
    summary = json.loads(ask(ROWS, "--json").out)
    assert (summary["kept"], summary["answered"], summary["failed"]) == (1, 2, [])
    assert output.read_text().splitlines()[0] == kept
    assert [row.get("id") for row in lines(output)] == ["a", 2, None]
    before = output.read_text()
    assert json.loads(ask(ROWS, "--json").out)["kept"] == 3
    assert output.read_text() == before


BAD = [
    ("no json", "not valid JSON"),
    ("[1]", "a line is an object in braces"),
    ({"text": "no question"}, '"question" that is not empty'),
    (ROWS[0], "the id 'a' is that of"),
    ({"id": [1], "question": "x"}, '"id" is a text or a whole number'),
    ({"question": "Who?", "engine": "turbo"}, "Unknown engine 'turbo'"),
    ({"question": "Who?", "engine": 7}, '"engine" must be a text'),
    ({"question": "Who?", "top_k": "8"}, "\"top_k\" must be a whole number, not '8'"),
    ({"question": "Who?", "max_new_tokens": 0}, '"max_new_tokens" must be at least 1, not 0'),
    ({"question": "Who?", "where": {"source": "x"}}, '"where" is a text that is not blank, or a list'),
    ({"question": "Who?", "where": "source=none*"}, "No document matches"),
    ({"question": "Who?", "context": ["Bolt", " "]}, '"context" is a text that is not blank, or a list'),
    (b'{"question": "\xff"}', "not valid UTF-8"),
    ("[" * 5000, "not valid JSON"),
]


def test_bad_lines_are_named_and_stop_nothing(ask, tmp_path):
    rows = [ROWS[0], *(row for row, _ in BAD), ROWS[1]]
    done = ask(rows)
    assert done.code == 1
    assert f"{len(BAD)} failed" in done.out
    assert "2 answers in" in done.out
    assert [row["id"] for row in lines(tmp_path / "answers.jsonl")] == ["a", 2]
    summary = json.loads(ask(rows, "--json").out)
    assert (summary["questions"], summary["kept"], summary["answered"]) == (len(rows), 2, 0)
    messages = [line for line in done.err.splitlines() if "many.jsonl, line " in line]
    for number, (message, failed, (_, what)) in enumerate(zip(messages, summary["failed"], BAD, strict=True), 2):
        assert f"many.jsonl, line {number}: " in message
        assert what in message
        assert failed["line"] == number
        assert what in failed["error"]


def test_a_line_has_options_and_a_context_of_its_own(ragkv, ask, index, tmp_path):
    rows = [
        {"question": ROWS[0]["question"], "engine": "block", "max_new_tokens": 5},
        {"question": ROWS[0]["question"], "where": "source=bolt*", "top_k": 1},
        {"question": ROWS[0]["question"], "context": ["Halden Works was founded by Ulf.", "It makes lamps."]},
        {"question": ROWS[0]["question"], "context": "Halden Works was founded by Ulf.", "engine": "ape"},
    ]
    rows = [{"id": number} | row for number, row in enumerate(rows)]
    summary = json.loads(ask(rows, "--json").out)
    assert (summary["answered"], summary["tokens"]) == (4, 11)
    found = lines(tmp_path / "answers.jsonl")
    assert [row["id"] for row in found] == [0, 1, 2, 3]
    assert [row["engine"] for row in found] == ["block", found[1]["engine"], found[1]["engine"], "ape"]
    assert [source["document"] for source in found[1]["sources"]] == ["bolt.txt"]
    texts = [[source["text"] for source in row["sources"]] for row in found[2:]]
    assert texts == [rows[2]["context"][::-1], [rows[3]["context"]]]
    alone = ragkv(
        "query", rows[0]["question"], "--index", index, "--device", "cpu", "--engine", "block", "--max-new-tokens", 5,
        "--json",
    )  # fmt: skip
    assert json.loads(alone.out)["answer"] == found[0]["answer"]
    before = (tmp_path / "answers.jsonl").read_text()
    assert json.loads(ask(rows, "--json").out)["kept"] == 4
    assert (tmp_path / "answers.jsonl").read_text() == before


def test_an_answer_that_comes_later_is_put_into_its_place(ask, tmp_path):
    late = {"id": "late", "question": "What does Bolt Ltd make?"}
    assert ask([ROWS[0], late | {"where": "source=none*"}, ROWS[1]]).code == 1
    assert ask([ROWS[0], late, ROWS[1]]).code == 0
    assert [row["id"] for row in lines(tmp_path / "answers.jsonl")] == ["a", "late", 2]


def test_one_process_writes_at_a_time(ask, tmp_path):
    output = tmp_path / "answers.jsonl"
    with output.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        done = ask(ROWS)
    assert done.code == 2
    assert "Another ragkv query is writing to" in done.err
    assert output.read_text() == ""


MANY = [{"id": number, "question": f"{ROWS[number % 2]['question']} – {number}"} for number in range(12)]


@pytest.mark.slow
def test_killed_in_the_middle_of_a_line_and_resumed(ask, index, tmp_path):
    """After some complete lines and a part of the next: nothing, half a key, half a character, all but the newline."""
    assert ask(MANY).code == 0
    output = tmp_path / "answers.jsonl"
    whole = output.read_bytes().splitlines()
    places = [(2, 0), (3, 4), (1, whole[6].index("–".encode()) + 1), (1, len(whole[8]))]
    if not NIGHTLY:
        places = [(6, whole[6].index("–".encode()) + 1), (1, len(whole[8]))]
    output.unlink()
    done = 0
    for left, part in places:
        command = ("query", "--index", index, "--device", "cpu", "--max-new-tokens", 2)
        files = ("--questions", tmp_path / "many.jsonl", "--output", output)
        code, _, message = CliChild(left, part, *command, *files, program=KILLED).end()
        assert code == -signal.SIGKILL, message
        done += left
        assert [json.loads(line)["id"] for line in output.read_bytes().split(b"\n")[:done]] == [*range(done)]
    assert json.loads(ask(MANY, "--json").out)["answered"] in (12 - done, 11 - done)  # all but the newline
    result = [{key: row[key] for key in ("id", "question", "answer", "sources")} for row in lines(output)]
    assert result == [{key: json.loads(row)[key] for key in result[0]} for row in whole]


def test_an_output_of_something_else_is_not_touched(ask, tmp_path):
    output = tmp_path / "answers.jsonl"
    for text, what in (
        ("precious\n", "is no answer of ragkv query"),
        ("precious without a line end", "is no answer of ragkv query"),
        ('{"question": "Other?", "engine": "ape"}\n', "answers a question that is not in the file"),
        ('{"question": "Who founded Halden Works?", "engine": "full"}\n', "answered by engine full, not ape"),
    ):
        output.write_text(text)
        done = ask(ROWS, "--engine", "ape")
        assert done.code == 2
        assert what in done.err
        assert output.read_text() == text
