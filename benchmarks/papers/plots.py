"""The plots of the papers' tables: grouped bars, curves with intervals, and which PCED expert proposed each token.

All have one style and the command that made them below the plot. The same figures give the same bytes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from ragkv.benchmarks.evaluation.output import write_whole
from ragkv.errors import MissingExtraError, install_hint

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito's colours, which people with any colour vision can tell apart; yellow is last, being faint on white."""

MARKERS = "osD^vPX*"
"""One marker per colour, so that a print in black and white is readable."""

OTHER_FOLDER = "give another folder"
"""The advice in errors about a file that cannot be written."""

_RIGHT = "right answers"
_DPI = 150
_MARGIN = 0.03  # inches of white on every side
_LOOK = {
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelsize": 11,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08,
    "font.family": "DejaVu Sans",  # shipped with matplotlib, so the same on every machine
    "font.size": 11,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "ragkv",  # makes the ids in the file reproducible
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
}


Point = tuple[float, float, float]
"""A share in [0, 1], and the ends of its interval."""


@dataclass(frozen=True, slots=True)
class Picture:
    """What `draw` adds to an empty `matplotlib.figure.Figure` of `size`: inches, without the caption.

    `text` is Markdown to read beside it.
    """

    size: tuple[float, float]
    draw: Callable[[Any], None]
    text: str = ""


def require_matplotlib() -> None:
    """Raise MissingExtraError without matplotlib, before hours of work whose picture could not be drawn."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError(
            f"Pictures need matplotlib; {install_hint('plots')}, or leave them out with --no-pictures."
        )


def save(picture: Picture, stem: Path, *, command: str, notes: Sequence[str] = ()) -> tuple[Path, Path]:
    """Write `stem`.svg and `stem`.png, with `notes` and the `command` that makes them as the caption.

    With the same version of matplotlib, the same picture gives the same bytes: the files hold no date and no random
    ids. Each file is replaced as a whole. Raises MissingExtraError without matplotlib, and RagkvError if a file cannot
    be written.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    width, height = picture.size
    # a letter of the caption is at most 0.075 inch wide
    lines = [line for note in notes for line in textwrap.wrap(note, int(width / 0.072))]
    lines += textwrap.wrap(f"made by: {command}", int(width / 0.072), break_on_hyphens=False)
    written = stem.with_name(f"{stem.name}.svg"), stem.with_name(f"{stem.name}.png")
    with rc_context(_LOOK):
        figure = Figure(figsize=(width, height + 0.16 * len(lines)))
        picture.draw(figure)
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=8, color="#444444", linespacing=1.35)
        for path in written:
            held = BytesIO()
            kind = path.suffix[1:]
            metadata = {"Date": None, "Creator": "ragkv"} if kind == "svg" else {"Software": "ragkv"}
            figure.savefig(held, format=kind, dpi=_DPI, metadata=metadata, bbox_inches="tight", pad_inches=_MARGIN)
            write_whole(path, held.getvalue(), instead=OTHER_FOLDER)
    return written


def headed(figure: Any, *lines: str) -> None:
    """Put the title at the left, above all axes and legends."""
    width = int(figure.get_figwidth() / 0.1)
    figure.suptitle("\n".join(wrapped(line, width) for line in lines), x=0.01, ha="left", fontsize=12.5)


def style(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of curve or bar `number`."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": ("-", "--", ":", "-.")[number // len(COLOURS) % 4],
    }


def percent_axis(axis: Any) -> None:
    """Label the axis of shares in [0, 1] in per cent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def wrapped(text: str, width: int) -> str:
    """`text` wrapped to lines of at most `width` letters."""
    return "\n".join(textwrap.wrap(text, width)) or text


def bar_picture(title: str, groups: Sequence[str], bars: Mapping[str, Sequence[Point | None]]) -> Picture:
    """Groups of bars, with one bar per candidate in each group; None where nothing was measured."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        width = 0.84 / max(1, len(bars))
        narrow = len(bars) * len(groups) > 22  # then values are rotated to fit over the bars
        for number, (label, points) in enumerate(bars.items()):
            placed = [(at, *point) for at, point in enumerate(points) if point is not None]
            shift = (number - (len(bars) - 1) / 2) * width
            drawn = axes.bar(
                [at + shift for at, *_ in placed],
                [value for _, value, *_ in placed],
                width * 0.92,
                label=wrapped(label, 28),
                color=style(number)["color"],
                hatch=("", "//", "..")[number // 8 % 3],
                edgecolor="white",
            )
            for (_, value, low, high), patch in zip(placed, drawn, strict=True):
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
        axes.set_xticks(range(len(groups)), [wrapped(group, 24) for group in groups])
        axes.tick_params(axis="x", length=0)
        percent_axis(axes.yaxis)
        axes.set_yticks([fifth / 5 for fifth in range(6)])
        axes.set_ylim(0, 1.16 if narrow else 1.1)
        axes.set_ylabel(_RIGHT)
        headed(figure, title)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02))

    return Picture((min(13.0, max(9.0, 3.4 + 0.44 * len(groups) * (len(bars) + 1))), 4.8), draw)


