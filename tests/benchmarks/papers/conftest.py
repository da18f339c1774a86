"""A small table for a random model, whose answers say nothing."""

import pytest

from ragkv.benchmarks.papers.table import Cell, Column, Order, Paper, Table, TableRow


@pytest.fixture
def small() -> Table:
    return Table(
        name="small",
        title="A small table",
        follows="Table 9",
        lines=(
            TableRow(label="All", engine="all", retrieval="bm25"),
            TableRow(label="PCED", engine="pced(gamma=1)", retrieval="bm25"),
            TableRow(label="PCED, coarse", engine="pced(gamma=1)", retrieval="bm25", codec="int4", same_as="PCED"),
            TableRow(label="again", engine="pced(gamma=1)", retrieval="bm25", same_as="PCED"),
            TableRow(label="tuned", engine="block", role="tuned"),
        ),
        columns=(
            Column(label="code", task="secret-code(words=4)", chunks=2),
            Column(label="shots", task="icl(shots=1, classes=2)", chunks=2, limit=2),
            Column(label="seen", task="icl(shots=1, classes=2)", chunks=2, limit=2, kind="seen"),
            Column(label="same", task="secret-code(words=4)", chunks=2, measure="same"),
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
