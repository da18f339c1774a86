"""T and S of APE, γ of PCED for a table, searched on worlds that no table asks of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ragkv.evaluation.result import Result
from ragkv.evaluation.table.definition import Ask, Column, Line
from ragkv.evaluation.task import Task
from ragkv.evaluation.tune import STEPS, Setting, best_setting

__all__ = ["Calibration", "search_ape", "search_gamma"]

_ASKED = 30  # questions of each kind
_SEED = 7_001  # not that of a table: contexts differ even where names might not
_KINDS = ("one hop", "two hops")
_GAMMAS = (2.5, 2.0, 3.0, 1.5, 4.0, 1.0, 0.5)
"""Those of PCED Table 5, the paper's own first and the nearest to it before the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The setting that was found, and how, in a sentence for a reader."""

    temperature: float
    scale: float
    told: str


def search_ape(ask: Ask) -> Calibration:
    """T at S = 1 first, then S at that T, over the steps of `ragkv tune`; among equals the one that changes least."""
    plain = Setting(prefix_newlines=0, temperature=1.0, scale=1.0)
    tried: dict[Setting, float] = {}
    tasks = _tasks(16)

    def best(settings: Sequence[Setting]) -> Setting:
        fresh = [setting for setting in settings if setting not in tried]
        lines = [Line(label="", engine=f"ape(temperature={one.temperature}, scale={one.scale})") for one in fresh]
        for setting, found in zip(fresh, ask(tasks, lines), strict=True):
            tried[setting] = _mean(found)
        return best_setting({setting: tried[setting] for setting in settings})

    at_t = best([replace(plain, temperature=value) for value in STEPS])
    found = best([replace(at_t, scale=value) for value in STEPS])
    return Calibration(
        temperature=found.temperature,
        scale=found.scale,
        told=(
            f"T = {found.temperature:g} and S = {found.scale:g} were searched greedily (APE §4.4) on "
            f"{_counted(tasks)}: "
            f"{100 * tried[plain]:.1f} % right at T = S = 1, {100 * tried[at_t]:.1f} % with T, "
            f"{100 * tried[found]:.1f} % with both."
        ),
    )


def search_gamma(ask: Ask, line: Line, *, chunks: int) -> tuple[float, str]:
    """The γ of PCED that answers most of one hop and two hops, chunks brought as for `line`, and how it was found.

    Among equals the one nearest to the paper's 2.5 (PCED §3; Table 5 has the sweep).
    """
    tasks = _tasks(chunks)
    lines = [replace(line, engine=f"pced(gamma={gamma:g})") for gamma in _GAMMAS]
    right = dict(zip(_GAMMAS, map(_mean, ask(tasks, lines)), strict=True))
    best = max(_GAMMAS, key=lambda gamma: right[gamma])
    swept = ", ".join(f"{100 * right[gamma]:.1f} at {gamma:g}" for gamma in sorted(right))
    return best, (
        f"γ = {best:g} was chosen on {_counted(tasks)}, {chunks} chunks, half of one hop and half of two: "
        f"{swept} % right."
    )


def _tasks(chunks: int) -> list[Task]:
    columns = [Column(label=kind, task=f'passages(kind="{kind}", split=train)', chunks=chunks) for kind in _KINDS]
    return [column.make(_SEED, _ASKED) for column in columns]


def _counted(tasks: Sequence[Task]) -> str:
    return f"{sum(len(task.examples) for task in tasks)} questions over training worlds, seed {_SEED}"


def _mean(results: Sequence[Result]) -> float:
    return fmean(result.score or 0.0 for result in results)
