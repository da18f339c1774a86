"""Ingest jobs for uploaded files and watched folders.

An index runs one job at a time, in a thread; a limited number of jobs waits. Jobs are in memory: after a restart they
are unknown, and what they had committed is in the index. Until its job runs, an uploaded file is in memory or, if it is
large, in an unnamed file of the system's temporary folder, which vanishes with the process.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from starlette.datastructures import UploadFile

from ragkv.errors import IngestError, RagkvError, StoreBusyError
from ragkv.ingest import IngestProgress, IngestReport, Skipped, SourceFile, from_bytes
from ragkv.ingest.watch import FolderChanges
from ragkv.server.errors import ApiError, readable_error, stopping_error, too_many
from ragkv.server.metrics import ConcurrencyLimiter
from ragkv.server.schemas import ServedIndexes
from ragkv.store import Store

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

logger = logging.getLogger(__name__)

MAX_WAITING_JOBS = 16
MAX_ENDED_JOBS = 32
"""How many finished jobs are kept."""
MAX_UPLOAD_FILES = 64
"""Files in one upload."""
_CUT_SHORT = "The server ended before this job did. What the report lists is in the index; send the rest again."
State = Literal["queued", "running", "done", "failed", "cancelled", "interrupted"]


@dataclass(kw_only=True)
class JobStatus:
    """An ingest job. `interrupted`: the server stops; what the report lists is in the index, the rest has to be sent
    again."""

    id: str
    state: State = "queued"
    files: Annotated[list[str], Field(description="The files' names; the first of them for a watched folder.")]
    done: Annotated[int, Field(description="Bytes of the files that are worked off.")] = 0
    total: Annotated[int, Field(description="Bytes of the files.")]
    report: Annotated[IngestReport | None, Field(description="As `ragkv ingest --json` prints it.")] = None
    error: str | None = None
    created: Annotated[float, Field(description="Seconds since 1970.")]
    ended: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The job for clients."""
        return {**vars(self), "report": None if self.report is None else self.report.to_json()}


class Stopped(Exception):  # noqa: N818 - asked for
    """Raised within an ingest that was cancelled, or whose server stops."""


class IngestJob:
    """A job with its work: uploaded files, or the changes of a watched folder."""

    def __init__(self, work: Sequence[UploadFile] | FolderChanges) -> None:
        self.work = work
        if isinstance(work, FolderChanges):
            files = [(source.name, source.size) for source in work.sources]
        else:
            files = [(str(upload.filename), upload.size or 0) for upload in work]
        names, total = [name for name, _ in files[:MAX_UPLOAD_FILES]], sum(size for _, size in files)
        self.facts = JobStatus(id=secrets.token_hex(8), files=names, total=total, created=time.time())
        self.sources: Sequence[SourceFile] = ()
        self.before: dict[str, str] = {}
        """The hashes of those of its documents that the index had when it started."""
        self.stopping = False
        """Whether it was asked to end."""
        self.ended = threading.Event()

    def open(self, store: Store) -> None:
        """Read what is to be ingested."""
        if isinstance(self.work, FolderChanges):
            self.sources = self.work.sources
        else:
            self.sources = [from_bytes(upload.file.read(), name=str(upload.filename)) for upload in self.work]
        stored = [store.document(source.document_id) for source in self.sources]
        self.before = {row.document.document_id: row.document.content_hash for row in stored if row is not None}

    def close(self) -> None:
        """Forget the files."""
        uploads, self.work, self.sources = self.work, (), ()
        if not isinstance(uploads, FolderChanges):
            for upload in uploads:
                upload.file.close()

    def progress(self, progress: IngestProgress | None = None) -> None:
        """Record how far it is; Stopped if it was asked to end."""
        if self.stopping:
            raise Stopped
        if progress is not None:
            self.facts.done = min(int(progress.done_bytes), self.facts.total)

    def committed(self, store: Store) -> IngestReport | None:
        """What it has committed: those of its files that the index holds; None if that cannot be determined."""
        report = IngestReport()
        try:
            for source in self.sources:
                stored = store.document(source.document_id)
                if stored is None or stored.document.content_hash != source.digest():
                    continue
                was = self.before.get(source.document_id)
                same = was == stored.document.content_hash
                ids = report.unchanged if same else report.added if was is None else report.updated
                ids.append(source.document_id)
                report.chunks += 0 if same else stored.chunks
        except (RagkvError, OSError) as error:
            logger.warning("cannot find out what job %s has committed: %s", self.facts.id, type(error).__name__)
            return None
        return report


