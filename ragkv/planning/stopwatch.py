"""Repeated timings: how far they are apart, and whether other processes used the cores meanwhile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Reading", "Repeats", "Stopwatch", "Trust", "waiting_share", "weigh"]

FEWEST = 3
"""The fewest repeats that show whether they agree."""
WIDE = 0.25
"""If repeats are further apart than this share of their median, the machine was not quiet."""
WAITED = 0.15
"""If this process waited for a core for more than this share of its work, the machine was not quiet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The seconds of each repetition of some work; never empty."""

    seconds: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median, which a single disturbance does not change."""
        return statistics.median(self.seconds)

    @property
    def low(self) -> float:
        return min(self.seconds)

    @property
    def high(self) -> float:
        return max(self.seconds)

    @property
    def spread(self) -> float:
        """The range as a share of the median. Of five or more repeats, the fastest and slowest are ignored."""
        found = sorted(self.seconds)
        found = found[1:-1] if len(found) >= 5 else found
        return (found[-1] - found[0]) / self.value if self.value > 0 else 0.0

    def to_json(self, unit: float) -> dict[str, float]:
        """Median, fastest and slowest in multiples of `unit` seconds, and the number of repeats."""
        found = {"value": self.value, "low": self.low, "high": self.high}
        return {**{name: round(value / unit, 3) for name, value in found.items()}, "repeats": len(self.seconds)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Wall-clock seconds, processor seconds of this process, and the seconds that its threads waited for a core.

    `waited` is None if the system does not count it.
    """

    wall: float
    processor: float
    waited: float | None

    def since(self, earlier: Reading) -> Reading:
        """The differences from an earlier reading."""
        known = self.waited is not None and earlier.waited is not None
        return Reading(
            wall=self.wall - earlier.wall,
            processor=self.processor - earlier.processor,
            waited=max(0.0, self.waited - earlier.waited) if known else None,  # type: ignore[operator]
        )


def _waited() -> float | None:
    """The seconds that threads of this process were ready to run without a core, which Linux counts per thread."""
    try:
        files = list(Path("/proc/self/task").glob("*/schedstat"))
        told = [path.read_text().split() for path in files]
        return sum(int(words[1]) for words in told) / 1e9 if told else None
    except (OSError, ValueError, IndexError):  # a thread ended meanwhile, or the system has no such count
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """The clocks that a trial reads. Tests replace them, so that results do not depend on time."""

    now: Callable[[], float] = time.perf_counter
    processor: Callable[[], float] = time.process_time
    waited: Callable[[], float | None] = _waited

    def read(self) -> Reading:
        """Read all clocks."""
        return Reading(wall=self.now(), processor=self.processor(), waited=self.waited())


def waiting_share(passed: Reading) -> float:
    """The share in [0, 1] of its work's time for which this process had no core.

    If the system does not count waiting, it is the share of wall-clock time without processor time, because this work
    computes all the time.
    """
    if passed.waited is None:
        return max(0.0, 1 - passed.processor / passed.wall) if passed.wall > 0 else 0.0
    wanted = passed.waited + passed.processor
    return passed.waited / wanted if wanted > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """Whether timings are reliable; if not, `reasons` has a sentence for each reason.

    `waited` is the `waiting_share` during the trial, or None if an accelerator does the computing.
    """

    reasons: tuple[str, ...]
    waited: float | None

    @property
    def trusted(self) -> bool:
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        waited = None if self.waited is None else round(self.waited, 3)
        return {"trusted": self.trusted, "reasons": list(self.reasons), "waited": waited}


def weigh(repeats: Mapping[str, Repeats], waited: float | None) -> Trust:
    """Judge named repeats, and the share of time that this process waited for a core."""
    reasons = []
    for name, found in repeats.items():
        if len(found.seconds) < FEWEST:
            times = "once" if len(found.seconds) == 1 else f"{len(found.seconds)} times"
            reasons.append(f"{name} was timed only {times}, so its error is unknown.")
        elif found.spread > WIDE:
            reasons.append(
                f"{len(found.seconds)} repeats of {name} lie {found.spread:.0%} of their median apart: "
                "the machine was not steady."
            )
    if waited is not None and waited > WAITED:
        reasons.append(
            f"This process waited for a core for {waited:.0%} of its time: other processes use this machine."
        )
    return Trust(reasons=tuple(reasons), waited=waited)
