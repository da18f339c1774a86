"""Tables on stdout: words on the left, figures on the right, never cut to the 80 columns of a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from ragkv.cli.console import draw

__all__ = ["facts", "plain", "print_facts", "print_grid"]

_WIDEST = 1000


def plain(*head: str) -> Table:
    """An empty table without lines around it; columns may be added."""
    return Table(*head, box=None, pad_edge=False)


def facts(*, width: int | None = None) -> Table:
    """An empty table without a head: names on the left, of at least this width, and values that fold."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True, width=width)
    table.add_column(overflow="fold")
    return table


def print_facts(rows: Iterable[tuple[str, str]]) -> None:
    """(name, value) rows."""
    table = facts()
    for row in rows:
        table.add_row(*row)
    draw(table)


def print_grid(head: Sequence[str], body: Sequence[Sequence[str]], *, words: Sequence[str] = ()) -> None:
    """The first column and `words` hold words, the others figures."""
    table = plain()
    for at, column in enumerate(head):
        table.add_column(column, justify="left" if at == 0 or column in words else "right", no_wrap=True)
    for cells in body:
        table.add_row(*cells)
    draw(table, width=_WIDEST)