def curve_picture(title: str, x_label: str, curves: Mapping[str, Mapping[float, Point]], *, even: bool) -> Picture:
    """Curves over one axis, by the places of their points. `even` places all values of x at equal distances, for
    values that double (8, 16, … 128).
    """

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        values = sorted({x_value for curve in curves.values() for x_value in curve})
        places = {value: float(x_value) if even else value for x_value, value in enumerate(values)}
        for number, (label, curve) in enumerate(curves.items()):
            look = style(number)
            x = [places[x_value] for x_value in sorted(curve)]
            y, low, high = zip(*(curve[x_value] for x_value in sorted(curve)), strict=True)
            axes.plot(x, y, label=wrapped(label, 28), linewidth=2, markersize=6, **look)
            axes.fill_between(x, low, high, color=look["color"], alpha=0.13, linewidth=0)
        if even or _apart(values):
            axes.set_xticks(list(places.values()), [f"{value:g}" for value in values])
        percent_axis(axes.yaxis)
        axes.set_ylim(*_limits([share for curve in curves.values() for point in curve.values() for share in point]))
        axes.set(xlabel=x_label, ylabel=_RIGHT)
        headed(figure, title)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02))

    return Picture((9.0, 4.6), draw)


def _apart(places: Sequence[float]) -> bool:
    """Whether the values of x lie far enough apart to label each of them."""
    wide = (places[-1] - places[0]) / 14 if places else 0
    return all(after - before >= wide for before, after in pairwise(places))


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """The y axis: all of [0, 1], or only the half that holds every value."""
    least, most = (min(values), max(values)) if values else (0.0, 1.0)
    return (0.45 if least >= 0.5 else 0.0), (1.02 if most > 0.5 else max(0.1, most * 1.2))


_GOLD, _OTHER = "#009E73", "#D55E00"
_WIDEST = 44  # tokens per line; a longer answer takes several


def trace_picture(
    title: str,
    question: str,
    experts: Sequence[str],
    gold: Collection[int],
    tokens: Sequence[tuple[str, int | None]],
    *,
    text: str = "",
) -> Picture:
    """The tokens of an answer, each with the index of the winning expert (None for the end, or a mixture of experts).

    `gold` are the indices of the experts whose chunk is needed for the answer.
    """
    for _, winner in tokens:
        if winner is not None and not 0 <= winner < len(experts):
            raise ValueError(f"winner {winner} is none of {len(experts)} experts")
    each = max(1, math.ceil(len(tokens) / max(1, math.ceil(len(tokens) / _WIDEST))))  # lines of nearly equal length
    lines = [tokens[at : at + each] for at in range(0, len(tokens), each)] or [()]
    longest = max(map(len, lines))

    def draw(figure: Any) -> None:
        from matplotlib.lines import Line2D

        many = figure.subplots(len(lines), 1, squeeze=False)
        for axes, line in zip(many[:, 0], lines, strict=True):
            _draw_trace(axes, line, longest, experts, gold)
        headed(figure, title, f"Question: {question}")
        many[-1, 0].set_xlabel("answer, token by token")
        kinds = [(_GOLD, "o", "proposed by the expert of a gold chunk"), (_OTHER, "X", "proposed by another expert")]
        marks = [Line2D([], [], color=c, marker=m, linestyle="", markersize=8, label=label) for c, m, label in kinds]
        many[0, 0].legend(handles=marks, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=10)

    size = max(8.0, 3.0 + 0.24 * longest), 1.2 + len(lines) * (1.1 + 0.3 * len(experts))
    return Picture(size, draw, text)


def _draw_trace(
    axes: Any, line: Sequence[tuple[str, int | None]], width: int, experts: Sequence[str], gold: Collection[int]
) -> None:
    for row in gold:
        axes.axhspan(row - 0.5, row + 0.5, color=_GOLD, alpha=0.1, linewidth=0)
    won = [(place, row) for place, (_, row) in enumerate(line) if row is not None]
    axes.plot([place for place, _ in won], [row for _, row in won], color="#999999", linewidth=1, zorder=1)
    for is_gold, colour, marker in ((True, _GOLD, "o"), (False, _OTHER, "X")):
        points = [(place, row) for place, row in won if (row in gold) is is_gold]
        axes.scatter(
            [place for place, _ in points], [row for _, row in points], s=52, color=colour, marker=marker, zorder=2
        )
    axes.set_xlim(-0.7, width - 0.3)
    axes.set_ylim(len(experts) - 0.5, -0.5)
    axes.set_xticks(range(len(line)), [_shown(text) for text, _ in line], rotation=90, family="DejaVu Sans Mono")
    axes.set_yticks(range(len(experts)), [_short(name) for name in experts])
    for row, label in enumerate(axes.get_yticklabels()):
        if row in gold:
            label.set(fontweight="bold", color=_GOLD)
    axes.grid(axis="x", color="#eeeeee")


def _shown(token: str) -> str:
    """A token with visible white space."""
    return token.replace(" ", "␣").replace("\n", "⏎")


def _short(name: str) -> str:
    return name if len(name) <= 34 else f"{name[:33]}…"
