"""A picture and its file: one look for all, the same bytes for the same figures, the command that made it below."""

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
"""Okabe and Ito's: told apart with every kind of colour vision. Yellow comes last, for it is faint on white."""

MARKERS = "osD^vPX*"
"""One for each colour, so that a print in black and white can be read too."""

OTHER_FOLDER = "give another folder"
"""What to do where a file cannot be written."""

_DPI = 150
_MARGIN = 0.03  # inches of white around everything
_LOOK = {
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelsize": 11,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
    "font.size": 11,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "ragkv",  # ids in the file are drawn from it; else from the clock
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
}


class Picture(Protocol):
    """What can be drawn."""

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches, without the caption."""

    def draw(self, figure: Any) -> None:
        """Draw into an empty `matplotlib.figure.Figure`."""


def require_matplotlib() -> None:
    """MissingExtraError before hours of work whose picture could not be drawn."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError(
            'Pictures need matplotlib; install it with: pip install "ragkv[plots]", or go without by --no-pictures.'
        )


def save(picture: Picture, stem: Path, *, command: str, notes: Sequence[str] = ()) -> tuple[Path, Path]:
    """Write `stem`.svg and `stem`.png, with `notes` and the `command` that makes them again as the caption.

    The same picture gives the same bytes with the same matplotlib: no date, no drawn ids. A file is there whole or as
    it was. MissingExtraError without matplotlib, RagkvError when a file cannot be written.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    width, height = picture.size
    # the caption's letters are 0.075 inch wide at most
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
    """The title at the left, over all axes and legends."""
    width = int(figure.get_figwidth() / 0.1)
    figure.suptitle("\n".join(wrapped(line, width) for line in lines), x=0.01, ha="left", fontsize=12.5)


def style(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of the line or the bar `number` of a picture."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": ("-", "--", ":", "-.")[number // len(COLOURS) % 4],
    }


def percent_axis(axis: Any) -> None:
    """Shares in [0, 1] as per cent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def wrapped(text: str, width: int) -> str:
    """`text` in lines of at most `width` letters."""
    return "\n".join(textwrap.wrap(text, width)) or text
