"""Search T and S of APE, and γ of PCED, on questions that no table asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ragkv.benchmarks.papers.definition import Ask, Column, Line, Table
from ragkv.evaluation.example import Task
from ragkv.evaluation.result import Result
from ragkv.evaluation.tune import STEPS, Setting, best_setting

__all__ = ["Calibration", "search_ape", "search_gamma", "with_searched_pair"]

_ASKED = 30  # questions per kind
_SEED = 7_001  # no table uses it, so the contexts differ even where names coincide
_KINDS = ("one hop", "two hops")
_PORTION = 10  # questions per kind, after each of which settings that cannot win any more are dropped
_GAMMAS = (2.5, 2.0, 3.0, 1.5, 4.0, 1.0, 0.5)
"""The values of PCED Table 5, ordered by their distance from the paper's own, 2.5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The best setting, and a sentence that tells the reader how it was found."""

    temperature: float
    scale: float
    told: str


def search_ape(ask: Ask, *, chunks: int = 16, task: str = "") -> Calibration:
    """Search T at S = 1 first, then S at that T, in the steps of `ragkv tune`; on a tie, the smaller change wins.

    The questions are of one hop and two hops over `chunks` passages of training worlds. A table that asks something
    else passes its `task`, of which other questions are drawn by a separate seed.
    """
    plain = Setting(prefix_newlines=0, temperature=1.0, scale=1.0)
    tried: dict[Setting, float] = {}  # right answers of each setting that was not dropped
    tasks = [Column(label="", task=task, chunks=chunks).make(_SEED, 2 * _ASKED)] if task else _tasks(chunks)
    asked = sum(len(each.examples) for each in tasks)
    over = f"`{task}`" if task else "training worlds"

    def best(settings: Sequence[Setting]) -> Setting:
        """The best of `settings`. As in `ragkv tune`, one that cannot win is dropped, which changes no result."""
        right = {setting: 0.0 for setting in settings if setting not in tried}
        left = asked
        for portion in _portions(tasks):
            lines = [Line(label="", engine=_ape(one.temperature, one.scale)) for one in right]
            for setting, found in zip(right, ask(portion, lines), strict=True):
                right[setting] += sum(result.score or 0.0 for result in found)
            left -= sum(len(each.examples) for each in portion)
            lead = max([*right.values(), *(tried[setting] for setting in settings if setting in tried)])
            right = {one: count for one, count in right.items() if count + left >= lead or one == plain}
        tried.update(right)
        return best_setting({setting: tried[setting] for setting in settings if setting in tried})

    at_t = best([replace(plain, temperature=value) for value in STEPS])
    found = best([replace(at_t, scale=value) for value in STEPS])
    return Calibration(
        temperature=found.temperature,
        scale=found.scale,
        told=(
            f"T = {found.temperature:g} and S = {found.scale:g} were searched greedily (APE §4.4) on "
            f"{asked} questions over {over}, seed {_SEED}, {chunks} chunks each: "
            f"{100 * tried[plain] / asked:.1f} % right at T = S = 1, {100 * tried[at_t] / asked:.1f} % with T, "
            f"{100 * tried[found] / asked:.1f} % with both."
        ),
    )


def with_searched_pair(table: Table, ask: Ask, lines: Sequence[str], *, chunks: int, task: str = "") -> Table:
    """A copy whose `lines` (labels) use the T and S that `search_ape` finds, with a remark that says so."""
    found = search_ape(ask, chunks=chunks, task=task)
    return table.with_engines(dict.fromkeys(lines, _ape(found.temperature, found.scale)), found.told)


def search_gamma(ask: Ask, line: Line, *, chunks: int) -> tuple[float, str]:
    """The γ with which PCED answers most questions of one and two hops, and a sentence on how it was found.

    Chunks are ranked as for `line`. On a tie, the γ nearest to the paper's 2.5 wins (PCED §3, sweep in Table 5).
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


def _ape(temperature: float, scale: float) -> str:
    """Spelled as in the tables, so that a line with the same pair reuses its answers."""
    return f"ape(temperature={temperature:g}, scale={scale:g})"


def _portions(tasks: Sequence[Task]) -> list[list[Task]]:
    """The tasks split into portions of `_PORTION` questions each."""
    most = max(len(task.examples) for task in tasks)
    return [
        [
            replace(task, examples=part)
            for task in tasks
            if (part := task.examples[start : start + _PORTION])  # one may have fewer than another
        ]
        for start in range(0, most, _PORTION)
    ]


def _counted(tasks: Sequence[Task]) -> str:
    return f"{sum(len(task.examples) for task in tasks)} questions over training worlds, seed {_SEED}"


def _mean(results: Sequence[Result]) -> float:
    return fmean(result.score or 0.0 for result in results)
