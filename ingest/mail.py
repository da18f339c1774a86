"""Mail: a message (EML), and a mailbox of several (mbox).

All inline text of a message is read, of a `multipart/alternative` the first form that is not blank. Everything else is
named in `left_out`.
"""

from __future__ import annotations

import email
import email.utils
import re
from base64 import b64decode
from binascii import a2b_qp
from collections.abc import Iterator
from contextlib import suppress
from email.message import Message
from itertools import groupby
from typing import Any

from ragkv.ingest.charset import clean, decode
from ragkv.ingest.html import read_html
from ragkv.ingest.parser import Parsed, Unreadable, join_sections

_MAX_MESSAGES = 100_000  # of a mailbox
_MAX_PARTS = 1000  # of a message
_SEPARATOR = re.compile(
    rb"(?im)(?:\A|(?<=\n\n)|^(?=From .*\d:\d\d))From [^\n]*\n(?=(?:[!-9;-~]+:[^\n]*\n|[ \t][^\n]*\n){0,50}?"
    rb"(?:from|date|received|return-path|message-id|subject|to|x-[\w-]+):)"
)
"""A line of prose may begin with "From ", so header lines must follow, and a blank line or a time stand before."""
_ENCODED_WORD = re.compile(r"=\?([^?*\s]+)(?:\*[^?]*)?\?([bqBQ])\?([^?]*)\?=")


def read_eml(data: bytes) -> Parsed:
    """A message: its sender, recipients, date and subject, then its text."""
    left_out: list[str] = []
    if b"\x00" in data[:64] or data.startswith(b"\xef\xbb\xbf"):  # saved by a text editor
        data = decode(data).encode()
    subject, text = _read_message(email.message_from_bytes(data), left_out)
    return Parsed(text=text, title=subject or None, left_out=left_out)


def read_mbox(data: bytes) -> Parsed:
    """Each message of a mailbox, cited by its number and subject; messages never share a chunk."""
    first, *parts = _SEPARATOR.split(data.replace(b"\r\n", b"\n"), maxsplit=_MAX_MESSAGES + 1)
    if len(parts) > _MAX_MESSAGES:
        raise Unreadable(f"mailbox cannot be read: it has more than {_MAX_MESSAGES:,} messages")
    left_out: list[str] = []
    if first.strip():
        if not parts:
            raise Unreadable("mailbox cannot be read: no message begins with a line of From; name a single one .eml")
        left_out.append(f"{len(first.strip()):,} bytes before the first message")

    def messages() -> Iterator[tuple[str, dict[str, Any]]]:
        for number, raw in enumerate(parts, start=1):
            missing: list[str] = []
            subject, text = _read_message(email.message_from_bytes(raw), missing)
            left_out.extend(f"message {number}: {part}" for part in missing)
            yield (
                re.sub(r"(?m)^>(>*From )", r"\1", text),
                {"heading": f"message {number}" + (f" ({subject[:80]})" if subject else ""), "alone": True},
            )

    text, sections = join_sections(messages())
    return Parsed(text=text, sections=sections, left_out=left_out)


def _read_message(message: Message, left_out: list[str]) -> tuple[str, str]:
    """(subject, text) of one message."""
    values = {name.lower(): _header(str(value)) for name, value in reversed(list(message.raw_items()))}
    heads = [
        f"{name}: {value}" for name in ("From", "To", "Cc", "Date", "Subject") if (value := values.get(name.lower()))
    ]
    body = "\n\n".join(text for text in _texts(message, left_out, [0]) if text)
    if not body:
        left_out.append("its text is empty")
    return values.get("subject", ""), clean("\n".join(heads) + f"\n\n{body}")


