"""A table's rows, columns and orders fit together, and an order is judged by the interval of its difference."""

from pathlib import Path

import pytest

from ragkv.benchmarks.papers.run import TABLES, find_table
from ragkv.benchmarks.papers.table import (
    Cell,
    Difference,
    Order,
    Paper,
    decide,
    difference_of,
    printed,
)
from ragkv.engines import engine_class

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", TABLES)
def test_every_table_can_be_asked(name):
    table = find_table(name)
    assert table.name == name
    for line in table.lines:
        candidate = line.candidate("mini", None)  # raises for an unknown engine, option or codec
        assert engine_class(candidate.engine).name == candidate.engine
        assert (candidate.codec, candidate.retrieval, candidate.rerank) == (line.codec, line.retrieval, line.rerank)
    for column in table.columns:
        if column.task.endswith(".jsonl"):
            assert (ROOT / column.task).exists()
        elif not column.mean_of:
            task = column.make(seed=1, limit=1)
            assert len(task.examples) == 1
            assert len(task.examples[0].chunks) == column.chunks
    lines, columns = [line.label for line in table.lines], [column.label for column in table.columns]
    assert (len(set(lines)), len(set(columns))) == (len(lines), len(columns))
    assert {line.same_as for line in table.lines} <= {"", *lines}
    assert all(not table.column(label).mean_of for column in table.columns for label in column.mean_of)
    assert {cell.line for order in table.orders for cell in (order.left, order.right)} <= set(lines)
    assert {cell.column for order in table.orders for cell in (order.left, order.right)} <= set(columns)
    assert table.orders or name == "pced-2"  # pced-2 shows one answer
    assert all(order.source for order in table.orders)
    assert len(set(map(str, table.orders))) == len(table.orders)


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


def scores(values, column="x", start=0):
    return {column: [(str(at), float(value)) for at, value in enumerate(values, start)]}


A, B = Cell("a", "x"), Cell("b", "x")


def order(relation, within=0.0):
    return Order(left=A, relation=relation, right=B, source="s", within=within)


def test_the_same_questions_are_compared_one_by_one():
    ours, theirs = scores([1, 1, 0, 1, 0, 1, 1, 0]), scores([1, 0, 0, 1, 0, 1, 1, 0])
    paired = difference_of(ours, theirs, 0)
    assert (paired.value, paired.paired, paired.n) == (1 / 8, True, 8)
    assert paired.ci95[0] == 0
    apart = difference_of(ours, scores([1, 0, 0, 1, 0, 1, 1, 0], start=100), 0)
    assert (apart.value, apart.paired) == (1 / 8, False)
    assert apart.ci95[0] < 0 < apart.ci95[1]
    assert apart.ci95[1] - apart.ci95[0] > paired.ci95[1] - paired.ci95[0]
    assert difference_of(ours, {"x": []}, 0) is None


def test_an_interval_has_a_width_even_when_no_question_differs():
    equal = difference_of(scores([1] * 24), scores([1] * 24), 0)
    assert (equal.value, equal.n, equal.identical) == (0, 24, True)
    assert equal.ci95 == pytest.approx((-0.1425, 0.1425), abs=1e-4)  # Clopper and Pearson for 0 of 24
    assert difference_of(scores([1] * 60), scores([1] * 60), 0).ci95[1] == pytest.approx(0.0596, abs=1e-4)
    apart = difference_of(scores([1] * 24), scores([0] * 24), 0)
    assert (apart.identical, apart.ci95[1]) == (False, 1.0)
    assert 0.5 < apart.ci95[0] < 1
    turned = difference_of(scores([1, 0, 1, 0]), scores([0, 1, 0, 1]), 0)
    assert (turned.value, turned.identical) == (0, False)


def difference(low, high, *, identical=False, paired=True):
    return Difference(value=(low + high) / 200, ci95=(low / 100, high / 100), n=24, paired=paired, identical=identical)


@pytest.mark.parametrize("relation", [">", ">="])
@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (4, 20, "holds"),
        (0, 12.5, "not shown"),  # touches 0: not one question of the other kind was among those asked
        (-8, 30, "not shown"),
        (-12.5, 0, "not shown"),
        (-20, -4, "does not hold"),
        (0, 0, "not shown"),
    ],
)
def test_better_holds_where_the_interval_excludes_the_opposite(relation, low, high, word):
    assert decide(order(relation), difference(low, high)).word == word


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (-1.5, 1.9, "holds"),
        (-2, 2, "holds"),
        (-6, 6, "not shown"),
        (0, 12.5, "not shown"),
        (2.5, 12.5, "does not hold"),
        (-9, -2.5, "does not hold"),
    ],
)
def test_about_the_same_holds_where_the_whole_interval_does(low, high, word):
    assert decide(order("~", within=2), difference(low, high)).word == word


def test_the_very_same_is_refuted_by_one_question():
    assert decide(order("~"), difference(-6, 6, identical=True)).word == "holds"
    assert decide(order("~"), difference(0, 12.5)).word == "does not hold"
    assert decide(order("~"), difference(-6, 6, paired=False)).word == "not shown"
