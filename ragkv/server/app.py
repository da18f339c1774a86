"""The server process: the app with its routes, the connections, and how it starts and stops.

Connections have deadlines for sending a request and for reading the answer. On a stop signal, running answers get a
limited time; then the process ends.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Self, cast

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

import ragkv
from ragkv.errors import RagkvError
from ragkv.server.api import document_routes, query_routes
from ragkv.server.errors import ApiError, Json, to_api_error
from ragkv.server.jobs import JobManager
from ragkv.server.local import LocalSocket
from ragkv.server.metrics import ConcurrencyLimiter, IndexMetrics
from ragkv.server.middleware import (
    MCP_PATH,
    Guard,
    LocalApp,
    LocalRequest,
    Responded,
    error_body,
    guard_app,
    page_routes,
)
from ragkv.server.openai import protocol_routes
from ragkv.server.schemas import FAILURES, HealthReply, ServedIndexes
from ragkv.server.settings import ServerLimits, ServerSettings, reserve, trim_memory

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

logger = logging.getLogger(__name__)


def make_app(
    served: ServedIndexes, limiter: ConcurrencyLimiter, manager: JobManager, *, footer: bool = False
) -> FastAPI:
    """The app with all routes over these indexes. `footer`: every answer ends with its sources.

    Close `manager` before the indexes.
    """
    # FastAPI's own spans would have whole paths and queries, which name documents; `Guard` makes the requests' spans
    settings: dict[str, Any] = {"docs_url": None, "redoc_url": None, "telemetry": {"tracing": False, "logs": False}}
    app = FastAPI(title="ragkv", version=ragkv.__version__, responses=FAILURES, **settings)
    app.openapi = partial(_described, app.openapi)  # type: ignore[method-assign]
    app.add_exception_handler(ApiError, _failed)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RagkvError, _failed)
    app.add_exception_handler(Exception, _failed)  # else a fault of ours is answered in plain text
    app.state.ready = False
    limiter.registry.register(IndexMetrics(served))

    @app.get("/healthz", response_model=HealthReply)
    async def healthz() -> Json:
        """Whether the process lives."""
        return Json({"status": "ok"})

    @app.get("/readyz", response_model=HealthReply, responses={503: {"model": HealthReply}})
    async def readyz() -> Json:
        """Whether the server answers questions: models are loaded, it is not stopping, and an index is available."""
        lost = sum(1 for _ in served) - len(served.available())
        ready = app.state.ready and bool(served.available())
        status = "ready" if ready else "unavailable" if app.state.ready else "starting"
        return Json({"status": status, "unavailable": lost}, 200 if ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        """Prometheus' text format."""
        return PlainTextResponse(limiter.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    app.include_router(protocol_routes(served, limiter, footer=footer))
    app.include_router(query_routes(served, limiter))
    app.include_router(document_routes(served, manager))
    app.include_router(page_routes())
    return app


def _described(describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The OpenAPI description, with the API key that the server may require."""
    description = describe()
    description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    description["security"] = [{}, {"key": []}]
    return description


async def _failed(request: Request, error: Exception) -> Json:
    failure = to_api_error(error)
    return Json(error_body(error, LocalRequest.of(request)), failure.status, headers=failure.headers)


async def _malformed(_: Request, error: Exception) -> Json:
    """The response to an invalid body: the first error that validation found."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = _place(first, error.body) or None
    message = _about_body(first) if param is None else f"{param}: {first['msg']}"
    return Json(ApiError(400, message, param=param).body, 400)


def _about_body(wrong: dict[str, Any]) -> str:
    """What is wrong with the body as a whole."""
    if wrong["type"] == "json_invalid":
        return f"The body is not valid JSON: {wrong['ctx']['error']}, at character {wrong['loc'][-1]}."
    return f"The body {'is empty' if wrong['type'] == 'missing' else 'is no JSON object'}; send a JSON object."


def _place(wrong: dict[str, Any], body: Any) -> str:
    """The path of the invalid field in the body or the query. Parts that the body lacks (the types of a union) are left
    out.
    """
    kind, *parts = wrong["loc"]
    names = []
    for number, part in enumerate(parts, start=1):
        there = part in body if isinstance(body, dict) else isinstance(body, list) and part in range(len(body))
        if kind == "body" and not there and not (wrong["type"] == "missing" and number == len(parts)):
            break
        names.append(str(part))
        body = body[part] if there else None
    return ".".join(names)


async def _http(request: Request, error: Exception) -> Json:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ApiError):  # the body was too slow or too large
        return await _failed(request, error.__cause__)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    detail = str(error.detail)
    if isinstance(error.__cause__, (ValueError, RecursionError)):
        detail = "The body cannot be read as JSON: it is not UTF-8, is nested too deeply, or has too long a number."
    if error.status_code in (404, 405):  # ragkv's own routes have their own messages
        detail = f"There is no {request.method} {request.url.path[:100]}; GET /openapi.json lists all routes."
    failure = ApiError(error.status_code, detail, kind=kind)
    return Json(failure.body, error.status_code, headers=error.headers)


_BACKLOG = 128
GRACE = 5
"""Seconds in which an interrupted answer can still send its last event."""
_TRIM_TICKS, _IDLE_TICKS = 300, 10
"""After so many ticks of 0.1 seconds freed memory is returned to the system, and a server may end that is idle."""


class LastSecond:
    """Ends the process `seconds` after `begin`, whatever is still running, if the server owns the main thread.

    As after a kill, acknowledged work is committed, and unfinished work is reported when the index is opened again.
    """

    def __init__(self, seconds: float) -> None:
        self._mine = threading.current_thread() is threading.main_thread()
        self._timer = threading.Timer(seconds, _end_process)
        self._timer.daemon = True
        self._alarm = seconds + 1

    def begin(self) -> None:
        """Start the countdown."""
        if self._mine:
            self._timer.start()
            self.arm()

    def arm(self) -> None:
        """Set an alarm, whose default action ends the process even if a thread holds the GIL or the event loop.

        A signal handler may call this, unlike `begin`, which starts a thread.
        """
        if not signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, self._alarm)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the countdown: the server has ended in time."""
        self._timer.cancel()
        if self._mine:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _end_process() -> None:
    logger.warning("the server ends before its work is done, because the time for stopping is over")
    logging.shutdown()
    os._exit(0)


@dataclass(frozen=True, slots=True)
class ServerHooks:
    """What a server calls: `ready` with its address, `stopping` at once on a signal, `stop` when the time for running
    answers is over, and `responded` for each response. It ends when `ending` is set, or `idle` is true.
    """

    ready: Callable[[str], None]
    stopping: Callable[[], None] = lambda: None
    stop: Callable[[], None] = lambda: None
    ending: threading.Event = field(default_factory=threading.Event)
    idle: Callable[[], bool] = lambda: False
    responded: Responded = lambda method, handler, status: None


class GracefulServer(uvicorn.Server):
    """uvicorn's server with a bounded shutdown, which does not raise the signal again.

    Running answers have `seconds`; a little later it cuts the remaining connections.
    """

    def __init__(self, config: uvicorn.Config, url: str, hooks: ServerHooks, seconds: float, last: LastSecond) -> None:
        super().__init__(config)
        self._url = url
        self._hooks = hooks
        self._seconds = seconds
        self._last = last

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._last.arm()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(AcceptErrors())
        await super().startup(sockets)
        self._hooks.ready(self._url)

    async def on_tick(self, counter: int) -> bool:
        if counter % _TRIM_TICKS == 0:
            await asyncio.to_thread(trim_memory)
        ended = counter % _IDLE_TICKS == 0 and self._hooks.idle()
        return await super().on_tick(counter) or ended or self._hooks.ending.is_set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._last.begin()
        self._hooks.stopping()
        loop = asyncio.get_running_loop()
        timers = (loop.call_later(self._seconds, self._hooks.stop), loop.call_later(self._seconds + GRACE, self._cut))
        try:
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
            yield
            return
        # closing the terminal (SIGHUP) stops the server like SIGTERM, unless it runs under nohup
        ending = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            ending.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.handle_exit) for number in ending}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class AcceptErrors:
    """An event loop's exception handler that logs one line a minute when there are no descriptors for connections.
    asyncio would log a traceback for each of `backlog` attempts, every second. It tries again a second later, and fails
    if the server has ended meanwhile.
    """

    def __init__(self) -> None:
        self._quiet_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "_start_serving" in context.get("message", ""):
            return
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + 60
            logger.warning("connections wait: the process has no free file descriptors; raise `ulimit -n`")


class TimeoutProtocol(H11Protocol):
    """An HTTP connection that is closed when the client takes too long to send its headers or to read the answer.

    `local_apps` are the apps of Unix sockets by address.
    """

    def __init__(self, limits: ServerLimits, local_apps: Mapping[str, ASGIApp], **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._local_apps = local_apps
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.access_log = False  # uvicorn's log lines contain the query string

    def _expect(self, event: str, seconds: float) -> None:
        """Close the connection unless `_came` is called in time."""
        if event not in self._timers:
            self._timers[event] = self.loop.call_later(seconds, self.transport.abort)

    def _came(self, event: str) -> None:
        if (timer := self._timers.pop(event, None)) is not None:
            timer.cancel()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app = self._local_apps.get(transport.get_extra_info("sockname"), self.app)
        self._expect("headers", self._limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._came("headers")
        self._came("reader")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._came("headers")
        elif not self.transport.is_closing():  # the next request of the connection has begun
            self._expect("headers", self._limits.head_seconds)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # the body of a request became invalid after its response had begun
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect("reader", self._limits.unread_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._came("reader")


def run_server(
    served: ServedIndexes,
    settings: ServerSettings,
    on_ready: Callable[[str], None],
    port: socket.socket | None = None,
    watched: Sequence[tuple[str, Path, bool]] = (),
    sockets: Mapping[str, LocalSocket] | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. `on_ready` receives the address once questions are answered.

    Answers that are unfinished `stop_seconds` later end at their next token with an error event; connections of clients
    that do not read it are cut. Then the indexes are closed. In the main thread, the process ends `2 * GRACE` seconds
    after `stop_seconds`, whatever is still running. `port` is the socket if the address was reserved before; else
    UsageError if the address is not available. `watched` are folders that jobs mirror into indexes: the name of an
    index, a folder, and whether documents whose files are gone are deleted. `sockets` are those of the indexes if they
    were made before; with `settings.idle_seconds`, there is no other address.
    """
    limiter = ConcurrencyLimiter(settings.requests)
    manager = JobManager(served, limiter)
    app = make_app(served, limiter, manager, footer=settings.footer)
    if sockets is None:
        sockets = _local_sockets(served) if settings.resident else {}
    about = {
        "pid": os.getpid(),
        "indexes": [str(rag.folder) for _, rag in served],
        "stop_seconds": settings.stop_seconds + 2 * GRACE,
    }
    stop = threading.Event()
    local = {
        local_socket.listening: LocalApp(
            app, name, local_socket, served, limiter, about, stop.set, settings.idle_seconds
        )
        for name, local_socket in sockets.items()
    }

    def ready(url: str) -> None:
        app.state.ready = True
        on_ready(url)

    def stopping() -> None:
        app.state.ready = False
        manager.stop()

    with LastSecond(settings.stop_seconds + 2 * GRACE) as last, ExitStack() as held:
        for close in (*(local_socket.close for local_socket in sockets.values()), served.close, manager.close):
            held.callback(close)
        held.callback(limiter.close)
        for name, folder, prune in watched:
            manager.follow(name, folder, prune=prune)
        hooks = ServerHooks(
            ready, stopping, limiter.stop, stop, lambda: any(each.idle() for each in local.values()), limiter.responded
        )
        _run(app, settings, port, hooks, last, local=local)


