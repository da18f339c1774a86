"""Which expert proposed each token of an answer (PCED Figure 2): tokens from left to right, one row per expert."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ragkv.benchmarks.papers.plot.picture import headed

__all__ = ["Trace"]

_GOLD, _OTHER = "#009E73", "#D55E00"
_WIDEST = 44  # tokens per line; a longer answer takes several


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The tokens of an answer, each with the index of the winning expert (None for the end, or a mixture of experts).

    `gold` are the indices of the experts whose chunk is needed for the answer.
    """

    title: str
    question: str
    experts: Sequence[str]
    gold: Collection[int]
    tokens: Sequence[tuple[str, int | None]]

    def __post_init__(self) -> None:
        for _, winner in self.tokens:
            if winner is not None and not 0 <= winner < len(self.experts):
                raise ValueError(f"winner {winner} is none of {len(self.experts)} experts")

    @property
    def _lines(self) -> list[Sequence[tuple[str, int | None]]]:
        """The answer split into lines of nearly equal length."""
        count = max(1, -(-len(self.tokens) // _WIDEST))
        each = max(1, -(-len(self.tokens) // count))
        return [self.tokens[at : at + each] for at in range(0, len(self.tokens), each)] or [()]

    @property
    def size(self) -> tuple[float, float]:
        longest = max(len(line) for line in self._lines)
        return max(8.0, 3.0 + 0.24 * longest), 1.2 + len(self._lines) * (1.1 + 0.3 * len(self.experts))

    def draw(self, figure: Any) -> None:
        from matplotlib.lines import Line2D

        lines = self._lines
        many = figure.subplots(len(lines), 1, squeeze=False)
        for axes, line in zip(many[:, 0], lines, strict=True):
            self._draw_line(axes, line, max(len(each) for each in lines))
        headed(figure, self.title, f"Question: {self.question}")
        many[-1, 0].set_xlabel("answer, token by token")
        kinds = [(_GOLD, "o", "proposed by the expert of a gold chunk"), (_OTHER, "X", "proposed by another expert")]
        marks = [Line2D([], [], color=c, marker=m, linestyle="", markersize=8, label=label) for c, m, label in kinds]
        many[0, 0].legend(handles=marks, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=10)

    def _draw_line(self, axes: Any, line: Sequence[tuple[str, int | None]], width: int) -> None:
        for row in range(len(self.experts)):
            if row in self.gold:
                axes.axhspan(row - 0.5, row + 0.5, color=_GOLD, alpha=0.1, linewidth=0)
        won = [(at, row) for at, (_, row) in enumerate(line) if row is not None]
        axes.plot([at for at, _ in won], [row for _, row in won], color="#999999", linewidth=1, zorder=1)
        for is_gold, colour, marker in ((True, _GOLD, "o"), (False, _OTHER, "X")):
            points = [(at, row) for at, row in won if (row in self.gold) is is_gold]
            axes.scatter(
                [at for at, _ in points], [row for _, row in points], s=52, color=colour, marker=marker, zorder=2
            )
        axes.set_xlim(-0.7, width - 0.3)
        axes.set_ylim(len(self.experts) - 0.5, -0.5)
        axes.set_xticks(range(len(line)), [_shown(text) for text, _ in line], rotation=90, family="DejaVu Sans Mono")
        axes.set_yticks(range(len(self.experts)), [_short(name) for name in self.experts])
        for row, label in enumerate(axes.get_yticklabels()):
            if row in self.gold:
                label.set(fontweight="bold", color=_GOLD)
        axes.grid(axis="x", color="#eeeeee")


def _shown(token: str) -> str:
    """A token with visible white space."""
    return token.replace(" ", "␣").replace("\n", "⏎")


def _short(name: str) -> str:
    return name if len(name) <= 34 else f"{name[:33]}…"
