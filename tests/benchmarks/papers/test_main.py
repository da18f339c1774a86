"""`python -m ragkv.benchmarks.papers`."""

import json

import pytest
from outcome import typed

from ragkv.benchmarks.papers import __main__ as program
from ragkv.benchmarks.papers import run as catalog
from ragkv.benchmarks.papers.__main__ import main
from ragkv.benchmarks.papers.run import TABLES
from ragkv.benchmarks.papers.table import Cell, Column, Order, Table, TableRow


@pytest.fixture
def papers(capsys, monkeypatch):
    return typed(main, capsys, monkeypatch)


@pytest.fixture
def fill(papers, tmp_path, monkeypatch):
    small = Table(
        name="small",
        title="A small table",
        follows="Table 9",
        lines=(TableRow(label="All", engine="full"), TableRow(label="tuned", engine="block", role="tuned")),
        columns=(Column(label="shots", task="icl(shots=1, classes=2)", chunks=1),),
        orders=(Order(left=Cell("All", "shots"), relation=">", right=Cell("All", "shots"), source="X 3 to 2"),),
        limit=2,
    )
    monkeypatch.setattr(catalog, "TABLES", {"small": small})
    monkeypatch.setattr(program, "TABLES", {"small": small})

    def run(*arguments):
        return papers(*arguments, "--work", tmp_path / "work", "--output", tmp_path / "out")

    return run


def test_a_table_is_printed_and_written(fill, model_folder, tmp_path):
    done = fill("small", "--model", model_folder, "--limit", 1, "--seed", 4)
    assert done.code == 0, done.err
    assert done.out.startswith("A small table\n")
    assert "0 of 1 statements of order hold here, 1 is not shown (the interval leaves it open)." in done.out
    assert "not shown: All (shots) > All (shots), +0.0 points (-97.5 to +97.5)" in done.out
    assert "small.json and small.md written" in done.err
    report = json.loads((tmp_path / "out" / "small.json").read_text())
    command = f"python -m ragkv.benchmarks.papers small --model {model_folder} --limit 1 --seed 4"
    assert report["origin"]["command"] == command
    assert f"Made by `{command}`." in (tmp_path / "out" / "small.md").read_text()
    assert [row["n"] for row in report["rows"]] == [1]


def test_the_tables_are_listed(papers):
    assert [line.split()[0] for line in papers("--list").out.splitlines() if line[0] != " "][1:] == [*TABLES]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pced-2"], "choose one of small, or all"),
        (["small", "--model", "a=b"], "no such role"),
        (["small", "--model", "tuned=b", "--model", "tuned=c"], "tuned has two models"),
        (["--quiet"], "Which table?"),
    ],
)
def test_what_cannot_be_is_refused(fill, arguments, message):
    found = fill(*arguments)
    assert (found.code, found.out) == (2, "")
    assert message in " ".join(found.err.split())
