"""When a server is ready, and how it ends: in bounded time, whatever its clients do."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from ragkv.server.heap import trim_memory

__all__ = ["GRACE", "CompanionServer", "EndingServer"]

GRACE = 5
"""Seconds that an answer has to tell its client that the server stops."""
_TRIM_TICKS = 300
"""Tenths of a second between two times that freed memory is given back."""


class EndingServer(uvicorn.Server):
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
        self.beside: list[tuple[CompanionServer, socket.socket]] = []
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
        if counter % _TRIM_TICKS == 0:
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
        # a terminal that is closed ends it like SIGTERM, unless it was started to outlive that (nohup)
        ending = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            ending.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.handle_exit) for number in ending}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class CompanionServer(EndingServer):
    """A server beside another one, which hears the signals for both."""

    def __init__(self, config: uvicorn.Config, seconds: float) -> None:
        self.begun = asyncio.Event()
        super().__init__(config, self.begun.set, lambda: None, lambda: None, seconds)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
