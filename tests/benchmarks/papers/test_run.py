"""A table is measured, drawn and written; its page can be judged again without measuring."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure as Sheet

from ragkv.benchmarks.evaluation.answers import Candidate, ExampleResult
from ragkv.benchmarks.evaluation.metrics import Example, Task
from ragkv.benchmarks.papers.plots import Picture
from ragkv.benchmarks.papers.run import (
    ILLUSTRATIONS,
    TABLES,
    RunOptions,
    TableResult,
    illustrate,
    run_table,
    to_json,
    to_markdown,
    write_table,
)
from ragkv.benchmarks.papers.table import (
    Cell,
    Column,
    Figure,
    Order,
    Origin,
    Paper,
    Table,
    TableRow,
)
from ragkv.errors import ConfigError


@pytest.fixture
def small() -> Table:
    """A small table for a random model with meaningless answers."""
    return Table(
        name="small",
        title="A small table",
        follows="Table 9",
        lines=(
            TableRow(label="All", engine="full", retrieval="bm25"),
            TableRow(label="PCED", engine="pced(gamma=1)", retrieval="bm25"),
            TableRow(label="PCED, coarse", engine="pced(gamma=1)", retrieval="bm25", codec="int4", same_as="PCED"),
            TableRow(label="again", engine="pced(gamma=1)", retrieval="bm25", same_as="PCED"),
            TableRow(label="tuned", engine="block", role="tuned"),
        ),
        columns=(
            Column(label="code", task="icl(shots=1)", chunks=2),
            Column(label="shots", task="icl(shots=1, classes=2)", chunks=2, limit=2),
            Column(label="seen", task="icl(shots=1, classes=2)", chunks=2, limit=2, kind="seen"),
            Column(label="same", task="icl(shots=1)", chunks=2, measure="same"),
            Column(label="mean", mean_of=("code", "shots")),
        ),
        paper=(Paper(caption="Table 9, M", columns=("X",), values={"All": (31.5,), "PCED": (None,)}),),
        orders=(
            Order(left=Cell("All", "code"), relation=">=", right=Cell("PCED", "code"), source="X 3 to 2"),
            Order(left=Cell("All", "mean"), relation=">", right=Cell("All", "mean"), source="X 3 to 3"),
            Order(left=Cell("tuned", "code"), relation=">", right=Cell("All", "code"), source="X 4 to 3"),
        ),
        limit=3,
        remarks=("Nothing is learnt here.",),
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Answers are shared between tests."""
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


def test_markdown(fill):
    result = fill()
    text = to_markdown(result)
    assert text.startswith(
        f"# A small table\n\nFollows Table 9. Made by `{result.origin.command}`.\n\n|  | code | shots |"
    )
    assert "\n| PCED, coarse | " in text
    assert "\n| All | 31.5 |\n| PCED |  |\n" in text  # the paper's
    assert "- code: 3 questions of `icl(shots=1)`, 2 chunks, classification." in text
    assert "- seen: 1 question of `icl(shots=1, classes=2)`, 2 chunks, classification." in text
    assert "- Nothing is learnt here." in text
    assert "- Left out for want of a checkpoint: tuned (`--model tuned=FOLDER`)." in text
    assert "in float32" in text or "in auto" in text
    assert "seed 2; ragkv " in text
    assert "| All (mean) > All (mean) | not shown | +0.0 points (-52.2 to +52.2) | X 3 to 3 |" in text
    assert "| tuned (code) > All (code) | not measured |  | X 4 to 3 |" in text
    assert "What differs" not in text  # no verdict fails
    noted = to_markdown(fill(), "All is what it is.\n")
    assert noted.endswith("## What differs, and why\n\nAll is what it is.\n")


