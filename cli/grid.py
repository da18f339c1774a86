"""Tables on stdout: words at the left, figures at the right, never cut to fit a pipe's 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from ragkv.cli.console import draw

__all__ = ["print_grid"]

_WIDEST = 1000


def print_grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> None:
    """The first column holds words."""
    table = Table(box=None, pad_edge=False)
    for at, column in enumerate(head):
        table.add_column(column, justify="left" if at == 0 else "right", no_wrap=True)
    for cells in body:
        table.add_row(*cells)
    draw(table, width=_WIDEST)
