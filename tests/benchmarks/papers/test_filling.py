"""A table is what its answers say; nothing is asked twice; its files say where it comes from."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ragkv.benchmarks.papers import Cell, Difference, RunOptions, run_table, to_json, to_markdown, write_table
from ragkv.benchmarks.papers.origin import commit_of
from ragkv.benchmarks.papers.page import end_of_page
from ragkv.benchmarks.papers.verdict import decide
from ragkv.errors import ConfigError, UsageError
from ragkv.evaluation import examination


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """What one test has answered, the next need not ask."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def fill(small, model_folder, work):
    def run(table=small, **settings):
        given = {"models": {"": str(model_folder)}, "work": work, "seed": 2, "max_new_tokens": 3}
        return run_table(table, RunOptions(**(given | settings)))

    return run


def test_cells_are_the_answers(fill):
    result = fill()
    assert [line.label for line in result.lines] == ["All", "PCED", "PCED, coarse", "again"]
    for line in result.lines:
        for column, n in (("code", 3), ("shots", 2), ("seen", 1), ("same", 3), ("mean", 5)):
            cell = Cell(line.label, column)
            if column == "same" and not line.same_as:
                assert cell not in result.cells
                continue
            assert result.cells[cell].n == n
            if column in ("code", "shots", "seen"):
                scores = [answer.score for answer in result.results[cell]]
                assert result.cells[cell].value == pytest.approx(sum(scores) / n)
        parts = [result.figure(line.label, column).value for column in ("code", "shots")]
        assert result.figure(line.label, "mean").value == pytest.approx(sum(parts) / 2)
    assert result.figure("again", "same").value == 1.0
    texts = [[answer.text for answer in result.results[Cell(label, "code")]] for label in ("PCED", "PCED, coarse")]
    alike = sum(ours == theirs for ours, theirs in zip(*texts, strict=True)) / 3
    assert result.figure("PCED, coarse", "same").value == pytest.approx(alike)
    assert [verdict.word for verdict in result.verdicts[1:]] == ["not shown", "not measured"]


def test_a_line_of_a_role_is_measured_when_its_model_is_named(fill, model_folder):
    result = fill(models={"": str(model_folder), "tuned": str(model_folder)})
    assert [line.label for line in result.lines][-1] == "tuned"
    assert result.verdicts[2].difference is not None
    assert set(result.origin.models) == {"", "tuned"}
    with pytest.raises(UsageError, match="tuned"):
        fill(models={"other": str(model_folder)})


def test_a_stopped_table_goes_on(fill, monkeypatch, tmp_path):
    asked = 0
    answer = examination._ContenderRun._answer

    def counted(run, example, limit):
        nonlocal asked
        asked += 1
        if asked == 5:
            raise KeyboardInterrupt
        return answer(run, example, limit)

    monkeypatch.setattr(examination._ContenderRun, "_answer", counted)
    with pytest.raises(KeyboardInterrupt):
        fill(work=tmp_path)
    first = fill(work=tmp_path)
    # 5 questions of 4 lines, one of which asks what another asks; the one that was stopped is asked again
    assert asked == 15 + 1
    assert fill(work=tmp_path).cells == first.cells
    assert fill(work=tmp_path, limit=1).figure("All", "code").n == 1
    assert asked == 15 + 1


def test_the_same_seed_makes_the_same_table(fill):
    assert to_json(fill(work=None)) == to_json(fill())
    assert fill(seed=3, limit=1).tasks["code"].examples[0] != fill(limit=1).tasks["code"].examples[0]


def test_markdown(fill):
    result = fill()
    text = to_markdown(result)
    assert text.startswith(
        f"# A small table\n\nFollows Table 9. Made by `{result.origin.command}`.\n\n|  | code | shots |"
    )
    assert "\n| PCED, coarse | " in text
    assert "\n| All | 31.5 |\n| PCED |  |\n" in text  # the paper's
    assert "- code: 3 questions of `secret-code(words=4)`, 2 chunks, subspan_em." in text
    assert "- seen: 1 question of `icl(shots=1, classes=2)`, 2 chunks, classification." in text
    assert "- Nothing is learnt here." in text
    assert "- Left out for want of a checkpoint: tuned (`--model tuned=FOLDER`)." in text
    assert "in float32" in text or "in auto" in text
    assert "seed 2; ragkv " in text
    assert "| All (mean) > All (mean) | not shown | +0.0 points (-52.2 to +52.2) | X 3 to 3 |" in text
    assert "| tuned (code) > All (code) | not measured |  | X 4 to 3 |" in text
    assert "What differs" not in text  # nothing does not hold
    noted = to_markdown(fill(), "All is what it is.\n")
    assert noted.endswith("## What differs, and why\n\nAll is what it is.\n")


def test_what_does_not_hold_asks_for_an_explanation(small):
    order = small.orders[0]
    apart = Difference(value=-0.5, ci95=(-0.7, -0.3), n=24, paired=True)
    parts = end_of_page("small", [decide(order, apart)], "")
    assert parts[-1].startswith("## What differs, and why")
    assert "write `small.notes.md`" in parts[-1]
    assert "| does not hold | -50.0 points (-70.0 to -30.0) |" in parts[-2]


def test_files_and_what_was_written_by_hand(fill, tmp_path):
    folder = tmp_path / "deep" / "results"
    result = fill()
    assert write_table(result, folder) == (folder / "small.json", folder / "small.md")
    (folder / "small.notes.md").write_text("Because of the weather.")
    write_table(result, folder)
    assert "Because of the weather." in (folder / "small.md").read_text()
    assert (folder / "small.notes.md").read_text() == "Because of the weather."
    assert sorted(path.name for path in folder.iterdir()) == ["small.json", "small.md", "small.notes.md"]
    found = json.loads((folder / "small.json").read_text())
    assert found == json.loads(json.dumps(to_json(result)))
    assert {"task", "engine", "metric", "value", "n", "ci95", "seed"} <= found["rows"][0].keys()
    assert found["origin"]["seed"] == 2
    assert len(found["origin"]["models"][""]["fingerprint"]) == 12
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_table(result, tmp_path / "file")


def test_a_prompt_without_room_is_not_counted(fill, small, monkeypatch):
    from ragkv.model.language import LanguageModel

    lines = tuple(replace(line, same_as="") for line in small.lines if line.label == "All")
    columns = (replace(small.columns[0], chunks=2), replace(small.columns[0], label="long", chunks=40))
    monkeypatch.setattr(LanguageModel, "max_positions", 700, raising=False)
    result = fill(replace(small, lines=lines, columns=columns, paper=(), orders=()))
    long = result.figure("All", "long")
    assert (long.value, long.n, long.too_long) == (None, 0, 3)
    assert "no room" in to_markdown(result)


def test_the_commit(tmp_path, monkeypatch):
    import os
    import subprocess

    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):  # whoever runs the tests may want commits signed
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))  # temporary files may lie in a checkout
    assert commit_of(tmp_path) == "unknown"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "a").write_text("1")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "b").write_text("1")
    for words in (["init", "-q"], ["add", "a", "docs"], ["commit", "-qm", "m"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    clean = commit_of(tmp_path)
    assert len(clean) == 12
    (tmp_path / "docs" / "b").write_text("2")  # what tables write
    assert commit_of(tmp_path) == clean
    (tmp_path / "a").write_text("2")
    assert commit_of(tmp_path) == f"{clean} + changes"
