"""Pictures of tables: what is drawn is what stands in the cells, of every table that has a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ragkv.benchmarks.papers import TABLES, Cell, Figure, Origin, Table, TableResult, write_table
from ragkv.benchmarks.papers.experttrace import chosen, told, traced
from ragkv.benchmarks.papers.illustration import ILLUSTRATIONS, illustrate
from ragkv.benchmarks.papers.plot import Bars, Curves, Trace
from ragkv.evaluation.answerer import Contender
from ragkv.evaluation.example import Example, Task
from ragkv.evaluation.result import Result

ORIGIN = Origin(
    command="python -m ragkv.benchmarks.papers some",
    commit="abc",
    seed=0,
    limit=None,
    models={},
    embedder=None,
    reranker=None,
    versions={},
    device="cpu",
)


def filled(table: Table, **more: object) -> TableResult:
    """Every cell measured, each with a value of its own."""
    places = [Cell(line.label, column.label) for line in table.lines for column in table.columns]
    cells = {
        cell: Figure(value=at / len(places), ci95=(at / len(places) / 2, 1.0), n=5) for at, cell in enumerate(places)
    }
    whole: Mapping[str, object] = {
        "table": table,
        "lines": table.lines,
        "cells": cells,
        "verdicts": (),
        "tasks": {},
        "origin": ORIGIN,
        "results": {},
        **more,
    }
    return TableResult(**whole)  # type: ignore[arg-type]


def test_every_picture_belongs_to_a_table():
    assert ILLUSTRATIONS.keys() <= TABLES.keys()


@pytest.mark.parametrize("name", sorted(ILLUSTRATIONS.keys() - {"pced-2"}))
def test_what_is_drawn_is_what_was_measured(name):
    result = filled(TABLES[name])
    shown = illustrate(result)
    assert shown is not None
    values = {figure.value for figure in result.cells.values()}
    if isinstance(shown.picture, Bars):
        assert {value for bar in shown.picture.bars for value in bar.values} == values
        return
    assert isinstance(shown.picture, Curves)
    assert shown.picture.curves
    for curve in shown.picture.curves:
        assert list(curve.x) == sorted(set(curve.x))
        assert len(curve.x) > 1
        assert set(curve.y) <= values
    if name not in ("pced-4", "pced-5"):  # there, lines without a number are told in the table alone
        assert {value for curve in shown.picture.curves for value in curve.y} == values


def test_a_sweep_is_drawn_in_the_order_of_its_numbers():
    result = filled(TABLES["pced-5"])
    curves = {curve.label: curve for curve in illustrate(result).picture.curves}
    assert curves["two hops"].x == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert curves["two hops"].y[5] == result.figure("γ=2.5", "two hops").value


def test_cells_that_were_not_measured_leave_gaps():
    result = filled(TABLES["block-1"])
    lines = tuple(line for line in result.lines if line.role != "no_positions")
    cells = {cell: figure for cell, figure in result.cells.items() if cell.line in {line.label for line in lines}}
    bars = illustrate(filled(TABLES["block-1"], lines=lines, cells=cells)).picture.bars
    assert [bar.label for bar in bars] == [line.label for line in lines]
    nothing = {cell: Figure(value=None, ci95=None, n=0) for cell in cells}
    assert illustrate(filled(TABLES["block-1"], cells=nothing)) is None
    assert illustrate(filled(TABLES["codecs"])) is None


EXAMPLE = Example(
    example_id="0",
    question="In which town was the founder of Halden Works born?",
    chunks=("# Halden Works\n\nFounded by Mira Oskel.", "# Mira Oskel\n\nA pilot.", "# Mira Oskel\n\nBorn in Veldran."),
    answers=("Veldran",),
    kind="two hops",
    needed=(0, 2),
)


def answer(score: float | None, *winners: int | None) -> Result:
    trace = tuple((f" t{at}", winner) for at, winner in enumerate(winners))
    text = "".join(piece for piece, _ in trace).strip()
    return Result(
        task="hops",
        example=EXAMPLE,
        contender=Contender(engine="pced"),
        text=text,
        score=score,
        chunks=3,
        trace=(*trace, ("", None)),
    )


def test_the_answer_shown_is_right_and_hops():
    wrong, still, hopping = answer(0.0, 0, 2), answer(1.0, 0, 0), answer(1.0, 0, 1, 2)
    assert chosen([wrong, still, hopping]) is hopping
    assert chosen([wrong, still]) is still
    assert chosen([wrong]) is wrong


def test_a_trace_in_picture_and_words():
    hopping = answer(1.0, 0, 0, 1, 2, None)
    picture = traced(hopping)
    assert picture.experts == ["Halden Works", "Mira Oskel (1)", "Mira Oskel (2)"]
    assert picture.gold == {0, 2}
    assert picture.tokens == [(" t0", 0), (" t1", 0), (" t2", 1), (" t3", 2), (" t4", None)]
    text = told([hopping, answer(0.0, 1)])
    assert "| t0 t1 | Halden Works | gold |\n| t2 | Mira Oskel (1) |  |\n| t3 | Mira Oskel (2) | gold |\n" in text
    assert "In 1 of 2 answers the experts of both gold chunks proposed tokens" in text
    assert "gold experts proposed 50 % of all 6 tokens" in text


def test_files_of_a_table_with_its_picture(tmp_path: Path):
    table = TABLES["pced-2"]
    cell = Cell("PCED", "two hops")
    hopping = answer(1.0, 0, 2)
    task = Task(name="hops", metric="subspan_em", examples=[EXAMPLE])
    result = filled(table, results={cell: [hopping]}, tasks={"two hops": task})
    assert isinstance(illustrate(result).picture, Trace)
    files = write_table(result, tmp_path / "results")
    assert [path.name for path in files] == ["pced-2.json", "pced-2.md", "pced-2.svg", "pced-2.png"]
    page = files[1].read_text(encoding="utf-8")
    assert "](pced-2.svg)" in page
    assert "Question: In which town" in page
    assert "made by: python -m ragkv.benchmarks.papers some" in files[2].read_text(encoding="utf-8")
    bare = write_table(result, tmp_path / "bare", pictures=False)
    assert [path.name for path in bare] == ["pced-2.json", "pced-2.md"]
    assert "svg" not in bare[1].read_text(encoding="utf-8")
