"""T and S of APE for a table: the greedy search of APE §4.4 on worlds that no table asks of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ragkv.evaluation.spec import Spec
from ragkv.evaluation.table.definition import Ask, Column
from ragkv.evaluation.tune import STEPS, Setting, best_setting

__all__ = ["Calibration", "search_ape"]

_ASKED = 30  # questions of each kind
_SEED = 7_001  # not that of a table: contexts differ even where names might not
_COLUMNS = tuple(
    Column(label=kind, task=f'passages(kind="{kind}", split=train)', chunks=16) for kind in ("one hop", "two hops")
)


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
    tasks = [column.make(_SEED, _ASKED) for column in _COLUMNS]

    def best(settings: Sequence[Setting]) -> Setting:
        fresh = [setting for setting in settings if setting not in tried]
        engines = [Spec("ape", {"temperature": one.temperature, "scale": one.scale}) for one in fresh]
        for setting, found in zip(fresh, ask(tasks, engines), strict=True):
            tried[setting] = fmean(result.score or 0.0 for result in found)
        return best_setting({setting: tried[setting] for setting in settings})

    at_t = best([replace(plain, temperature=value) for value in STEPS])
    found = best([replace(at_t, scale=value) for value in STEPS])
    return Calibration(
        temperature=found.temperature,
        scale=found.scale,
        told=(
            f"T = {found.temperature:g} and S = {found.scale:g} were searched greedily (APE §4.4) on "
            f"{sum(len(task.examples) for task in tasks)} questions over training worlds, seed {_SEED}: "
            f"{100 * tried[plain]:.1f} % right at T = S = 1, {100 * tried[at_t]:.1f} % with T, "
            f"{100 * tried[found]:.1f} % with both."
        ),
    )
