"""The papers' tables, each by one command: `ragkv eval table NAME`."""

from ragkv.evaluation.table.catalog import TABLES, find_table
from ragkv.evaluation.table.definition import Cell, Column, Line, Order, Paper, Table, across, along, printed
from ragkv.evaluation.table.figure import Difference, Figure
from ragkv.evaluation.table.measure import TableResult, run_table
from ragkv.evaluation.table.origin import Model, Origin
from ragkv.evaluation.table.report import to_json, to_markdown, write_table
from ragkv.evaluation.table.revision import revise_table
from ragkv.evaluation.table.verdict import Verdict

__all__ = [
    "TABLES",
    "Cell",
    "Column",
    "Difference",
    "Figure",
    "Line",
    "Model",
    "Order",
    "Origin",
    "Paper",
    "Table",
    "TableResult",
    "Verdict",
    "across",
    "along",
    "find_table",
    "printed",
    "revise_table",
    "run_table",
    "to_json",
    "to_markdown",
    "write_table",
]