class JobQueue:
    """The ingest jobs of one index, in memory; thread-safe. `on_end` receives the final state of each job."""

    def __init__(self, rag: RagKV, on_end: Callable[[State], object]) -> None:
        self.rag = rag
        self._on_end = on_end
        self._lock = threading.RLock()
        self._jobs: dict[str, IngestJob] = {}
        self._receiving = 0
        self._worker: threading.Thread | None = None
        self._closing = False

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place in the queue, while its files arrive; ApiError 429 if the queue is full."""
        with self._lock:
            self._require_open()
            waiting = self._receiving + sum(job.facts.state == "queued" for job in self._jobs.values())
            if waiting >= MAX_WAITING_JOBS:
                message = f"{waiting} ingest jobs wait already, the most at a time: try again when one has ended."
                raise too_many(message, seconds=10)
            self._receiving += 1
        try:
            yield
        finally:
            with self._lock:
                self._receiving -= 1

    def accept(self, work: Sequence[UploadFile] | FolderChanges) -> IngestJob:
        """Queue a job; ApiError 503 if the server is stopping."""
        job = IngestJob(work)
        try:
            with self._lock:
                self._require_open()
                if self._worker is None:
                    self._worker = self.rag.index.start_thread(self._work, name="ragkv-ingest")
                self._jobs[job.facts.id] = job
        except BaseException:
            job.close()
            raise
        return job

    def jobs(self) -> list[IngestJob]:
        """All known jobs, the latest first."""
        with self._lock:
            return list(reversed(self._jobs.values()))

    def job(self, identifier: str) -> IngestJob:
        """One job; ApiError 404 if it is unknown."""
        with self._lock:
            if identifier not in self._jobs:
                raise ApiError(404, "There is no such job; only the last ones are remembered.", code="not_found")
            return self._jobs[identifier]

    def cancel(self, identifier: str) -> IngestJob:
        """Cancel a job: a waiting one at once, a running one after its current batch."""
        with self._lock:
            job = self.job(identifier)
            job.stopping = True
            if job.facts.state == "queued":
                self._end(job, "cancelled")
        return job

    def stop(self) -> None:
        """Ask all jobs to end; they become `interrupted`."""
        with self._lock:
            self._closing = True
            for job in list(self._jobs.values()):
                job.stopping = True
                if job.facts.state == "queued":
                    self._end(job, "interrupted", error=_CUT_SHORT)

    def close(self) -> None:
        """`stop`, and wait for the running job."""
        self.stop()
        if (worker := self._worker) is not None:
            worker.join()

    def _work(self) -> None:
        store = self.rag.store
        while (job := self._next()) is not None:
            try:
                report = self._ingest(job)
            except Stopped:
                state: State = "interrupted" if self._closing else "cancelled"
                self._end(job, state, job.committed(store), _CUT_SHORT if self._closing else None)
            except IngestError as error:
                self._end(job, "failed", IngestReport(skipped=list(error.skipped)), str(error))
            except RagkvError as error:
                self._end(job, "failed", job.committed(store), readable_error(error))
            except Exception:
                logger.exception("ingest job %s failed", job.facts.id)
                self._end(job, "failed", job.committed(store), "The server failed; its log says more.")
            else:
                job.facts.done = job.facts.total
                self._end(job, "done", report)

    def _next(self) -> IngestJob | None:
        with self._lock:
            job = next((job for job in self._jobs.values() if job.facts.state == "queued"), None)
            if job is None or self._closing:
                self._worker = None
                return None
            job.facts.state = "running"
        return job

    def _ingest(self, job: IngestJob) -> IngestReport:
        job.open(self.rag.store)
        options: dict[str, Any] = {"timeout": 1, "on_wait": lambda _: None, "on_progress": job.progress}
        while True:
            job.progress()
            with suppress(StoreBusyError):  # another process is ingesting: wait for it, unless this job is cancelled
                if isinstance(job.work, FolderChanges):
                    return self.rag.follow(job.work, **options)
                return self.rag.ingest(*job.sources, **options)

    def _end(self, job: IngestJob, state: State, report: IngestReport | None = None, error: str | None = None) -> None:
        with self._lock:
            job.close()
            self._on_end(state)
            job.facts = replace(job.facts, state=state, report=report, error=error, ended=time.time())
            over = [job for job in self._jobs.values() if job.facts.ended is not None]
            for old in over[: max(0, len(over) - MAX_ENDED_JOBS)]:
                del self._jobs[old.facts.id]
        job.ended.set()

    def _require_open(self) -> None:
        if self._closing:
            raise stopping_error()


class JobManager:
    """The job queues of all indexes that accept documents, each made at its first use."""

    def __init__(
        self, served: ServedIndexes, limiter: ConcurrencyLimiter, *, refusal: str = "is read-only here"
    ) -> None:
        self._served = served
        self._limiter = limiter
        self._refusal = refusal
        self._lock = threading.Lock()
        self._queues: dict[Path, JobQueue] = {}
        self._stopping = threading.Event()

    def writable(self, name: str) -> RagKV:
        """The index; ApiError 403 if it is read-only."""
        rag = self._served.index(name)
        if rag.store.readonly:
            raise ApiError(403, f"Index {name!r} {self._refusal}.", kind="permission_error", code="read_only")
        return rag

    def queue(self, name: str) -> JobQueue:
        """The index's queue; ApiError 403 if the index is read-only."""
        rag = self.writable(name)
        folder = rag.folder.resolve()  # two names may be one index
        with self._lock:
            if self._stopping.is_set():
                raise stopping_error()
            if folder in self._queues and not self._queues[folder].rag.store.in_place:
                self._queues.pop(folder).close()
            if folder not in self._queues:
                self._queues[folder] = JobQueue(rag, lambda state: self._limiter.job_ended(name, state))
            return self._queues[folder]

    def jobs(self, name: str) -> list[IngestJob]:
        """The index's jobs, the latest first; none if the index is read-only."""
        return [] if self._served.index(name).store.readonly else self.queue(name).jobs()

    def follow(self, name: str, folder: Path, *, prune: bool) -> None:
        """Watch a folder for the index `name`, in a thread, until `stop`; ApiError 403 if the index is read-only."""
        rag = self.writable(name)

        def apply(changes: FolderChanges) -> bool:
            self._warn(name, changes.skipped)
            if not (changes.sources or changes.gone):
                return True
            try:
                queue = self.queue(name)
                with queue.place():
                    job = queue.accept(changes)
            except (ApiError, RagkvError) as error:
                logger.warning("changes of %s wait: %s", folder, error)
                return False
            job.ended.wait()
            self._warn(name, () if job.facts.report is None else job.facts.report.skipped)
            if job.facts.error:
                logger.warning("changes of %s: %s", folder, job.facts.error)
            return job.facts.state == "done"

        def work() -> None:
            try:
                rag.watcher([folder], prune=prune, notify=logger.warning).follow(apply, self._stopping)
            except (RagkvError, OSError) as error:
                logger.warning("%s is not watched any more: %s", folder, error)

        rag.index.start_thread(work, name="ragkv-watch")

    @staticmethod
    def _warn(name: str, skipped: Sequence[Skipped]) -> None:
        for skip in skipped:
            logger.warning("%s is not in index %s: %s", skip.path, name, skip.reason)

    def stop(self) -> None:
        """Ask all jobs to end, without waiting; committed work stays."""
        with self._lock:
            self._stopping.set()
        for queue in self._queues.values():
            queue.stop()

    def close(self) -> None:
        """`stop`, and wait for running jobs."""
        self.stop()
        while self._queues:
            self._queues.popitem()[1].close()
