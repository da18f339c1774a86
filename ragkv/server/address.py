"""Where a client finds a chunk of an answer."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

from fastapi import Request

from ragkv.types import Source

__all__ = ["chunk_urls"]


def chunk_urls(request: Request, name: str) -> Callable[[Source], str]:
    """The addresses of an index's chunks, as the client reaches this server."""
    base = f"{str(request.base_url).rstrip('/')}/api/indexes/{quote(name)}/chunks"
    return lambda source: f"{base}/{quote(source.chunk_id, safe='')}"
