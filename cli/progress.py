"""Progress of a long job: a bar if stderr is a terminal; else a line per stage at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ragkv.boundary.visible import one_line
from ragkv.cli.console import count, note, size, stderr

if TYPE_CHECKING:
    from ragkv.store import Notify
    from ragkv.store import Progress as Step

__all__ = ["kept_steps", "percent_bar", "progress_bar", "stages", "steps"]

Show = Callable[[str, float, float, str], None]


@contextmanager
def percent_bar(silent: bool) -> Iterator[Show | None]:
    """Yields `show(what, done, total, amount)`, or None without a terminal. A new `what` at 0 restarts the clock."""
    if silent or not stderr.is_terminal:
        yield None
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=1, amount="")

        def show(what: str, done: float, total: float, amount: str) -> None:
            what = one_line(what)
            if not done and bar.tasks[0].description != what:
                bar.reset(task)
            bar.update(task, description=what, completed=done, total=total, amount=amount)

        yield show


@contextmanager
def progress_bar(silent: bool) -> Iterator[Notify | None]:
    """A bar for jobs on a store, which report their steps."""
    with percent_bar(silent) as show:
        if show is None:
            yield None
            return

        def tell(step: Step) -> None:
            amount = size(step.done) if step.unit == "bytes" else f"{step.done:,} {step.unit}"
            show(step.step, step.done, step.total, amount)

        yield tell


Steps = Callable[[int, int, str], None]
"""`show(done, total, what)`."""


@contextmanager
def steps(title: str, *, silent: bool, stages: bool = False) -> Iterator[Steps]:
    """Yields `show(done, total, what)`. Without a terminal, `stages` prints a line whenever `what` changes."""
    if silent or not stderr.is_terminal:
        yield _stage_lines(lambda done, total, what: f"{title}: {what} ({done} of {total})", silent or not stages)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=f"{title} {one_line(what):<16}"[:40]
        )


@contextmanager
def stages(title: str, *, silent: bool) -> Iterator[Steps]:
    """Like `steps`, for jobs whose total may be unknown (0): the bar moves all the time, from the first moment on.

    Without a terminal, a line per stage.
    """
    if silent or not stderr.is_terminal:
        yield _stage_lines(lambda done, total, what: "" if what == "done" else f"{title}: {what} …", silent)
        return
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
        console=stderr,
        transient=True,
    ) as bar:
        task = bar.add_task(title, total=None, amount="")
        yield lambda done, total, what: bar.update(
            task,
            completed=done,
            total=total or None,
            description=f"{title}: {one_line(what):<18}"[:40],
            amount=f"{done:,} of {total:,}" if total else "",
        )


def _stage_lines(line: Callable[[int, int, str], str], silent: bool) -> Steps:
    """Print `line(done, total, what)` whenever `what` changes, where stderr is a file or a pipe."""
    last = ""

    def show(done: int, total: int, what: str) -> None:
        nonlocal last
        if not silent and what and what != last and (words := line(done, total, what)):
            note(words)
        last = what

    return show


@contextmanager
def kept_steps(title: str, work: Path, *, silent: bool) -> Iterator[Steps]:
    """`steps` of a run that keeps every answer in `work`. An interrupt says so and ends the command."""
    done, total = 0, 0
    try:
        with steps(title, silent=silent) as show:

            def tell(now: int, of: int, what: str) -> None:
                nonlocal done, total
                done, total = now, of
                show(now, of, what)

            yield tell
    except KeyboardInterrupt:
        note(
            f"ragkv: {title} interrupted after {done:,} of {count(total, 'answer')}; they are kept in {work}, and the "
            "same command goes on from there."
        )
        raise typer.Exit(130) from None
