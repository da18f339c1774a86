"""The ingest jobs of all indexes that a server has, for its routes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.server.crowd import Crowd
from ragkv.server.failure import Refusal
from ragkv.server.ingestjob import IngestJob
from ragkv.server.jobqueue import JobQueue
from ragkv.server.served import Served

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

__all__ = ["JobDesk", "watch"]

_QUIET_SECONDS = 15.0


class JobDesk:
    """A queue for each index that documents are added to, made when it is first asked for."""

    def __init__(self, served: Served, crowd: Crowd) -> None:
        self._served = served
        self._crowd = crowd
        self._lock = threading.Lock()
        self._queues: dict[Path, JobQueue] = {}
        self._closed = False

    def writable(self, name: str) -> RagKV:
        """The index; Refusal 403 when it is read-only."""
        rag = self._served.index(name)
        if rag.store.readonly:
            raise Refusal(403, f"Index {name!r} is read-only here.", kind="permission_error", code="read_only")
        return rag

    def queue(self, name: str) -> JobQueue:
        """The index's queue; Refusal 403 when the index is read-only, 409 when another server has its jobs."""
        rag = self.writable(name)
        folder = rag.folder.resolve()  # two names may be one index
        with self._lock:
            if self._closed:
                raise Refusal(503, "The server is stopping.", kind="server_error", code="unavailable")
            if folder not in self._queues:
                self._queues[folder] = JobQueue(rag, lambda state: self._crowd.job_ended(name, state))
            return self._queues[folder]

    def jobs(self, name: str) -> list[IngestJob]:
        """The index's jobs, the latest first; none of an index that is read-only."""
        return [] if self._served.index(name).store.readonly else self.queue(name).jobs()

    def recover(self) -> None:
        """Look after what a killed server has left in the indexes."""
        for name, rag in self._served:
            if (rag.folder / "jobs").exists():
                with suppress(Refusal):  # another server's, or read-only
                    self.queue(name)

    def stop(self) -> None:
        """Have all jobs end, without waiting; what they have committed stays."""
        with self._lock:
            self._closed = True
        for queue in self._queues.values():
            queue.stop()

    def close(self) -> None:
        """`stop`, and wait for those that run."""
        self.stop()
        while self._queues:
            self._queues.popitem()[1].close()


async def watch(job: IngestJob) -> AsyncIterator[dict[str, Any] | None]:
    """What a job comes to, each time that it changes, until it is over; None when nothing was said for long."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(changed.set)

    job.watchers.add(tell)
    last: dict[str, Any] | None = None
    try:
        while True:
            changed.clear()
            over, told = job.over, job.to_json()
            if told != last:
                yield (last := told)
            if over:
                return
            while not changed.is_set():
                try:
                    async with asyncio.timeout(_QUIET_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    yield None
    finally:
        job.watchers.discard(tell)
