"""`ragkv query --questions`: rows in, rows out, resumed, refused by line."""

from __future__ import annotations

import json

import pytest

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
        questions.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
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
    assert found[2]["kv"]["memory_hits"] == found[2]["kv"]["hits"] > 0  # the first one read them


def test_it_goes_on_where_it_was(ask, tmp_path):
    output = tmp_path / "answers.jsonl"
    assert ask(ROWS[:1]).code == 0
    with output.open("a") as file:
        file.write('{"id": 2, "question": "What does B')  # killed while it wrote
    kept = output.read_text().splitlines()[0]
    summary = json.loads(ask(ROWS, "--json").out)
    assert (summary["kept"], summary["answered"], summary["failed"]) == (1, 2, [])
    assert output.read_text().splitlines()[0] == kept
    assert [row.get("id") for row in lines(output)] == ["a", 2, None]
    before = output.read_text()
    assert json.loads(ask(ROWS, "--json").out)["kept"] == 3
    assert output.read_text() == before


def test_a_question_without_a_match_fails_alone(ask, tmp_path):
    done = ask([{"question": "zzzz qqqq"}, ROWS[1]], "--json", "--retrieval", "bm25")
    assert done.code == 1
    summary = json.loads(done.out)
    assert (summary["answered"], len(summary["failed"])) == (1, 1)
    assert summary["failed"][0]["question"] == "zzzz qqqq"
    assert [row["id"] for row in lines(tmp_path / "answers.jsonl")] == [2]


@pytest.mark.parametrize(
    ("rows", "where", "what"),
    [
        (["no json"], "many.jsonl", "1"),
        ([ROWS[0], {"text": "no question"}], "2", '"question" that is not empty'),
        ([ROWS[0], ROWS[0]], "2", "give each line its own"),
        ([{"id": [1], "question": "x"}], "1", '"id" is a text or a whole number'),
        ([], "many.jsonl", "holds no question"),
    ],
)
def test_bad_rows_are_named_by_line(ask, tmp_path, rows, where, what):
    done = ask(rows)
    assert done.code == 2
    assert where in done.err
    assert what in done.err
    assert not (tmp_path / "answers.jsonl").exists()


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


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--top-k", 2], "Give one question"),
        (["Who?", "--questions", "q"], "Give one question"),
        (["--questions", "q"], "--questions needs --output"),
        (["Who?", "--output", "a"], "--questions needs --output"),
        (["--questions", "q", "--output", "a", "--stream"], "--stream is for one question"),
    ],
)
def test_wrong_usage(ragkv, index, arguments, what):
    done = ragkv("query", "--index", index, *arguments)
    assert done.code == 2
    assert what in done.err
