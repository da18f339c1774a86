"""How far a long measurement is: a bar where somebody looks, a line per stage where it goes to a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ragkv.cli.console import note, stderr

__all__ = ["steps"]


@contextmanager
def steps(title: str, *, silent: bool, stages: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Yields `show(done, total, what)`. Without a terminal, `stages` prints a line whenever `what` changes."""
    if silent:
        yield lambda done, total, what: None
        return
    if not stderr.is_terminal:
        last = ""

        def tell(done: int, total: int, what: str) -> None:
            nonlocal last
            if stages and what and what != last:
                note(f"{title}: {what} ({done} of {total})")
            last = what

        yield tell
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=f"{title} {what:<16}"[:40]
        )
