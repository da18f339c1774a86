"""HTML and Markdown for notebooks, of text that others wrote: all of it is escaped, and nothing in it can act.

Everything is styled where it stands, because notebooks drop style sheets, and with translucent colours over the
notebook's own ink and paper, so that it can be read in light and in dark ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from ragkv.boundary.visible import visible

__all__ = ["as_html", "as_markdown", "card", "details", "expert_mark", "run", "table"]

_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")
_LINE = "border-bottom:1px solid rgba(128,128,128,.35)"


def as_html(text: object) -> str:
    """Text as HTML that shows just this text."""
    return escape(visible(str(text)), quote=True)


def as_markdown(text: str) -> str:
    """Text as Markdown that shows just this text, in lines of its own."""
    lines = (_PUNCTUATION.sub(r"\\\1", line.strip()) for line in visible(text).splitlines())
    return "\\\n".join(line for line in lines if line)


def card(*parts: str) -> str:
    """The whole of what a notebook shows; `parts` are HTML, as of all functions here that take HTML."""
    return f'<div style="max-width:60em;line-height:1.5">{"".join(parts)}</div>'


def details(summary: str, body: str) -> str:
    """HTML that opens when its summary is clicked."""
    return (
        f'<details style="margin:.4em 0"><summary style="cursor:pointer;opacity:.8">{summary}</summary>{body}</details>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are HTML; columns without a head have none."""
    cell = f"text-align:left;vertical-align:top;padding:.25em .6em;background:none;{_LINE}"
    above = "".join(f'<th style="{cell}" scope="col">{name}</th>' for name in head)
    body = "".join("<tr>" + "".join(f'<td style="{cell}">{each}</td>' for each in row) + "</tr>" for row in rows)
    whole = f"<thead><tr>{above}</tr></thead><tbody>{body}</tbody>"
    return f'<table style="border-collapse:collapse;color:inherit">{whole}</table>'


def run(text: str, expert: int | None, name: str) -> str:
    """A run of an answer's text; the expert that won it, counted from 0, colours it, and the mouse shows its name."""
    if expert is None:
        return as_html(text)
    return f'<span style="{_colour(expert)}" title="{expert + 1}: {as_html(name)}">{as_html(text)}</span>'


def expert_mark(expert: int) -> str:
    """An expert's number in its colour, for a legend."""
    return f'<span style="{_colour(expert)};padding:0 .45em">{expert + 1}</span>'


def _colour(expert: int) -> str:
    hue = round(210 + expert * 137.508) % 360  # the golden angle: neighbours differ, however many there are
    return f"background:hsla({hue},80%,50%,.25);border-bottom:2px solid hsl({hue},70%,50%)"
