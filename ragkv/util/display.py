r"""Show text that other people wrote, safely: as plain text in a terminal, and as HTML or Markdown in a notebook.

Documents, file names, models and answers may contain control characters, which a terminal obeys: escape sequences can
write the clipboard, a carriage return overwrites the line, and bidi or invisible characters disguise a name. They are
shown as Python writes them: `\x1b`, `\u202e`. In HTML and Markdown all such text is escaped.

The HTML uses inline styles, because notebooks drop style sheets, and translucent colours, so that it is readable on
light and on dark backgrounds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

# Controls (C0 except newline and tab, DEL, C1), line and paragraph separators, bidi marks, invisible characters, tags,
# and lone surrogates, which stand for the bytes of a file name that is not UTF-8. Soft hyphens, zero-width spaces and
# joiners are not escaped, because some languages (Thai, Persian, Hindi) and emoji are spelt with them.
_ODD = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
_IN_TEXT = re.compile(f"[{_ODD}]")
_IN_LINE = re.compile(f"[\\t\\n{_ODD}]")


def visible(text: str) -> str:
    """Escape every control character except newline and tab. Idempotent.

    It works character by character, so an escape sequence that arrives in two parts is escaped too.
    """
    return _IN_TEXT.sub(_written, text)


def one_line(text: str) -> str:
    """As `visible`, for text that has to stay on one line: newlines and tabs are escaped too."""
    return _IN_LINE.sub(_written, text)


def json_text(value: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """JSON with `\\u` escapes for the same characters: it is safe to show and parses to the same value."""
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    return _IN_TEXT.sub(lambda found: json.dumps(found[0])[1:-1], text)  # they only occur within strings


def first_sentence(error: BaseException) -> str:
    """The first sentence of a library's error without its full stop, to be quoted in an error of ragkv."""
    if isinstance(error, KeyError):
        return f"the key {error} is missing"
    found = str(error).strip().replace(":\n", ":").splitlines()
    return " ".join(found[0].split(". ")[0].rstrip(".").split()) if found else type(error).__name__


def _written(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1]  # not by a codec, which is imported when it is first used


_PUNCTUATION = re.compile(r"([!-/:-@\[-`{-~])")
_LINE = "border-bottom:1px solid rgba(128,128,128,.35)"


def as_html(text: object) -> str:
    """Text escaped for HTML."""
    return escape(visible(str(text)), quote=True)


def as_markdown(text: str) -> str:
    """Text escaped for Markdown, with its line breaks."""
    lines = (_PUNCTUATION.sub(r"\\\1", line.strip()) for line in visible(text).splitlines())
    return "\\\n".join(line for line in lines if line)


def card(*parts: str) -> str:
    """The outer element of a notebook's output; `parts` are HTML."""
    return f'<div style="max-width:60em;line-height:1.5">{"".join(parts)}</div>'


def details(summary: str, body: str) -> str:
    """HTML that opens when its summary is clicked."""
    return (
        f'<details style="margin:.4em 0"><summary style="cursor:pointer;opacity:.8">{summary}</summary>{body}</details>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. Its heads and cells are HTML."""
    cell = f"text-align:left;vertical-align:top;padding:.25em .6em;background:none;{_LINE}"
    above = "".join(f'<th style="{cell}" scope="col">{name}</th>' for name in head)
    body = "".join("<tr>" + "".join(f'<td style="{cell}">{each}</td>' for each in row) + "</tr>" for row in rows)
    whole = f"<thead><tr>{above}</tr></thead><tbody>{body}</tbody>"
    return f'<table style="border-collapse:collapse;color:inherit">{whole}</table>'


def run(text: str, expert: int | None, name: str) -> str:
    """A run of an answer in the colour of the expert (counted from 0) that won it, with the name as a tooltip."""
    if expert is None:
        return as_html(text)
    return f'<span style="{_colour(expert)}" title="{expert + 1}: {as_html(name)}">{as_html(text)}</span>'


def expert_mark(expert: int) -> str:
    """An expert's number in its colour, for the legend."""
    return f'<span style="{_colour(expert)};padding:0 .45em">{expert + 1}</span>'


def _colour(expert: int) -> str:
    hue = round(210 + expert * 137.508) % 360  # the golden angle: neighbours differ, however many there are
    return f"background:hsla({hue},80%,50%,.25);border-bottom:2px solid hsl({hue},70%,50%)"
