"""Mail: a message (EML), and a mailbox of several (mbox)."""

from __future__ import annotations

import email
import email.policy
import re
from collections.abc import Iterator
from typing import Any, cast

from ragkv.ingest.charset import clean, decode
from ragkv.ingest.html import read_html
from ragkv.ingest.parser import Parsed, Unreadable, join_sections

_MESSAGES = 100_000  # of a mailbox


def read_eml(data: bytes) -> Parsed:
    """A message: its sender, recipients, date and subject, then its text; attachments are named in `left_out`."""
    left_out: list[str] = []
    subject, text = _message(data, left_out)
    return Parsed(text=text, title=subject or None, left_out=left_out)


def read_mbox(data: bytes) -> Parsed:
    """Each message of a mailbox, cited by its number and subject; messages never share a chunk."""
    parts = re.split(rb"(?m)^From [^\n]*\n", data, maxsplit=_MESSAGES + 1)
    if len(parts) > _MESSAGES + 1:
        raise Unreadable(f"mailbox cannot be read: it has more than {_MESSAGES:,} messages")
    left_out: list[str] = []

    def messages() -> Iterator[tuple[str, dict[str, Any]]]:
        for number, raw in enumerate(parts[1:], start=1):
            named: list[str] = []
            subject, text = _message(raw, named)
            left_out.extend(f"message {number}: {each}" for each in named)
            yield (
                text.replace("\n>From ", "\nFrom "),
                {"heading": f"message {number}" + (f" ({subject[:80]})" if subject else ""), "alone": True},
            )

    text, sections = join_sections(messages())
    return Parsed(text=text, sections=sections, left_out=left_out)


def _message(data: bytes, left_out: list[str]) -> tuple[str, str]:
    """(subject, text) of one message."""
    message = email.message_from_bytes(data, policy=email.policy.default)
    heads = [(name, " ".join(str(message[name] or "").split())) for name in ("From", "To", "Cc", "Date", "Subject")]
    left_out += [f"attachment {part.get_filename() or part.get_content_type()}" for part in message.iter_attachments()]
    body = message.get_body(("plain", "html"))
    text = ""
    if body is not None:
        payload = cast("bytes | None", body.get_payload(decode=True)) or b""
        charset = body.get_content_charset()
        if body.get_content_subtype() == "html":
            page = read_html(payload, whole=True)
            text = page.text
            left_out += page.left_out
        else:
            try:
                text = payload.decode(charset or "utf-8")
            except (LookupError, ValueError):
                text = decode(payload)
    return heads[-1][1], clean("\n".join(f"{name}: {value}" for name, value in heads if value) + f"\n\n{text.strip()}")
