"""Grouped bars that compare the same contenders on several tasks, with values and intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragkv.benchmarks.papers.plot.picture import headed, percent_axis, style, wrapped

__all__ = ["Bar", "Bars"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One contender's share in [0, 1] and its interval in each group; None where nothing was measured."""

    label: str
    values: Sequence[float | None]
    intervals: Sequence[tuple[float, float] | None]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.intervals):
            raise ValueError(f"bar {self.label!r}: {len(self.intervals)} intervals for {len(self.values)} values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Groups of bars, with one bar per contender in each group."""

    title: str
    y_label: str
    groups: Sequence[str]
    bars: Sequence[Bar]

    @property
    def size(self) -> tuple[float, float]:
        return min(13.0, max(9.0, 3.4 + 0.44 * len(self.groups) * (len(self.bars) + 1))), 4.8

    def draw(self, figure: Any) -> None:
        axes = figure.add_subplot()
        width = 0.84 / max(1, len(self.bars))
        narrow = len(self.bars) * len(self.groups) > 22  # then values are rotated to fit over the bars
        for number, bar in enumerate(self.bars):
            found = [(at, value, bar.intervals[at]) for at, value in enumerate(bar.values) if value is not None]
            shift = (number - (len(self.bars) - 1) / 2) * width
            drawn = axes.bar(
                [at + shift for at, _, _ in found],
                [value for _, value, _ in found],
                width * 0.92,
                label=wrapped(bar.label, 28),
                color=style(number)["color"],
                hatch=("", "//", "..")[number // 8 % 3],
                edgecolor="white",
            )
            for (_, value, interval), patch in zip(found, drawn, strict=True):
                low, high = interval or (value, value)
                middle = patch.get_x() + patch.get_width() / 2
                axes.plot([middle, middle], [low, high], color="#222222", linewidth=1.2)
                axes.annotate(
                    f"{100 * value:.1f}",
                    (middle, high),
                    xytext=(0, 2),
                    textcoords="offset points",
                    ha="center",
                    size=9,
                    rotation=90 * narrow,
                )
        axes.set_xticks(range(len(self.groups)), [wrapped(group, 24) for group in self.groups])
        axes.tick_params(axis="x", length=0)
        percent_axis(axes.yaxis)
        axes.set_yticks([fifth / 5 for fifth in range(6)])
        axes.set_ylim(0, 1.16 if narrow else 1.1)
        axes.set_ylabel(self.y_label)
        headed(figure, self.title)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02))
