"""The server as a process: its socket, when it is ready, and how it stops."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ragkv.boundary.doorway import Doorway, peer
from ragkv.errors import UsageError
from ragkv.server.app import make_app
from ragkv.server.crowd import Crowd
from ragkv.server.guard import Guard, Limits
from ragkv.server.heap import trim_memory
from ragkv.server.jobdesk import JobDesk
from ragkv.server.key import Keys
from ragkv.server.resident import House, resident_app
from ragkv.server.served import Served

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

__all__ = ["ServerSettings", "run_server", "run_tools"]

TRIM_TICKS = 300
"""Tenths of a second between two times that freed memory is given back."""
GRACE = 5
"""Seconds that an answer has to tell its client that the server stops."""
Beside: TypeAlias = Callable[[Callable[[], None]], list[tuple[ASGIApp, socket.socket]]]
"""Given what stops the server: apps, and the sockets at which they are served."""
logger = logging.getLogger(__name__)
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server listens. `requests` are answered at a time; a stop waits for them at most `stop_seconds`."""

    host: str = "127.0.0.1"
    port: int = 8080
    keys: Keys | None = None
    origins: tuple[str, ...] = ()
    requests: int = 64
    limits: Limits = field(default_factory=Limits)
    stop_seconds: int = 20
    footer: bool = False
    resident: bool = False
    """Answer the commands of the user who runs it, too, through a socket in each index's folder."""

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and self.keys is None:
            raise UsageError(
                f"Listening on {self.host} lets others ask and read your documents: give --keys FILE, or leave --host "
                "out to serve this machine alone."
            )


def run_server(served: Served, settings: ServerSettings, on_ready: Callable[[str], None]) -> None:
    """Answer until SIGINT or SIGTERM; `on_ready` is told the address once questions are answered.

    Answers that are not finished `stop_seconds` later end at their next token and tell their clients why; whoever does
    not read that is hung up on. The indexes are closed in any case. UsageError when the address cannot be had.
    """
    crowd = Crowd(settings.requests)
    desk = JobDesk(served, crowd)
    app = make_app(served, crowd, desk, footer=settings.footer)
    doorways = _doorways(served) if settings.resident else {}

    def ready(url: str) -> None:
        app.state.ready = True
        on_ready(url)

    def stopping() -> None:
        app.state.ready = False
        desk.stop()

    def beside(stop: Callable[[], None]) -> list[tuple[ASGIApp, socket.socket]]:
        about = {"indexes": [str(rag.folder) for _, rag in served], "stop_seconds": settings.stop_seconds + 2 * GRACE}
        house = House(crowd, about, stop)
        return [(resident_app(name, served.index(name), house), door.listening) for name, door in doorways.items()]

    try:
        desk.recover()
        _run(app, settings, ready, stopping, crowd.stop, beside=beside)
    finally:
        desk.close()
        served.close()
        for doorway in doorways.values():
            doorway.close()


def run_tools(tools: MCPServer, settings: ServerSettings, on_ready: Callable[[str], None]) -> None:
    """Serve tools over HTTP, at `/mcp`, as `run_server` serves questions."""
    from mcp.server.transport_security import TransportSecuritySettings

    # no sessions: a tool's answer depends on its arguments alone; hosts and keys are the guard's concern
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = tools.streamable_http_app(stateless_http=True, json_response=True, transport_security=security)
    _run(app, settings, on_ready, lambda: None, lambda: None, lifespan=True)


def _run(
    app: ASGIApp,
    settings: ServerSettings,
    on_ready: Callable[[str], None],
    on_stopping: Callable[[], None],
    on_stop: Callable[[], None],
    *,
    lifespan: bool = False,
    beside: Beside = lambda stop: [],
) -> None:
    """Serve `app` at its address, and beside it what `beside` names at their sockets, until a signal comes."""
    hosts = None if settings.keys is not None else {"127.0.0.1", "[::1]", "localhost"}
    outer: ASGIApp = Guard(app, keys=settings.keys, hosts=hosts, limits=settings.limits, origins=settings.origins)
    if settings.origins:
        # outermost, so that a page can read why it was refused; any header, as OpenAI's clients send their own
        outer = CORSMiddleware(
            outer,
            allow_origins=settings.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["retry-after", "x-request-id"],
        )
    listening = _listening(settings)

    def ready() -> None:
        host, port = listening.getsockname()[:2]
        on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    config = _config(outer, _Patient, settings, lifespan=lifespan)
    server = _Server(config, ready, on_stopping, on_stop, settings.stop_seconds)
    for inner, sock in beside(server.end):
        guarded = Guard(inner, keys=None, hosts=None, limits=settings.limits)
        server.beside.append((_Beside(_config(guarded, _Private, settings), settings.stop_seconds), sock))
    try:
        asyncio.run(server.serve_all(listening))
    finally:
        listening.close()


