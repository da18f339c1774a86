r"""Show text that other people wrote safely in a terminal.

Documents, file names, models and answers may contain control characters, which a terminal obeys: escape sequences can
write the clipboard, a carriage return overwrites the line, and bidi or invisible characters disguise a name. They are
shown as Python writes them: `\x1b`, `\u202e`.
"""

from __future__ import annotations

import json
import re
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


def beginning(text: str, width: int) -> str:
    """The first words of a text on one line, cut off at `width` characters."""
    words = " ".join(text.split())
    return words if len(words) <= width else words[: width - 1] + "…"


def first_sentence(error: BaseException) -> str:
    """The first sentence of a library's error without its full stop, to be quoted in an error of ragkv."""
    if isinstance(error, KeyError):
        return f"the key {error} is missing"
    found = str(error).strip().replace(":\n", ":").splitlines()
    return " ".join(found[0].split(". ")[0].rstrip(".").split()) if found else type(error).__name__


def _written(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1]  # not by a codec, which is imported when it is first used
