"""Bytes to text, whatever the encoding; what is not text is called binary."""

from __future__ import annotations

import re

from ragkv.ingest.limit import check_text
from ragkv.ingest.parser import Parsed, Unreadable

__all__ = ["BINARY", "clean", "decode", "read_plain"]

BINARY = "binary file"
_BOMS = (  # UTF-32 first: its little-endian mark begins with UTF-16's
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_SAMPLE = 1 << 20  # bytes that the guess of an encoding looks at, from shortly before the first that is no ASCII
_NOT_ASCII = re.compile(rb"[\x80-\xff]")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def read_plain(data: bytes) -> Parsed:
    """The text as it stands, one section."""
    return Parsed(text=decode(data))


def decode(data: bytes) -> str:
    """Bytes to text: by byte order mark, as UTF-16 by its NULs, as UTF-8, else as charset-normalizer says."""
    check_text(len(data) // 4)  # no encoding takes more bytes for a character
    encoding = next((name for mark, name in _BOMS if data.startswith(mark)), None) or _utf16(data) or "utf-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        if b"\x00" in data[:8192]:
            raise Unreadable(BINARY) from None
        text = _legacy(data)
    check_text(len(text))
    sample = text[:65536]
    if "\x00" in sample or 50 * len(_CONTROL.findall(sample)) > len(sample):
        raise Unreadable(BINARY)
    return clean(text)


def _legacy(data: bytes) -> str:
    """An 8-bit or East Asian encoding: the best guess, or Windows-1252 where it is no worse."""
    from charset_normalizer import from_bytes

    start = next((found.start() for found in _NOT_ASCII.finditer(data)), 0)
    sample = data if len(data) <= _SAMPLE else data[max(0, start - _SAMPLE // 16) :][:_SAMPLE]
    guesses = from_bytes(sample)  # which tries some ninety encodings on all that it gets
    best = guesses.best()
    if best is None:
        raise Unreadable(BINARY)
    for guess in guesses:
        as_good = guess.chaos <= best.chaos and guess.coherence >= best.coherence
        if as_good and "cp1252" in guess.could_be_from_charset:
            best = guess
            break
    return str(best) if sample is data else data.decode(best.encoding, "replace")


def _utf16(data: bytes) -> str | None:
    """UTF-16 without a mark: in most scripts' text every other byte is nearly always, or never, NUL."""
    sample = data[: 4096 & ~1]
    even, odd = sample[::2].count(0), sample[1::2].count(0)
    if odd > 0.4 * len(sample) / 2 and even == 0:
        return "utf-16-le"
    if even > 0.4 * len(sample) / 2 and odd == 0:
        return "utf-16-be"
    return None


def clean(text: str) -> str:
    """One kind of line end, no NUL, nothing that UTF-8 cannot hold (lone surrogates, which PDFs produce)."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "")
    return text.encode("utf-8", "replace").decode("utf-8")