def test_files_and_what_was_written_by_hand(fill, tmp_path):
    folder = tmp_path / "deep" / "results"
    result = fill()
    assert write_table(result, folder) == (folder / "small.json", folder / "small.md")
    (folder / "small.notes.md").write_text("Because of the weather.")
    write_table(result, folder)
    assert "Because of the weather." in (folder / "small.md").read_text()
    assert (folder / "small.notes.md").read_text() == "Because of the weather."
    assert sorted(path.name for path in folder.iterdir()) == ["small.json", "small.md", "small.notes.md"]
    payload = json.loads((folder / "small.json").read_text())
    assert payload == json.loads(json.dumps(to_json(result)))
    assert {"task", "engine", "metric", "value", "n", "ci95", "seed"} <= payload["rows"][0].keys()
    assert payload["origin"]["seed"] == 2
    assert len(payload["origin"]["models"][""]["fingerprint"]) == 12
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_table(result, tmp_path / "file")


ORIGIN = Origin(
    command="python -m ragkv.benchmarks.papers some",
    commit="abc",
    seed=0,
    limit=None,
    models={},
    versions={},
    device="cpu",
)


def filled(table: Table, **more: object) -> TableResult:
    """Every cell measured, each with a different value."""
    places = [Cell(line.label, column.label) for line in table.lines for column in table.columns]
    cells = {
        cell: Figure(value=at / len(places), ci95=(at / len(places) / 2, 1.0), n=5) for at, cell in enumerate(places)
    }
    rest: dict[str, Any] = {"tasks": {}, "results": {}, **more}
    return TableResult(table=table, lines=table.lines, cells=cells, verdicts=(), origin=ORIGIN, **rest)


def axes_of(picture: Picture) -> Any:
    """The axes of a picture with one part."""
    sheet = Sheet(figsize=picture.size)
    picture.draw(sheet)
    [axes] = sheet.axes
    return axes


@pytest.mark.parametrize("name", sorted(ILLUSTRATIONS.keys() - {"pced-2"}))
def test_what_is_drawn_is_what_was_measured(name):
    result = filled(TABLES[name])
    axes = axes_of(illustrate(result))
    values = {figure.value for figure in result.cells.values()}
    if axes.containers:
        assert {bar.get_height() for bars in axes.containers for bar in bars} == values
        return
    curves = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]
    assert curves
    for x, y in curves:
        assert x == sorted(set(x))
        assert len(x) > 1
        assert set(y) <= values
    if name not in ("pced-4", "pced-5"):  # their rows without a number appear only in the table
        assert {value for _, y in curves for value in y} == values


EXAMPLE = Example(
    example_id="0",
    question="In which town was the founder of Halden Works born?",
    chunks=("# Halden Works\n\nFounded by Mira Oskel.", "# Mira Oskel\n\nA pilot.", "# Mira Oskel\n\nBorn in Veldran."),
    answers=("Veldran",),
    kind="two hops",
    needed=(0, 2),
)


def answer(score: float | None, *winners: int | None) -> ExampleResult:
    trace = tuple((f" t{at}", winner) for at, winner in enumerate(winners))
    text = "".join(piece for piece, _ in trace).strip()
    return ExampleResult(
        task="hops",
        example=EXAMPLE,
        candidate=Candidate(engine="pced"),
        text=text,
        score=score,
        chunks=3,
        trace=(*trace, ("", None)),
    )


def test_files_of_a_table_with_its_picture(tmp_path: Path):
    table = TABLES["pced-2"]
    cell = Cell("PCED", "two hops")
    hopping = answer(1.0, 0, 2)
    task = Task(name="hops", metric="subspan_em", examples=[EXAMPLE])
    result = filled(table, results={cell: [hopping]}, tasks={"two hops": task})
    files = write_table(result, tmp_path / "results")
    assert [path.name for path in files] == ["pced-2.json", "pced-2.md", "pced-2.svg", "pced-2.png"]
    page = files[1].read_text(encoding="utf-8")
    assert "](pced-2.svg)" in page
    assert "Question: In which town" in page
    assert "made by: python -m ragkv.benchmarks.papers some" in files[2].read_text(encoding="utf-8")
    bare = write_table(result, tmp_path / "bare", pictures=False)
    assert [path.name for path in bare] == ["pced-2.json", "pced-2.md"]
    assert "svg" not in bare[1].read_text(encoding="utf-8")
