"""All tables, by name."""

from __future__ import annotations

from ragkv.benchmarks.papers.apb import APB_3
from ragkv.benchmarks.papers.ape import APE_3, APE_5
from ragkv.benchmarks.papers.block import BLOCK_1, BLOCK_4
from ragkv.benchmarks.papers.definition import Table
from ragkv.benchmarks.papers.experttrace import PCED_2
from ragkv.benchmarks.papers.pced import PCED_1, PCED_3, PCED_4, PCED_5, PCED_6, PCED_7
from ragkv.benchmarks.papers.storecodec import CODECS
from ragkv.errors import UsageError

__all__ = ["TABLES", "find_table"]

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        *(PCED_1, PCED_2, PCED_3, PCED_4, PCED_5, PCED_6, PCED_7),
        CODECS,
        *(APE_3, APE_5),
        *(APB_3, BLOCK_1, BLOCK_4),  # last, because they need checkpoints of their own
    )
}
"""In the order of `--list`."""


def find_table(name: str) -> Table:
    """The table `name`. Raises UsageError, which lists the tables, if there is none."""
    if name not in TABLES:
        raise UsageError(f"Unknown table {name!r}; choose one of {', '.join(TABLES)}, or all.")
    return TABLES[name]
