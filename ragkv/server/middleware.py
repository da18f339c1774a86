"""Checks that come before every route: host, API key, and size and time limits of the body; and the page at `/`.

It also writes the log line of each request, which never contains a question, an answer or a document. `LocalApp` wraps
the app at the socket of an index, which the command line uses. The page needs no key: its files have a
content security policy under which browsers run and load nothing else.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fastapi import APIRouter, Request
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.config import load_config
from ragkv.errors import RagkvError
from ragkv.model.checkpoint import pick_device
from ragkv.server.errors import ApiError, Json, log_failure, to_api_error
from ragkv.server.local import LocalSocket, identity
from ragkv.server.settings import Keys, ServerLimits
from ragkv.util.files import parse_json
from ragkv.util.telemetry import Span, take_request_id

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV
    from ragkv.server.metrics import ConcurrencyLimiter
    from ragkv.server.schemas import ServedIndexes
    from ragkv.server.streaming import AnswerResponse

MCP_PATH = "/mcp"
UPLOAD = re.compile(r"/api/indexes/[^/]+/documents/?")
"""The path for uploads, the only one that accepts a form."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/?#@\s]+)(?::[0-9]*)?")
_DOCUMENT = re.compile(r"(/documents/).*", re.DOTALL)
"""The part of a path that names a document, which is kept out of the log."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_PAGE = Path(__file__).parent / "page"
_DRAIN_SECONDS = 30.0
"""The longest that the body of a refused request is read."""
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)

logger = logging.getLogger(__name__)
requests = logging.getLogger(f"{__name__}.requests")
"""The logger of the request lines."""
Responded: TypeAlias = Callable[[str, str | None, int], None]
"""Called for each response with its method, the path of its route, and its status."""


class Guard:
    """ASGI middleware around the whole server.

    `hosts` None accepts any `Host`, for servers that require a key. `origins` are foreign web pages that may upload
    files. More than `most` requests at a time are refused, except at paths that need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys | None,
        hosts: Collection[str] | None,
        limits: ServerLimits,
        origins: Collection[str] = (),
        most: float = math.inf,
        responded: Responded = lambda method, handler, status: None,
    ) -> None:
        self._app = app
        self._most = most
        self._responded = responded
        self._inside = 0
        self._keys = keys
        self._hosts = hosts
        self._limits = limits
        self._origins = frozenset(origins)
        self._open = open_paths()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        log = _RequestLog(scope, headers)
        send = log.watching(send)
        passed = False
        try:
            self._refuse(scope, headers, log)
            body = self._body(scope, headers, receive)
            if scope["method"] == "HEAD":  # handled as GET; the HTTP connection drops the body
                scope = {**scope, "method": "GET"}
            passed = True
            self._inside += 1
            with log.span.current():
                await self._app(scope, body, send)
        except Exception as error:
            failure = to_api_error(error)
            with log.span.current():
                log_failure(logger, f"request {log.identifier} failed", error, failure)
            if not log.status:
                if not passed and "expect" not in headers:
                    await _drop_body(headers, receive)
                answer = Json(failure.body, failure.status, headers={**failure.headers, "connection": "close"})
                await answer(scope, receive, send)
        finally:
            self._inside -= passed
            route = getattr(scope.get("route"), "path", None)
            self._responded(scope["method"], route, log.status)
            log.end(route)

    def _refuse(self, scope: Scope, headers: Headers, log: _RequestLog) -> None:
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            # otherwise a web page whose host name resolves to this machine could read the answers (DNS rebinding)
            raise ApiError(403, "This server answers under its own address only.", code="wrong_host")
        if "content-length" in headers and "transfer-encoding" in headers:  # two servers may disagree about the end
            raise ApiError(400, "Send Content-Length or Transfer-Encoding, not both.")
        if scope["method"] == "OPTIONS" or scope["path"] in self._open:
            return
        if self._keys is not None:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            log.owner = self._keys.owner(key.strip()) if scheme.lower() == "bearer" else None
            if log.owner is None:
                raise ApiError(
                    401,
                    "The key is missing or wrong: send `Authorization: Bearer KEY`.",
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
        if self._inside >= self._most:
            text = f"{self._most} requests are under way, the most at a time: try again in a second."
            raise ApiError(503, text, kind="server_error", code="unavailable", headers={"retry-after": "1"})

    def _body(self, scope: Scope, headers: Headers, receive: Receive) -> _Body:
        """The request's body under the limits of its path; ApiError for a wrong type or size."""
        limits = self._limits
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return _Body(receive, limits.body_bytes, limits.body_seconds)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        upload = kind == "multipart/form-data" and UPLOAD.fullmatch(scope["path"]) is not None
        if upload or scope["path"] == MCP_PATH:
            self._refuse_page(headers)
        if (
            not upload and kind != "application/json"
        ):  # browsers send a form or plain text from any web page without a CORS check
            raise ApiError(415, "Send the body as application/json.", code="unsupported_media_type")
        if headers.get("content-encoding", "identity") != "identity":
            message = "Content-Encoding is not supported: send the body uncompressed."
            raise ApiError(415, message, code="unsupported_media_type")
        body = _Body(receive, limits.body_bytes, limits.body_seconds)
        if upload:  # a slow upload may take long, but not without sending anything
            body = _Body(receive, limits.upload_bytes, limits.upload_seconds, idle=limits.body_seconds)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > body.most:
            raise body.too_large()
        return body

    def _refuse_page(self, headers: Headers) -> None:
        """ApiError for what a foreign web page sends, as the browser's headers show."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        if "*" in self._origins or origin in self._origins:
            return
        own = origin is None or origin.partition("://")[2] == headers.get("host")
        if not own or site not in ("none", "same-origin"):
            raise ApiError(403, "A page of another origin may not send this here.", code="wrong_origin")


def guard_app(
    app: ASGIApp,
    *,
    keys: Keys | None,
    limits: ServerLimits,
    origins: Sequence[str],
    most: int,
    responded: Responded = lambda method, handler, status: None,
) -> ASGIApp:
    """`app` behind a `Guard`, for the network: without keys, browsers must name this machine as the host."""
    hosts = None if keys is not None else {"127.0.0.1", "[::1]", "localhost"}
    guard = Guard(app, keys=keys, hosts=hosts, limits=limits, origins=origins, most=most, responded=responded)
    if not origins:
        return guard
    # outermost, so that a page can read an error; all headers are allowed, because OpenAI's clients send their own
    exposed = ["retry-after", "x-request-id"]
    return CORSMiddleware(guard, origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)


class _Body:
    """`receive` with limits: at most `most` bytes, within `seconds`, and never `idle` seconds without data."""

    def __init__(self, receive: Receive, most: int, seconds: float, *, idle: float = math.inf) -> None:
        self.most = most
        self._receive = receive
        self._left = most
        self._seconds = seconds
        self._idle = idle
        self._until = time.monotonic() + seconds
        self.whole = False

    def too_large(self) -> ApiError:
        return ApiError(413, f"The body has more than {self.most} bytes.", code="too_large")

    async def __call__(self) -> Message:
        if self.whole:  # the body is complete: the next message is the disconnect of the client
            return await self._receive()
        try:
            async with asyncio.timeout(min(max(self._until - time.monotonic(), 0.0), self._idle)):
                message = await self._receive()
        except TimeoutError:
            text = f"The request did not come within {min(self._seconds, self._idle):.0f} seconds."
            raise ApiError(408, text, code="timeout") from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise self.too_large()
        self.whole = not message.get("more_body", False)
        return message


async def _drop_body(headers: Headers, receive: Receive) -> None:
    """Read the rest of a refused body while it comes: a connection that is closed with unread data is reset, and the
    client loses the response (RFC 9112, 9.6).
    """
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    rest = _Body(receive, sys.maxsize, _DRAIN_SECONDS, idle=1.0)
    with suppress(ApiError):
        while not rest.whole:
            await rest()


class _RequestLog:
    """Collects the facts of one request for its log line and its span. The id may be the client's `X-Request-Id`."""

    def __init__(self, scope: Scope, headers: Headers) -> None:
        self.identifier = take_request_id(headers.get("x-request-id"))
        about = {"http.request.method": scope["method"], "ragkv.request_id": self.identifier}
        asked_all_the_time = scope["path"] == "/metrics" or scope["path"] in open_paths()
        self.span = Span("request", about, headers=headers, off=asked_all_the_time)
        self.owner: str | None = None
        self.status = 0
        self._scope = scope
        self._start = time.monotonic()

    def watching(self, send: Send) -> Send:
        """`send` that records the status and adds the headers of all responses."""

        async def send_logged(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                named = {name.lower() for name, _ in message["headers"]}
                more = [(name, value) for name, value in _HEADERS if name not in named]
                own = [*message["headers"], *more, (b"x-request-id", self.identifier.encode())]
                message = {**message, "headers": own}
            await send(message)

        return send_logged

    def end(self, route: str | None) -> None:
        """Write the line, as JSON, and end the span."""
        found = {"http.response.status_code": self.status} | ({} if route is None else {"http.route": route})
        self.span.note(found, f"{self._scope['method']} {route or ''}".rstrip())
        line = {
            "request": self.identifier,
            "method": self._scope["method"],
            "path": _DOCUMENT.sub(r"\1…", self._scope["path"])[:200],
            "status": self.status,
            "ms": round((time.monotonic() - self._start) * 1000, 1),
            "key": self.owner,
        }
        with self.span.current():
            requests.info("%s", json.dumps(line), extra={"fields": line})
        self.span.end(str(self.status) if self.status >= 500 else None)


def _host(header: str) -> str:
    """The `Host` header in lower case without its port; empty if it is invalid (RFC 9110, 7.2; RFC 3986, 3.2.2)."""
    found = _HOST.fullmatch(header.lower())
    return "" if found is None else found[1]


@dataclass
class LocalRequest:
    """A request of the command line at the socket of the index in `folder`."""

    folder: Path
    answer: AnswerResponse | None = None
    """The response, if it is a question."""

    @staticmethod
    def of(request: HTTPConnection) -> LocalRequest | None:
        """`request` as a local request; None if it is not one."""
        return request.scope.get("ragkv.local")


def error_body(error: Exception, local: LocalRequest | None) -> dict[str, Any]:
    """The body of the response to an error. A local request also gets ragkv's own error, as the command words it."""
    body = to_api_error(error).body
    cause = error.__cause__ if isinstance(error, ApiError) else error
    if local is None or not isinstance(cause, RagkvError):
        return body
    return {**body, "exception": {"kind": type(cause).__name__, "message": str(cause), "folder": str(local.folder)}}


_THIS = "/api/indexes/_/"


class LocalApp:
    """The server's app at the socket of the index `name`, for processes of the server's user.

    There, the index is also called `_`, unless it was moved and the server answers from another one in its place: then
    the response is 409. The header `Ragkv-Expects` has the version and settings with which the command
    itself would answer. If the server's differ, the response is 409 before anything is done. Two routes exist only
    here: `DELETE /local/answers/ID` ends the answer to the request that had this `id` in the header, and
    `DELETE /local/server` stops the server and returns the facts `about` it. So does `DELETE /local/idle`, if the
    server was left behind by a question, to end after `idle_seconds`.
    """

    def __init__(
        self,
        app: ASGIApp,
        name: str,
        local_socket: LocalSocket,
        served: ServedIndexes,
        limiter: ConcurrencyLimiter,
        about: Mapping[str, Any],
        stop: Callable[[], None],
        idle_seconds: int,
    ) -> None:
        self._app = app
        self._name = name
        self._socket = local_socket
        self._served = served
        self._limiter = limiter
        self._about = about
        self._stop = stop
        self._idle_seconds = idle_seconds
        self._used = time.monotonic()
        self._folder = dict(served)[name].folder
        self._running: dict[str, LocalRequest] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        folder, _, last = scope["path"].rpartition("/")
        stops = ("/local/server", "/local/idle") if self._idle_seconds else ("/local/server",)
        if scope["method"] == "DELETE" and scope["path"] in stops:
            await Json(self._about)(scope, receive, send)
            self._stop()
        elif (scope["method"], folder) == ("DELETE", "/local/answers"):
            running = self._running.get(last)
            if running is not None and running.answer is not None:
                running.answer.end_early()
            await Json({"running": running is not None})(scope, receive, send)
        else:
            await self._ask(scope, receive, send)

    async def _ask(self, scope: Scope, receive: Receive, send: Send) -> None:
        expected = Headers(scope=scope).get("ragkv-expects")
        here = scope["path"].startswith(_THIS)
        if expected is not None or here:
            rag = self._served.index(self._name)
            if not self._socket.is_in(rag.folder):
                raise _another_way()
        if here:
            path = f"/api/indexes/{self._name}/{scope['path'].removeprefix(_THIS)}"
            raw = scope["raw_path"].replace(b"/_/", f"/{self._name}/".encode(), 1)
            scope = {**scope, "path": path, "raw_path": raw}
        if expected is None:
            await self._app(scope, receive, send)
            return
        thread = asyncio.get_running_loop().run_in_executor(self._limiter.asks, _require_same, rag, expected)
        identifier = await thread
        local = self._running[identifier] = LocalRequest(rag.folder)
        try:
            await self._app({**scope, "ragkv.local": local}, receive, send)
        finally:
            self._used = time.monotonic()
            self._running.pop(identifier, None)

    def idle(self) -> bool:
        """Whether the server has nothing to do any more: `idle_seconds` have passed, or its index is gone."""
        late = not self._running and time.monotonic() - self._used > self._idle_seconds
        return bool(self._idle_seconds) and (late or not self._socket.is_in(self._folder))


def _another_way() -> ApiError:
    """The command does its own work then."""
    return ApiError(409, "This server would not answer as the command does.", code="another_way")


def _require_same(rag: RagKV, expected: str) -> str:
    """The request's id; ApiError 409 unless the server would answer from the same index in the same way."""
    # of a bad index, the command itself reports what is wrong
    with suppress(RagkvError, ValueError, KeyError, TypeError, RecursionError):
        fields: dict[str, Any] = parse_json(expected)
        if (
            fields["identity"] == identity()
            and (fields["opened"] is None or _opened_with(rag, **fields["opened"]))
            and load_config(rag.folder) == rag.config
            and rag.store.generation >= 0
        ):
            return str(fields["id"])
    raise _another_way()


def _opened_with(rag: RagKV, device: str | None = None, **limits: int) -> bool:
    index = rag.index
    several = any(named is not None and ("," in named or named == "auto") for named in (device, index.device))
    alike = device == index.device or (not several and pick_device(device) == pick_device(index.device))
    return alike and limits == index.limits.given


class _PageFiles(StaticFiles):
    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers["content-security-policy"] = _POLICY
        response.headers["cross-origin-opener-policy"] = "same-origin"
        response.headers["cache-control"] = "no-cache"  # cached, but revalidated: an upgrade shows at once
        return response


def page_routes() -> APIRouter:
    """The page and its files. They contain no document and need no key; the page calls the API, which does."""
    routes, files = APIRouter(include_in_schema=False), _PageFiles(directory=_PAGE)

    @routes.get("/")
    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    @routes.get("/page/{name}")
    async def file(name: str, request: Request) -> Response:
        return await files.get_response(name, request.scope)

    return routes


@functools.cache
def open_paths() -> frozenset[str]:
    """Paths that need no key: the health checks, and the page, which asks the user for a key itself."""
    return frozenset({"/healthz", "/readyz", "/", *(f"/page/{path.name}" for path in _PAGE.iterdir())})
