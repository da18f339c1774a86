"""`ragkv eval answers` and `ragkv eval tasks`, as typed."""

import json

import pytest

from ragkv.runtime import Runtime

SMALL = "secret-code(words=5)"


@pytest.fixture
def ask(ragkv, model_folder, tmp_path):
    def run(*arguments, engines="full,pced(gamma=1)"):
        own = ["--model", model_folder, "--work", tmp_path / "work", "--engines", engines, "--max-new-tokens", 3]
        return ragkv("eval", "answers", *arguments, *own)

    return run


def test_rows_of_a_task(ask, tmp_path):
    output = tmp_path / "out.json"
    found = ask(SMALL, "--chunks", "1,2", "--limit", 2, "--json", "--output", output, "--seed", 3)
    assert found.code == 0, found.err
    rows = json.loads(found.out)
    assert [(row["task"], row["engine"], row["n"]) for row in rows] == [
        (f"{SMALL}/{chunks}", engine, 2) for chunks in (1, 2) for engine in ("full", "pced(gamma=1)")
    ]
    assert [row["baseline"] for row in rows[:2]] == [None, "full"]
    assert all(row["options"] == ({} if row["engine"] == "full" else {"gamma": 1}) for row in rows)
    assert all(row["chunks"] == int(row["task"][-1]) and row["seed"] == 3 for row in rows)
    report = json.loads(output.read_text())
    assert report["rows"] == rows
    assert [(task["metric"], task["examples"]) for task in report["tasks"]] == [("subspan_em", 2)] * 2


def test_a_table_and_its_markdown(ask, tmp_path):
    output = tmp_path / "out.md"
    found = ask(SMALL, "--chunks", 1, "--limit", 2, "--output", output)
    lines = found.out.splitlines()
    assert lines[0].split() == ["engine", f"{SMALL}/1"]
    assert [line.split()[0] for line in lines[1:3]] == ["full", "pced(gamma=1)"]
    assert lines[4].startswith("Difference from full")
    assert len(lines) == 7
    text = output.read_text()
    assert f"| engine | {SMALL}/1 |\n| --- | ---: |\n| full | " in text
    assert f"- {SMALL}/1: 2 questions, subspan_em" in text
    quiet = ask(SMALL, "--chunks", 1, "--limit", 2, "--quiet")
    assert (quiet.out, quiet.err) == (found.out, "")


def test_ctrl_c_says_how_far_it_came_and_the_next_run_goes_on(ask, monkeypatch):
    decode, calls = Runtime.decode, []

    def stopping(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(Runtime, "decode", stopping)
    stopped = ask(SMALL, "--chunks", 1, "--limit", 2)
    assert (stopped.code, stopped.out) == (130, "")
    assert "interrupted after 2 of 4 answers" in stopped.err
    assert ask(SMALL, "--chunks", 1, "--limit", 2).code == 0
    assert len(calls) == 5


def test_questions_of_an_index(ask, index, questions):
    found = ask(questions, "--index", index, "--json")
    assert found.code == 0, found.err
    [full, pced] = json.loads(found.out)
    assert (full["task"], full["n"], full["retrieval"], full["codec"]) == ("questions", 1, "bm25", "raw")
    assert pced["baseline"] == "full"


def test_a_file_of_ones_own_chunks(ask, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"question": "Who?", "chunks": ["Mira.", "Ann."], "answers": ["Mira"]}) + "\n")
    [row] = json.loads(ask(path, "--json", engines="block").out)
    assert (row["task"], row["n"], row["chunks"], row["baseline"]) == ("mine", 1, 2, None)


def test_tasks_are_listed(ragkv):
    listed = json.loads(ragkv("eval", "tasks", "--json").out)
    assert {"worlds", "vt"} <= {task["task"] for task in listed}
    assert all(task["about"] and "seed" in task["options"] for task in listed)
    assert "secret-code" in ragkv("eval", "tasks").out
