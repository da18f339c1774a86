"""Curves over a number, with a band for the 95 % interval of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ragkv.benchmarks.papers.plot.picture import headed, percent_axis, style, wrapped

__all__ = ["Curve", "Curves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve: `y` at every `x`, and the ends of its interval if they are known."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in ("y", "low", "high"):
            if (values := getattr(self, name)) is not None and len(values) != len(self.x):
                raise ValueError(f"curve {self.label!r}: {len(values)} values of {name} for {len(self.x)} of x")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Curves over one axis. `y` are shares in [0, 1], shown in per cent. `even` places all values of x at equal
    distances, for values that double (8, 16, … 128).
    """

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    even: bool = False

    @property
    def size(self) -> tuple[float, float]:
        return 9.0, 4.6

    def draw(self, figure: Any) -> None:
        axes = figure.add_subplot()
        values = sorted({at for curve in self.curves for at in curve.x})
        places = {value: float(at) if self.even else value for at, value in enumerate(values)}
        for number, curve in enumerate(self.curves):
            look = style(number)
            x = [places[value] for value in curve.x]
            axes.plot(x, curve.y, label=wrapped(curve.label, 28), linewidth=2, markersize=6, **look)
            if curve.low is not None and curve.high is not None:
                axes.fill_between(x, curve.low, curve.high, color=look["color"], alpha=0.13, linewidth=0)
        if self.even or _apart(values):
            axes.set_xticks(list(places.values()), [f"{value:g}" for value in values])
        percent_axis(axes.yaxis)
        axes.set_ylim(*_limits(self.curves))
        axes.set(xlabel=self.x_label, ylabel=self.y_label)
        headed(figure, self.title)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02))


def _apart(places: Sequence[float]) -> bool:
    """Whether the values of x lie far enough apart to label each of them."""
    wide = (places[-1] - places[0]) / 14 if places else 0
    return all(after - before >= wide for before, after in pairwise(places))


def _limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """The y axis: all of [0, 1], or only the half that holds every curve."""
    values = [value for curve in curves for part in (curve.y, curve.low, curve.high) for value in part or ()]
    least, most = (min(values), max(values)) if values else (0.0, 1.0)
    return (0.45 if least >= 0.5 else 0.0), (1.02 if most > 0.5 else max(0.1, most * 1.2))
