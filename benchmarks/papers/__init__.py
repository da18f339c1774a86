"""The papers' tables, each by one command: `python -m ragkv.benchmarks.papers NAME`."""

from ragkv.benchmarks.papers.catalog import TABLES, find_table
from ragkv.benchmarks.papers.definition import Cell, Column, Line, Order, Paper, Table, across, along, printed
from ragkv.benchmarks.papers.figure import Difference, Figure
from ragkv.benchmarks.papers.filling import RunOptions, TableResult, run_table
from ragkv.benchmarks.papers.origin import Model, Origin
from ragkv.benchmarks.papers.page import to_json, to_markdown, write_table
from ragkv.benchmarks.papers.revision import revise_table
from ragkv.benchmarks.papers.verdict import Verdict

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
    "RunOptions",
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
