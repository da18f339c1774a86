"""What others wrote, made safe to show: a terminal obeys control characters, a reader believes what bidi marks hide.

Documents, file names, models, indexes and the answers about them are other people's text. ESC starts sequences that
write the clipboard, a carriage return overwrites what stands in the line, bidi and invisible characters make a name
look like another, a newline makes one row two. Each is shown as Python would write it: `\\x1b`, `\\u202e`.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["first_sentence", "json_text", "one_line", "visible"]

# Controls (C0 but newline and tab, DEL, C1), line and paragraph separators, bidi marks, invisible characters, tags, and
# lone surrogates, which are what is left of a file name that is not UTF-8. Soft hyphens, zero-width spaces and joiners
# belong to the spelling of languages (Thai, Persian, Hindi) and of emoji, and stay.
_ODD = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
_IN_TEXT = re.compile(f"[{_ODD}]")
_IN_LINE = re.compile(f"[\\t\\n{_ODD}]")


def visible(text: str) -> str:
    """Text of several lines with every control character but newline and tab written out. Idempotent.

    Character by character, so that an escape sequence that comes in two pieces is none in either.
    """
    return _IN_TEXT.sub(_written, text)


def one_line(text: str) -> str:
    """As `visible`, for what must not split a row: newlines and tabs are written out too."""
    return _IN_LINE.sub(_written, text)


def json_text(value: Any, *, indent: int | None = None, ascii_only: bool = False) -> str:
    """JSON in which the same characters are `\\u` escapes, so that it reads back as it was and can be shown."""
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    return _IN_TEXT.sub(lambda found: json.dumps(found[0])[1:-1], text)  # outside of strings there are none


def first_sentence(error: BaseException) -> str:
    """The first sentence of a library's error, without its full stop, to be quoted within a sentence of ours."""
    found = str(error).strip().replace(":\n", ":").splitlines()
    return " ".join(found[0].split(". ")[0].rstrip(".").split()) if found else type(error).__name__


def _written(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
