"""What every request passes first: its host, its key, its size and its patience; and the line that the log keeps of it.

The log never holds a question, an answer or a document.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
import uuid
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.server.failure import Refusal, refusal_of
from ragkv.server.key import Keys
from ragkv.server.setting import Limits
from ragkv.server.webpage import page_paths
from ragkv.server.wire import Json

__all__ = ["Guard"]

OPEN = frozenset({"/healthz", "/readyz"}) | page_paths()
"""Paths that need no key: they say whether the server lives, or are the page, which asks for one itself."""
UPLOAD = re.compile(r"/api/indexes/[^/]+/documents/?")
"""Where files are sent to; no other path takes a form."""
_DOCUMENT = re.compile(r"(/documents/).*", re.DOTALL)
"""In a path, what names a document: the log does not need it."""
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)

logger = logging.getLogger(__name__)


class Guard:
    """ASGI middleware around the whole server. `hosts` None: any `Host` does, because a key is asked for. `origins` are
    those of web pages of others that may send files."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys | None,
        hosts: Collection[str] | None,
        limits: Limits,
        origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts
        self._limits = limits
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = _Visit(scope)
        try:
            headers = Headers(scope=scope)
            self._refuse(scope, headers, visit)
            if scope["method"] == "HEAD":  # as GET; the connection itself leaves the body out
                scope = {**scope, "method": "GET"}
            await self._app(scope, self._body(scope, headers, receive), visit.telling(send))
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.status >= 500 and not isinstance(error, Refusal):
                logger.exception("request %s failed", visit.identifier)
            if not visit.status:
                answer = Json(refusal.body, refusal.status, headers={**refusal.headers, "connection": "close"})
                await answer(scope, receive, visit.telling(send))
        finally:
            visit.log()

    def _refuse(self, scope: Scope, headers: Headers, visit: _Visit) -> None:
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            # a web page whose own name leads to this machine would else read the answers
            raise Refusal(403, "This server answers under its own address only.", code="wrong_host")
        if scope["method"] == "OPTIONS" or scope["path"] in OPEN:
            return
        if self._keys is not None:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            visit.owner = self._keys.owner(key.strip()) if scheme.lower() == "bearer" else None
            if visit.owner is None:
                raise Refusal(
                    401,
                    "The key is missing or wrong: send `Authorization: Bearer KEY`.",
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )

    def _body(self, scope: Scope, headers: Headers, receive: Receive) -> _Body:
        """The request's body, with the limits that are its own; Refusal for one of another type, or too large."""
        limits = self._limits
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return _Body(receive, limits.body_bytes, limits.body_seconds)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        upload = kind == "multipart/form-data" and UPLOAD.fullmatch(scope["path"]) is not None
        if upload:
            self._refuse_page(headers)
        elif kind != "application/json":  # a form or plain text may be sent by any web page without being asked
            raise Refusal(415, "Send the body as application/json.", code="unsupported_media_type")
        body = _Body(receive, limits.body_bytes, limits.body_seconds)
        if upload:  # a slow line is given its time, but not one on which nothing comes
            body = _Body(receive, limits.upload_bytes, limits.upload_seconds, idle=limits.body_seconds)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > body.most:
            raise body.too_large()
        return body

    def _refuse_page(self, headers: Headers) -> None:
        """Refusal for a form that a web page of others sends: a browser says whose page it is."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        if origin in self._origins:
            return
        own = origin is None or urlsplit(origin).netloc == headers.get("host")
        if not own or site not in ("none", "same-origin"):
            raise Refusal(403, "A page of another origin may not send files here.", code="wrong_origin")


class _Body:
    """`receive`, which refuses a body of more than `most` bytes, or one that takes longer than `seconds`, or of which
    nothing comes for `idle` seconds."""

    def __init__(self, receive: Receive, most: int, seconds: float, *, idle: float = math.inf) -> None:
        self.most = most
        self._receive = receive
        self._left = most
        self._seconds = seconds
        self._idle = idle
        self._until = time.monotonic() + seconds
        self._whole = False

    def too_large(self) -> Refusal:
        return Refusal(413, f"The body has more than {self.most} bytes.", code="too_large")

    async def __call__(self) -> Message:
        if self._whole:  # from here on it tells when the client goes away
            return await self._receive()
        try:
            async with asyncio.timeout(min(max(self._until - time.monotonic(), 0.0), self._idle)):
                message = await self._receive()
        except TimeoutError:
            said = f"The request did not come within {min(self._seconds, self._idle):.0f} seconds."
            raise Refusal(408, said, code="timeout") from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise self.too_large()
        self._whole = not message.get("more_body", False)
        return message


class _Visit:
    """What is known of one request, for the log."""

    def __init__(self, scope: Scope) -> None:
        self.identifier = uuid.uuid4().hex
        self.owner: str | None = None
        self.status = 0
        self._scope = scope
        self._start = time.monotonic()

    def telling(self, send: Send) -> Send:
        """`send`, with the headers that all answers have."""

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                named = {name.lower() for name, _ in message["headers"]}
                more = [(name, value) for name, value in _HEADERS if name not in named]
                own = [*message["headers"], *more, (b"x-request-id", self.identifier.encode())]
                message = {**message, "headers": own}
            await send(message)

        return tell

    def log(self) -> None:
        """One line of JSON."""
        told = {
            "request": self.identifier,
            "method": self._scope["method"],
            "path": _DOCUMENT.sub(r"\1…", self._scope["path"])[:200],
            "status": self.status,
            "ms": round((time.monotonic() - self._start) * 1000, 1),
            "key": self.owner,
        }
        logger.info("%s", json.dumps(told))


def _host(header: str) -> str:
    """The `Host` header without its port, in small letters (RFC 9110, 4.2.3)."""
    header = header.lower()
    return header.partition("]")[0] + "]" if header.startswith("[") else header.partition(":")[0]
