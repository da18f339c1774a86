"""A progress bar for long jobs on a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ragkv.cli.console import size, stderr
from ragkv.store import Notify
from ragkv.store import Progress as Step

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(silent: bool) -> Iterator[Notify | None]:
    """A bar on stderr that follows the job from step to step; nothing where nobody looks."""
    if silent or not stderr.is_terminal:
        yield None
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=1, amount="")

        def show(step: Step) -> None:
            if bar.tasks[0].description != step.step:
                bar.reset(task)
            amount = size(step.done) if step.unit == "bytes" else f"{step.done:,} {step.unit}"
            bar.update(task, description=step.step, completed=step.done, total=step.total, amount=amount)

        yield show
