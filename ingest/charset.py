"""Bytes to text: the encodings of files, pages and messages.

Bytes that are not text are refused as binary.
"""

from __future__ import annotations

import re
from codecs import register_error

from ragkv.ingest.parser import Unreadable, check_text

BINARY = "binary file"
_NO_TEXT = {b"%PDF-": "it is a PDF: name it .pdf", b"{\\rtf": "RTF is not read; save it as DOCX or ODT"}
_BOMS = (  # UTF-32 first: its little-endian mark begins with UTF-16's
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_SAMPLE = 1 << 20  # bytes for guessing an encoding, from shortly before the first one that is not ASCII
_UTF_8 = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_NOT_ASCII = re.compile(rb"[\x80-\xff]")
_EAST_ASIAN = re.compile(rb"[\x80-\xff]{3}")
"""Three such bytes in a row: Latin text has single ones between letters."""
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def decode(data: bytes) -> str:
    """Decode by byte order mark, as UTF-16 if the NULs suggest it, as UTF-8, else by charset-normalizer."""
    if reason := next((why for mark, why in _NO_TEXT.items() if data.startswith(mark)), None):
        raise Unreadable(reason)
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
    """Decode an 8-bit or East Asian encoding by the best guess, or as Windows-1252 if that is no worse; and UTF-8 that
    is cut off, or has a few bytes of Windows-1252.
    """
    from charset_normalizer import from_bytes
    from charset_normalizer.utils import is_multi_byte_encoding

    start = next((found.start() for found in _NOT_ASCII.finditer(data)), 0)
    sample = data if len(data) <= _SAMPLE else data[max(0, start - _SAMPLE // 16) :][:_SAMPLE]
    wrong = 0

    def single(error: UnicodeError) -> tuple[str, int]:
        nonlocal wrong
        wrong += 1
        assert isinstance(error, UnicodeDecodeError)
        if error.reason == "unexpected end of data":
            return "", error.end
        return error.object[error.start : error.end].decode("cp1252", "replace"), error.end

    register_error("ragkv-single", single)
    sample.decode("utf-8", "ragkv-single")
    if 4 * wrong <= len(_UTF_8.findall(sample)):
        return data.decode("utf-8", "ragkv-single")
    guesses = from_bytes(sample)  # only a sample, because it tries some ninety encodings
    best = guesses.best()
    if best is None:
        raise Unreadable(BINARY)
    for guess in guesses:
        as_good = guess.chaos <= best.chaos and guess.coherence >= best.coherence
        if as_good and "cp1252" in guess.could_be_from_charset:
            best = guess
            break
    if is_multi_byte_encoding(best.encoding) and not _EAST_ASIAN.search(sample):
        return data.decode("cp1252", "replace")
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
    """Make all line ends `\\n`, and drop NULs and lone surrogates (which PDFs produce)."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "")
    return text.encode("utf-8", "replace").decode("utf-8")
