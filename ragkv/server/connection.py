"""A connection of the server, which is hung up on when its client takes too long, or is not who it has to be."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from ragkv.boundary.doorway import peer
from ragkv.server.setting import Limits

__all__ = ["PatientConnection", "PrivateConnection"]


class PatientConnection(H11Protocol):
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


class PrivateConnection(PatientConnection):
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
