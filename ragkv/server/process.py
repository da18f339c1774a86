"""The server as a process: where it listens, what it serves there, and what it closes at the end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ragkv.boundary.doorway import Doorway
from ragkv.server.app import make_app
from ragkv.server.connection import PatientConnection, PrivateConnection
from ragkv.server.crowd import Crowd
from ragkv.server.guard import Guard
from ragkv.server.jobdesk import JobDesk
from ragkv.server.lifetime import GRACE, CompanionServer, EndingServer
from ragkv.server.port import reserve
from ragkv.server.resident import House, resident_app
from ragkv.server.served import Served
from ragkv.server.setting import ServerSettings

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

__all__ = ["run_server", "run_tools"]

Beside: TypeAlias = Callable[[Callable[[], None]], list[tuple[ASGIApp, socket.socket]]]
"""Given what stops the server: apps, and the sockets at which they are served."""
logger = logging.getLogger(__name__)


def run_server(
    served: Served, settings: ServerSettings, on_ready: Callable[[str], None], port: socket.socket | None = None
) -> None:
    """Answer until SIGINT, SIGTERM or SIGHUP; `on_ready` is told the address once questions are answered.

    Answers that are not finished `stop_seconds` later end at their next token and tell their clients why; whoever does
    not read that is hung up on. The indexes are closed in any case. `port` has the address if it was reserved before;
    else UsageError when it cannot be had.
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
        _run(app, settings, port, ready, stopping, crowd.stop, beside=beside)
    finally:
        desk.close()
        served.close()
        for doorway in doorways.values():
            doorway.close()


def run_tools(
    tools: MCPServer, settings: ServerSettings, on_ready: Callable[[str], None], port: socket.socket | None = None
) -> None:
    """Serve tools over HTTP, at `/mcp`, as `run_server` serves questions."""
    from mcp.server.transport_security import TransportSecuritySettings

    # no sessions: a tool's answer depends on its arguments alone; hosts and keys are the guard's concern
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = tools.streamable_http_app(stateless_http=True, json_response=True, transport_security=security)
    _run(app, settings, port, on_ready, lambda: None, lambda: None, lifespan=True)


def _run(
    app: ASGIApp,
    settings: ServerSettings,
    port: socket.socket | None,
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
    listening = port or reserve(settings.host, settings.port)

    def ready() -> None:
        host, number = listening.getsockname()[:2]
        on_ready(f"http://{f'[{host}]' if ':' in host else host}:{number}")

    config = _config(outer, PatientConnection, settings, lifespan=lifespan)
    server = EndingServer(config, ready, on_stopping, on_stop, settings.stop_seconds)
    for inner, sock in beside(server.end):
        guarded = Guard(inner, keys=None, hosts=None, limits=settings.limits)
        server.beside.append(
            (CompanionServer(_config(guarded, PrivateConnection, settings), settings.stop_seconds), sock)
        )
    try:
        asyncio.run(server.serve_all(listening))
    finally:
        listening.close()


def _config(
    app: ASGIApp, protocol: type[PatientConnection], settings: ServerSettings, *, lifespan: bool = False
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
