"""Bytes to text in any encoding; bytes that are not text are refused as binary."""

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
_SAMPLE = 1 << 20  # bytes from which an encoding is guessed, beginning shortly before the first that is not ASCII
_NOT_ASCII = re.compile(rb"[\x80-\xff]")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def read_plain(data: bytes) -> Parsed:
    """The text as it is, as one section."""
    return Parsed(text=decode(data))


def decode(data: bytes) -> str:
    """Decode bytes: by byte order mark, as UTF-16 if it has the NULs of that, as UTF-8, else by charset-normalizer."""
    check_text(len(data) // 4)  # no encoding takes more than four bytes for a character
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
    """Decode an 8-bit or East Asian encoding by the best guess, or as Windows-1252 where that is no worse."""
    from charset_normalizer import from_bytes

    start = next((found.start() for found in _NOT_ASCII.finditer(data)), 0)
    sample = data if len(data) <= _SAMPLE else data[max(0, start - _SAMPLE // 16) :][:_SAMPLE]
    guesses = from_bytes(sample)  # only a sample: it tries some ninety encodings on all that it is given
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
    """Recognise UTF-16 without a byte order mark: in most scripts, nearly every second byte is NUL."""
    sample = data[: 4096 & ~1]
    even, odd = sample[::2].count(0), sample[1::2].count(0)
    if odd > 0.4 * len(sample) / 2 and even == 0:
        return "utf-16-le"
    if even > 0.4 * len(sample) / 2 and odd == 0:
        return "utf-16-be"
    return None


def clean(text: str) -> str:
    """Make all line ends `\\n`, and drop NULs and what UTF-8 cannot hold (lone surrogates, which PDFs produce)."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "")
    return text.encode("utf-8", "replace").decode("utf-8")
