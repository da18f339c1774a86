"""A client of `ragkv serve` for load: HTTP/1.1 over a connection per request, with nothing but the standard library.

It is no example of how to ask: it decodes what a server of ours sends, and no more.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

__all__ = ["LoadClient", "Told"]

_JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What came of a streamed question. `first` and `whole`: seconds until the first piece of text, and until the end.

    `error` is the server's own, told instead of the answer or in it.
    """

    status: int
    text: str
    first: float
    whole: float
    tokens: int
    error: str | None


class LoadClient:
    """Asks the server at `url`, such as http://127.0.0.1:8080."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80

    async def call(self, method: str, path: str, body: bytes = b"", kind: str = _JSON) -> tuple[int, Any]:
        """The status and the JSON of the answer."""
        async with self._asked(method, path, body, kind) as (status, pieces):
            return status, json.loads(b"".join([piece async for piece in pieces]))

    async def query(self, index: str, asked: dict[str, Any]) -> tuple[int, Any]:
        """A question that is answered as a whole."""
        return await self.call("POST", f"/api/indexes/{index}/query", json.dumps(asked).encode())

    async def upload(self, index: str, name: str, text: str) -> tuple[int, Any]:
        """A text file as a form."""
        edge = uuid.uuid4().hex
        head = f'--{edge}\r\ncontent-disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
        body = f"{head}{text}\r\n--{edge}--\r\n".encode()
        return await self.call("POST", f"/api/indexes/{index}/documents", body, f"multipart/form-data; boundary={edge}")

    async def stream(self, index: str, asked: dict[str, Any], *, leave: int | None = None) -> Told:
        """A question that is answered piece by piece; the client goes away after `leave` pieces."""
        body = {
            "model": index,
            "messages": [{"role": "user", "content": asked["question"]}],
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in asked.items() if name not in ("question", "max_new_tokens")},
            "max_tokens": asked["max_new_tokens"],
        }
        start = time.perf_counter()
        first, said, tokens, error = 0.0, [], 0, None
        async with self._asked("POST", "/v1/chat/completions", json.dumps(body).encode()) as (status, pieces):
            if status != 200:
                found = json.loads(b"".join([piece async for piece in pieces]))
                error = found["error"]["message"]
            else:
                async for event in _events(pieces):
                    error = event.get("error", {}).get("message", error)
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    for choice in event.get("choices", ()):
                        if text := choice["delta"].get("content"):
                            first = first or time.perf_counter() - start
                            said.append(text)
                    if leave is not None and len(said) >= leave:
                        break
        whole = time.perf_counter() - start
        return Told(status=status, text="".join(said), first=first, whole=whole, tokens=tokens, error=error)

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: bytes, kind: str = _JSON
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            head = f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\nconnection: close\r\ncontent-type: {kind}\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            headers = (await reader.readuntil(b"\r\n\r\n")).lower()
            status = int(headers.split(b" ", 2)[1])
            yield status, _pieces(reader, chunked=b"transfer-encoding: chunked" in headers)
        finally:
            writer.close()


async def _pieces(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    """The body as it comes. A body that ends early is an error."""
    if not chunked:
        yield await reader.read()
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream, until [DONE]."""
    left = b""
    async for piece in pieces:
        *whole, left = (left + piece).split(b"\n\n")
        for event in whole:
            if event != b"data: [DONE]":
                yield json.loads(event.removeprefix(b"data: "))
