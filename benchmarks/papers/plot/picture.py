"""Save pictures in one style, with the command that made them below, and the same bytes for the same figures."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

from ragkv.errors import MissingExtraError
from ragkv.evaluation.writing import write_whole

__all__ = [
    "COLOURS",
    "MARKERS",
    "OTHER_FOLDER",
    "Picture",
    "headed",
    "percent_axis",
    "require_matplotlib",
    "save",
    "style",
    "wrapped",
]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito's colours, which people with any colour vision can tell apart; yellow is last, being faint on white."""

MARKERS = "osD^vPX*"
"""One marker per colour, so that a print in black and white is readable."""

OTHER_FOLDER = "give another folder"
"""The advice in errors about a file that cannot be written."""

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


class Picture(Protocol):
    """Something that can be drawn."""

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches, without the caption."""

    def draw(self, figure: Any) -> None:
        """Draw into an empty `matplotlib.figure.Figure`."""


def require_matplotlib() -> None:
    """Raise MissingExtraError without matplotlib, before hours of work whose picture could not be drawn."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError(
            'Pictures need matplotlib; install it with: pip install "ragkv[plots]", or go without by --no-pictures.'
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
            told = {"Date": None, "Creator": "ragkv"} if kind == "svg" else {"Software": "ragkv"}
            figure.savefig(held, format=kind, dpi=_DPI, metadata=told, bbox_inches="tight", pad_inches=_MARGIN)
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
