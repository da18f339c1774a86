"""Tables are consistent, and state no order that the paper does not have."""

from __future__ import annotations

import pytest

from ragkv.benchmarks.papers import TABLES, Cell, Column, Line, Order, Paper, Table, across, along, find_table, printed
from ragkv.engines import engine_class
from ragkv.errors import ConfigError, UsageError

LINES = (Line(label="a", engine="full"), Line(label="b", engine="ape"))
COLUMNS = (Column(label="x", task="passages"), Column(label="y", task="icl"))


def table(**settings):
    return Table(**{"name": "t", "title": "T", "follows": "-", "lines": LINES, "columns": COLUMNS, **settings})


@pytest.mark.parametrize("name", TABLES)
def test_every_table_can_be_asked(name):
    one = find_table(name)
    assert one.name == name
    for line in one.lines:
        contender = line.contender("mini", None)  # raises for an engine, an option or a codec that there is not
        assert engine_class(contender.engine).name == contender.engine
        assert (contender.codec, contender.retrieval, contender.rerank) == (line.codec, line.retrieval, line.rerank)
    for column in one.columns:
        if not column.mean_of:
            task = column.make(seed=1, limit=1)
            assert len(task.examples) == 1
            assert len(task.examples[0].chunks) == column.chunks
    assert one.orders or name == "pced-2"  # which shows one answer
    assert all(order.source for order in one.orders)
    assert len(set(map(str, one.orders))) == len(one.orders)


@pytest.mark.parametrize("name", [name for name, one in TABLES.items() if one.paper])
def test_the_papers_lines_are_in_the_table(name):
    """By the paper's name, or as several lines that are called after it."""
    one = TABLES[name]
    labels = [line.label for line in one.lines]
    for line in {line for paper in one.paper for line in paper.values}:
        assert any(label == line or label.startswith(f"{line}, ") for label in labels), line


def test_some_printed_numbers():
    mistral, llama = TABLES["pced-1"].paper
    assert (mistral.value("PCED dense", "NQ"), mistral.value("All", "MuSiQue")) == (81, 28)
    assert (llama.value("MapReduce", "QAMParI"), llama.value("APE", "Web"), llama.value("Single", "Date")) == (
        68,
        61.1,
        51.1,
    )
    assert [paper.value("γ=4", "NQ") for paper in TABLES["pced-5"].paper] == [87, 81]
    assert [paper.value("β=0.75", "HotpotQA") for paper in TABLES["pced-4"].paper] == [67, 58]


PAPER = Paper(caption="P", model="M", columns=("X", "Y"), values={"a": (3, 5), "b": (1, None), "c": (3.5, 5)})


def test_orders_are_the_papers_own():
    [order] = printed([PAPER], "a", ">", "b", {"x": ("X", "Y")})
    assert (order.left, order.right, order.source) == (Cell("a", "x"), Cell("b", "x"), "X 3 to 1 (M)")
    assert str(order) == "a (x) > b (x)"
    [close] = printed([PAPER], "a", "~", "c", {"x": ("X",)}, within=0.5)
    assert str(close) == "a (x) within 0.5 points of c (x)"
    for left, relation, right, column in (("b", ">", "a", "X"), ("a", ">", "c", "Y"), ("a", "~", "c", "X")):
        with pytest.raises(ValueError, match=f"{left} .* is not {relation} {right}"):
            printed([PAPER], left, relation, right, {"x": (column,)})
    with pytest.raises(ValueError, match="no number for a and b in Y"):
        printed([PAPER], "a", ">", "b", {"x": ("Y",)})


def test_lines_across_columns_and_columns_along_lines():
    assert [str(order) for order in across("xy", "a", ">=", "b", "s")] == ["a (x) >= b (x)", "a (y) >= b (y)"]
    assert [str(order) for order in along("ab", "x", ">", "y", "s")] == ["a (x) > a (y)", "b (x) > b (y)"]


def mean(label, *of):
    return Column(label=label, mean_of=of)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lines": (*LINES, LINES[0])}, "'a' stands twice"),
        ({"columns": (*COLUMNS, COLUMNS[1])}, "'y' stands twice"),
        ({"lines": (Line(label="a", engine="ape", same_as="c"),)}, "'c', which is no line"),
        ({"columns": (*COLUMNS, mean("m", "x", "z"))}, "mean of 'z'"),
        ({"columns": (*COLUMNS, mean("m", "x"), mean("n", "m"))}, "mean of 'm'"),
        ({"columns": (*COLUMNS, Column(label="z", task="icl", limit=3))}, "two limits"),
        ({"orders": (Order(left=Cell("a", "x"), relation=">", right=Cell("c", "x"), source="s"),)}, "names c"),
    ],
)
def test_what_is_not_consistent(settings, message):
    with pytest.raises(ValueError, match=message):
        table(**settings)


def test_a_column_has_a_task_or_is_a_mean():
    for settings in ({}, {"task": "icl", "mean_of": ("x",)}):
        with pytest.raises(ValueError, match="one of the two"):
            Column(label="x", **settings)


def test_what_the_engine_does_not_have():
    with pytest.raises(ConfigError, match="gama"):
        Line(label="a", engine="pced(gama=1)").contender("mini", None)
    with pytest.raises(UsageError, match="nope"):
        Line(label="a", engine="nope").contender("mini", None)
    with pytest.raises(UsageError, match="pced-1, pced-2"):
        find_table("pced-9")
