"""What do indexes cost as they grow: opening, questions, one changed document, upkeep, ingest and memory?

Baseline: the same at the first of the sizes, so that a ratio says how a cost grows with the index. Indexes are of
generated documents (`corpus`); every measurement runs in a process of its own, on one thread (`stage`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragkv.benchmarks.speed.fresh import run_fresh
from ragkv.benchmarks.speed.report import Report, Row, machine, versions
from ragkv.errors import UsageError

__all__ = ["PARTS", "Growth", "measure"]

PARTS = ("open", "ask", "where", "change", "upkeep")
"""What may be measured of an index, besides making it."""

Step = Callable[[int, int, str], None]
Run = Callable[..., list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The figures of one run by size, each a list of `stage.Figure` in the same order."""

    sizes: tuple[int, ...]
    figures: dict[int, list[Any]]
    report: Report

    def growth(self, name: str) -> str:
        """How many times more a figure is at the last size than at the first, as people read it."""
        ends = [next((f.value for f in self.figures[size] if f.name == name), 0.0) for size in self.sizes]
        return f"{ends[-1] / ends[0]:,.1f}x" if ends[0] and ends[-1] else "-"


def measure(
    sizes: Sequence[int],
    *,
    parts: Sequence[str] = PARTS,
    rounds: int = 3,
    folder: Path | None = None,
    on_step: Step | None = None,
    run: Run = run_fresh,
) -> Growth:
    """Measure indexes of these sizes, in chunks. `run` calls a stage in a process of its own.

    The indexes stay in `folder`, where the next run finds them; without one they are deleted at the end. UsageError for
    a part that there is not.
    """
    if unknown := set(parts) - set(PARTS):
        raise UsageError(f"--only knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}.")
    show = on_step or (lambda *_: None)
    with tempfile.TemporaryDirectory(prefix="ragkv-bench-") if folder is None else nullcontext(str(folder)) as name:
        figures = {size: _measured(Path(name), size, parts, rounds, show, run) for size in sizes}
    rows = tuple(row for size in sizes for row in _rows(size, figures[size], sizes[0], figures[sizes[0]]))
    packages = versions("lmdb", "numpy", "faiss-cpu", "bm25s", "sentence-transformers")
    report = Report(bench="index", machine=machine("cpu"), versions=packages, rows=rows)
    return Growth(sizes=tuple(sizes), figures=figures, report=report)


def _measured(folder: Path, size: int, parts: Sequence[str], rounds: int, show: Step, run: Run) -> list[Any]:
    from ragkv.benchmarks.speed import stage

    def told(what: str, stage: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
        show(0, 0, f"{size:,} chunks: {what}")
        return run(
            stage, folder, size, *arguments, on_progress=lambda done, of: show(done, of, f"{size:,} chunks: {what}")
        )

    found = told("make", stage.make)
    if "open" in parts:
        found += told("open", stage.open_index, "open after the ingest")
        found += told("open", stage.open_index, "open")
    for mode in stage.MODES:
        if not stage.is_built(folder, size, mode) and {"ask", "where", "change"} & set(parts):
            built = told(f"build {mode}", stage.build, mode)
            found += built if "ask" in parts else []
        if "ask" in parts:
            found += told(f"ask {mode}", stage.ask, mode)
        if "where" in parts:
            found += told(f"ask {mode} --where", stage.filter_by, mode)
    if "change" in parts:
        found += told("change", stage.change, stage.MODES, rounds)
    for what in ("stats", "verify --quick", "gc --dry-run"):
        if "upkeep" in parts:
            found += told(what, stage.check, what)
    return found


def _rows(size: int, figures: Sequence[Any], least: int, baseline: Sequence[Any]) -> list[Row]:
    """Times as two rows, of the processor and of the clock. What the baseline's size has no figure of has its own."""
    rows = []
    known = {one.name: one for one in baseline}
    for one in figures:
        before, base = (known[one.name], least) if one.name in known else (one, size)
        kinds = [("", one.value, before.value)]
        if one.wall is not None and before.wall is not None:
            kinds = [(", processor", one.value, before.value), (", clock", one.wall, before.wall)]
        for kind, value, reference in kinds:
            better, worse = (value, reference) if one.more_is_better else (reference, value)
            row = Row(
                name=f"{size} chunks: {one.name}{kind}",
                value=round(value, 3),
                unit=one.unit,
                baseline=f"{base} chunks",
                baseline_value=round(reference, 3),
                ratio=round(better / worse, 3) if worse else 1.0,
            )
            rows.append(row)
    return rows
