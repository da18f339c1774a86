"""JSON as it goes over the wire, alone and as server-sent events."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse

__all__ = ["Json", "event", "packed"]


def packed(body: Any) -> bytes:
    """UTF-8; where a text is no Unicode (a file name may hold any bytes), with escapes."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(body, allow_nan=False, separators=(",", ":")).encode()


class Json(JSONResponse):
    """A JSON body that can always be sent."""

    def render(self, content: Any) -> bytes:
        return packed(content)


def event(body: Any, name: str | None = None) -> bytes:
    """A server-sent event; without a name, as OpenAI's protocol has them."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + packed(body) + b"\n\n"