def run_tools(
    tools: MCPServer, settings: ServerSettings, on_ready: Callable[[str], None], port: socket.socket | None = None
) -> None:
    """Serve tools over HTTP, at `/mcp`, as `run_server` serves questions."""
    from mcp.server.transport_security import TransportSecuritySettings

    # no sessions: a tool's answer depends only on its arguments; the guard checks hosts and keys
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = _only_posts(tools.streamable_http_app(stateless_http=True, json_response=True, transport_security=security))
    with LastSecond(settings.stop_seconds + 2 * GRACE) as last:
        _run(app, settings, port, ServerHooks(on_ready), last, lifespan=True)


def _only_posts(app: ASGIApp) -> ASGIApp:
    """`app` without the stream of `GET /mcp`: tools without sessions never send anything there."""

    async def posts(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == MCP_PATH and scope["method"] != "POST":
            raise ApiError(405, "The tools are called by POST.", headers={"allow": "POST"})
        await app(scope, receive, send)

    return posts


def _run(
    app: ASGIApp,
    settings: ServerSettings,
    port: socket.socket | None,
    hooks: ServerHooks,
    last: LastSecond,
    *,
    lifespan: bool = False,
    local: Mapping[socket.socket, ASGIApp] = MappingProxyType({}),
) -> None:
    """Serve `app` at its address, and the `local` apps at their sockets, until a signal arrives."""
    listening = None if settings.idle_seconds else port or reserve(settings.host, settings.port)
    limits, most = settings.limits, 4 * settings.requests + 64  # refused requests included
    keys, origins = settings.keys, settings.origins
    outer = guard_app(app, keys=keys, limits=limits, origins=origins, most=most, responded=hooks.responded)
    guards = {
        sock.getsockname(): Guard(inner, keys=None, hosts=None, limits=limits, most=most)
        for sock, inner in local.items()
    }
    config = uvicorn.Config(
        outer,
        http=cast("Any", partial(TimeoutProtocol, limits, guards)),  # uvicorn calls it like a class
        backlog=_BACKLOG,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on" if lifespan else "off",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=settings.stop_seconds + GRACE + 1,  # just after connections are cut
    )
    url = "" if listening is None else _url(*listening.getsockname()[:2])
    server = GracefulServer(config, url, hooks, settings.stop_seconds, last)
    with listening or nullcontext():
        asyncio.run(server.serve(sockets=[*([] if listening is None else [listening]), *local]))


def _url(host: str, number: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{number}"


def _local_sockets(served: ServedIndexes) -> dict[str, LocalSocket]:
    """A socket for each index that can have one. An index with two names gets only one."""
    sockets: dict[str, LocalSocket] = {}
    folders: set[Path] = set()
    for name, rag in served:
        if (folder := rag.folder.resolve()) in folders:
            continue
        folders.add(folder)
        try:
            sockets[name] = LocalSocket.make(rag.folder)
        except BlockingIOError:
            logger.warning("another server answers ragkv query and chat for %s; this one answers HTTP", rag.folder)
        except OSError as error:
            logger.info("%s gets no socket, so ragkv query and chat do their own work: %s", rag.folder, error)
    return sockets
