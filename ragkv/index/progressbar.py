"""A progress bar for programs and notebooks; commands draw their own (`ragkv.cli.progress`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ragkv.boundary.visible import one_line
from ragkv.ingest.report import IngestProgress

__all__ = ["ingest_bar"]

Tell = Callable[[IngestProgress], None]


@contextmanager
def ingest_bar(tell: Tell | None, *, show: bool) -> Iterator[Tell | None]:
    """Yields `tell` again; with `show`, one that also moves a bar, on stderr or, in a notebook, as a widget."""
    if not show:
        yield tell
        return
    from tqdm.auto import tqdm

    with tqdm(unit="B", unit_scale=True, unit_divisor=1024, desc="ingest", dynamic_ncols=True) as bar:

        def move(progress: IngestProgress) -> None:
            bar.total = progress.total_bytes
            bar.set_postfix_str(one_line(progress.current)[-40:], refresh=False)
            bar.update(int(progress.done_bytes) - bar.n)
            if tell is not None:
                tell(progress)

        yield move