def _config(
    app: ASGIApp, protocol: type[_Patient], settings: ServerSettings, *, lifespan: bool = False
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast("Any", partial(protocol, settings.limits)),  # called as a class would be
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on" if lifespan else "off",
        server_header=False,
        proxy_headers=False,
        limit_concurrency=4 * settings.requests + 64,  # connections: beyond it, uvicorn answers 503 itself
        timeout_graceful_shutdown=settings.stop_seconds + 2 * GRACE,
    )


def _doorways(served: Served) -> dict[str, Doorway]:
    """A doorway for each index that can have one; an index that is served under two names needs one."""
    found: dict[str, Doorway] = {}
    folders: set[Path] = set()
    for name, rag in served:
        if (folder := rag.folder.resolve()) in folders:
            continue
        folders.add(folder)
        try:
            found[name] = Doorway.make(rag.folder)
        except BlockingIOError:
            logger.warning("another server answers ragkv query, chat and ls for %s; this one answers HTTP", rag.folder)
        except OSError as error:
            logger.info("%s gets no socket, so ragkv query, chat and ls do their own work: %s", rag.folder, error)
    return found


def _listening(settings: ServerSettings) -> socket.socket:
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((settings.host, settings.port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{settings.host} port {settings.port} cannot be listened on: {reason}.") from error


class _Server(uvicorn.Server):
    """uvicorn's, which says when it is ready, ends without raising the signal that ended it, and within bounds: at once
    `stopping` is called, after `seconds` `stop`, a little later the connections that are left are cut.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        ready: Callable[[], None],
        stopping: Callable[[], None],
        stop: Callable[[], None],
        seconds: float,
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._stopping = stopping
        self._stop = stop
        self._seconds = seconds
        self.beside: list[tuple[_Beside, socket.socket]] = []
        """Servers that begin before this one and end with it, and where they listen."""

    def end(self) -> None:
        """Do what a signal does."""
        self.should_exit = True

    async def serve_all(self, listening: socket.socket) -> None:
        """Serve, with those beside, until one of them is told to end."""
        others = [asyncio.ensure_future(each.serve(sockets=[sock])) for each, sock in self.beside]
        try:
            for each, _ in self.beside:
                await each.begun.wait()
            await self.serve(sockets=[listening])
        finally:
            for each, _ in self.beside:
                each.end()
            await asyncio.gather(*others)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % TRIM_TICKS == 0:
            await asyncio.to_thread(trim_memory)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        for each, _ in self.beside:
            each.end()
        loop = asyncio.get_running_loop()
        timers = (loop.call_later(self._seconds, self._stop), loop.call_later(self._seconds + GRACE, self._cut))
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
        if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Beside(_Server):
    """A server beside another one, which hears the signals for both."""

    def __init__(self, config: uvicorn.Config, seconds: float) -> None:
        self.begun = asyncio.Event()
        super().__init__(config, self.begun.set, lambda: None, lambda: None, seconds)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Patient(H11Protocol):
    """HTTP with an end to patience: whoever does not finish its headers, or does not read its answer, is hung up on."""

    def __init__(self, limits: Limits, **given: Any) -> None:
        super().__init__(**given)
        self.access_log = False  # uvicorn's lines have the query string
        self._sending = _Deadline(self.loop, limits.head_seconds)
        self._reading = _Deadline(self.loop, limits.unread_seconds)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._sending.begin(transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._sending.end()
        self._reading.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._sending.end()
        else:  # the next request of the connection has begun
            self._sending.begin(self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading.begin(self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reading.end()


class _Private(_Patient):
    """HTTP for processes of the user who runs the server, and nobody else."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if peer(transport.get_extra_info("socket"))[1] != os.geteuid():
            transport.abort()


class _Deadline:
    """Something happens after so many seconds, unless it is ended before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, then: Callable[[], None]) -> None:
        """Begin to wait; while it waits, it does not begin anew."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, then)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
