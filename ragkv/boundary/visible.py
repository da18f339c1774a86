"""Make other people's text safe to show: terminals obey control characters, and bidi marks deceive readers.

Documents, file names, models, indexes and the answers about them hold text that others wrote. ESC starts sequences that
can write the clipboard, a carriage return overwrites the line, bidi and invisible characters make a name look like
another one, and a newline makes two rows out of one. Each of them is shown as Python would write it: `\\x1b`,
`\\u202e`.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["first_sentence", "json_text", "one_line", "visible"]

# Controls (C0 except newline and tab, DEL, C1), line and paragraph separators, bidi marks, invisible characters, tags,
# and lone surrogates, which stand for the bytes of a file name that is not UTF-8. Soft hyphens, zero-width spaces and
# joiners are left alone, because some languages (Thai, Persian, Hindi) and emoji are spelt with them.
_ODD = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
_IN_TEXT = re.compile(f"[{_ODD}]")
_IN_LINE = re.compile(f"[\\t\\n{_ODD}]")


def visible(text: str) -> str:
    """Text of several lines in which every control character except newline and tab is written out. Idempotent.

    It works character by character, so that an escape sequence that arrives in two pieces is written out too.
    """
    return _IN_TEXT.sub(_written, text)


def one_line(text: str) -> str:
    """As `visible`, for text that has to stay in one line: newlines and tabs are written out too."""
    return _IN_LINE.sub(_written, text)


def json_text(value: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """JSON with `\\u` escapes for the same characters, so that it can be shown and reads back unchanged."""
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    return _IN_TEXT.sub(lambda found: json.dumps(found[0])[1:-1], text)  # they only occur within strings


def first_sentence(error: BaseException) -> str:
    """The first sentence of a library's error, without its full stop, to be quoted within a sentence of ours."""
    found = str(error).strip().replace(":\n", ":").splitlines()
    return " ".join(found[0].split(". ")[0].rstrip(".").split()) if found else type(error).__name__


def _written(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
