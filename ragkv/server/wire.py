"""JSON as it goes over the wire."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse

__all__ = ["Json", "packed"]


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