def _texts(part: Message, left_out: list[str], count: list[int]) -> Iterator[str]:
    """The inline texts of a part; `count` are the parts so far."""
    count[0] += 1
    if count[0] > _MAX_PARTS:
        raise Unreadable(f"message cannot be read: it has more than {_MAX_PARTS:,} parts")
    kind = part.get_content_type()
    payload: Any = part.get_payload()
    name = _header(str(part.get_filename() or "")) or kind
    inline = part.get_content_disposition() != "attachment"
    if isinstance(payload, list) and kind == "multipart/alternative":
        plain_first = sorted(payload, key=lambda form: form.get_content_type() != "text/plain")
        forms = [(form.get_content_type(), list(_texts(form, left_out, count))) for form in plain_first]
        chosen = next((texts for _, texts in forms if any(texts)), [])
        for other, texts in forms:
            if words := _words(" ".join(texts)) - _words(" ".join(chosen)):
                some = " ".join(sorted(words)[:50])
                left_out.append(f"the form {other} of the text, which has other words ({some})")
        yield from chosen
    elif isinstance(payload, list) and inline and part.get_content_maintype() == "multipart":
        for child in payload:
            yield from _texts(child, left_out, count)
        if part.epilogue and _words(part.epilogue):
            left_out.append(f"text after the last part ({' '.join(part.epilogue.split())[:500]})")
    elif isinstance(payload, list) and inline and kind == "message/rfc822":
        message = payload[0]
        if _is_base64(part):  # against RFC 2046
            message = email.message_from_bytes(_from_base64(message.as_string().lstrip()))
        yield _read_message(message, left_out)[1].strip()
    elif inline and part.get_content_maintype() in ("text", "multipart"):
        try:
            yield _text(part, left_out)
        except Unreadable as error:
            left_out.append(f"part {count[0]} ({name}): {error}")
    else:
        left_out.append(f"attachment {name}")


def _text(part: Message, left_out: list[str]) -> str:
    data: Any = part.get_payload() if _is_base64(part) else part.get_payload(decode=True)
    if isinstance(data, str):
        data = _from_base64(data)
    assert isinstance(data, bytes)
    charset = part.get_param("charset")
    declared = email.utils.collapse_rfc2231_value(charset) if charset else None
    if part.get_content_subtype() != "html":
        text = decode(data, declared).strip() if data.strip() else ""
        if str(part.get_param("format")).lower() == "flowed":  # RFC 3676: lines that end with a space go on
            space = "" if str(part.get_param("delsp")).lower() == "yes" else " "
            text = re.sub(r"(?m)^ |(?<!^--) \n(?![> ]|-- $)", lambda end: space if end[0] == " \n" else "", text)
        return text
    page = read_html(data, declared, whole=True) if data.strip() else Parsed(text="")
    left_out += page.left_out
    return page.text.strip()


def _is_base64(part: Message) -> bool:
    return str(part.get("content-transfer-encoding", "")).strip().lower() == "base64"


def _from_base64(text: str) -> bytes:
    """The bytes of base64 that may be cut off, and the plain lines after it, which mailing lists add."""
    coded = re.match(r"(?:\s*+[A-Za-z0-9+/]++=*+[ \t\r]*+(?:\n|\Z))*+", text)
    assert coded is not None
    pieces = re.sub(r"\s", "", coded[0]).split("=")
    data = b"".join(b64decode(piece[: len(piece) - (len(piece) % 4 == 1)] + "==") for piece in pieces)
    return data + text[coded.end() :].encode("utf-8", "surrogateescape")


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


def _header(raw: str) -> str:
    """A header's text: its encoded words by their encodings, and bytes that are not ASCII by a guess."""
    raw = re.sub(r"(\?=)\s+(?==\?)", r"\1", raw)
    if not raw.isascii():
        raw = _decoded(raw.encode("utf-8", "surrogateescape"), "")
    pieces: list[tuple[str, bytes]] = []
    end = 0
    for word in _ENCODED_WORD.finditer(raw):
        pieces.append(("", raw[end : word.start()].encode()))
        data = word[3].encode()
        with suppress(ValueError):  # it stays as it is
            data = b64decode(data + b"==") if word[2] in "bB" else a2b_qp(data, header=True)
        pieces.append((word[1].lower(), data))
        end = word.end()
    pieces.append(("utf-8", raw[end:].encode()))
    # Several words of one encoding may share a character
    texts = (
        _decoded(b"".join(data for _, data in group), charset)
        for charset, group in groupby(filter(lambda piece: piece[1], pieces), key=lambda piece: piece[0])
    )
    return " ".join("".join(texts).split())


def _decoded(data: bytes, charset: str) -> str:
    try:
        return decode(data, charset)
    except Unreadable:
        return data.decode("ascii", "replace")
