"""Ingest jobs for uploaded files.

An index runs one job at a time, in a thread; a limited number of jobs waits. Jobs are in memory: after a restart they
are unknown, and what they had committed is in the index. The index's folder `jobs/` holds the uploaded files until they
are ingested; backups leave it out.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from ragkv.errors import (
    IngestError,
    RagkvError,
    StoreAccessError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreGoneError,
)
from ragkv.ingest import IngestProgress, IngestReport, SourceFile
from ragkv.ingest.watch import FolderChanges
from ragkv.server.errors import ApiError, stopping_error, too_many
from ragkv.server.metrics import ConcurrencyLimiter
from ragkv.server.schemas import ServedIndexes
from ragkv.store import Store
from ragkv.util.files import FULL, make_folder, open_plain, remove_tree

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

logger = logging.getLogger(__name__)

MAX_UPLOAD_FILES = 64
"""Files in one upload."""
State = Literal["queued", "running", "done", "failed", "cancelled", "interrupted"]
ENDED = frozenset({"done", "failed", "cancelled", "interrupted"})


class SkippedFile(BaseModel):
    path: str = Field(description="The file's name.")
    reason: str


class ReportReply(BaseModel):
    """The result of an ingest in the form of `ragkv ingest --json`: ids of documents, and counts."""

    added: list[str]
    updated: list[str]
    unchanged: list[str]
    pruned: list[str]
    skipped: list[SkippedFile] = Field(description="Files that are not in the index.")
    left_out: list[SkippedFile] = Field(description="Parts missing from files that are.")
    one_block: list[str] = Field(default=[], description="Documents for apb that are too short to be cut into blocks.")
    chunks: int
    tokens: int
    kv_encoded: int
    kv_reused: int
    kv_later: int
    kv_bytes: int
    encode_seconds: float
    embed_seconds: float
    seconds: float
    dry_run: bool


class JobStatus(BaseModel):
    """An ingest job. `interrupted`: the server stops; what the report lists is in the index, the rest has to be sent
    again."""

    id: str
    state: State
    files: list[str] = Field(description="The files' names; the first of them for a watched folder.")
    done: int = Field(description="Bytes of the files that are worked off.")
    total: int = Field(description="Bytes of the files.")
    report: ReportReply | None
    error: str | None
    created: float = Field(description="Seconds since 1970.")
    ended: float | None


class Stopped(Exception):  # noqa: N818 - asked for
    """Raised within an ingest that was cancelled, or whose server stops."""


class IngestJob:
    """A job and the files that it still has to ingest."""

    def __init__(self, facts: JobStatus, sources: Sequence[SourceFile], changes: FolderChanges | None) -> None:
        self.facts = facts
        self.sources = list(sources)
        self.changes = changes
        """What has changed in a watched folder; None for an upload."""
        self.before: dict[str, str] = {}
        """The hashes of those of its documents that the index had when it started."""
        self.stopping = False
        """Whether it was asked to end."""
        self.watchers: set[Callable[[], object]] = set()

    @property
    def over(self) -> bool:
        return self.facts.state in ENDED

    def to_json(self) -> dict[str, Any]:
        """The job for clients."""
        return self.facts.model_dump()

    def notify(self) -> None:
        """Call the watchers."""
        for watcher in list(self.watchers):
            watcher()

    def progress(self, progress: IngestProgress | None = None) -> None:
        """Record how far it is; Stopped if it was asked to end."""
        if self.stopping:
            raise Stopped
        if progress is not None:
            self.facts.done = min(int(progress.done_bytes), self.facts.total)
            self.notify()


def _report_facts(report: IngestReport) -> ReportReply:
    payload = report.to_json()
    for name in ("skipped", "left_out"):
        payload[name] = [{"path": skip["path"], "reason": _unicode(skip["reason"])} for skip in payload[name]]
    return ReportReply.model_validate(payload)


def _unicode(text: str) -> str:
    return text.encode(errors="replace").decode()


def committed(store: Store, sources: Sequence[SourceFile], before: Mapping[str, str]) -> IngestReport:
    """The report of an ingest that was ended: which of these files the index holds."""
    report = IngestReport()
    for source in sources:
        stored = store.document(source.document_id)
        if stored is None or stored.document.content_hash != source.digest():
            continue
        was = before.get(source.document_id)
        same = was == stored.document.content_hash
        ids = report.unchanged if same else report.added if was is None else report.updated
        ids.append(source.document_id)
        report.chunks += 0 if same else stored.chunks
    return report


class UploadFolder:
    """The index's folder `jobs/`, in which uploaded files lie until they are ingested. The server that uses it holds
    its lock: ApiError 409 if another one has it; StoreError if it cannot be used.
    """

    def __init__(self, index: Path) -> None:
        self._folder = index / "jobs"
        try:
            make_folder(self._folder, parents=False)  # do not recreate a deleted index
            self._lock = open_plain(self._folder / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise refused(self._folder, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            message = "Another server adds documents to this index: send them to that one, or stop it."
            raise ApiError(409, message, code="served_elsewhere") from error
        self._sweep()

    def close(self) -> None:
        self._sweep()
        os.close(self._lock)

    @property
    def in_place(self) -> bool:
        """Whether the folder is still the one that was opened: the index may have been deleted or replaced."""
        try:
            return os.path.samestat(os.fstat(self._lock), (self._folder / "lock").lstat())
        except OSError:
            return False

    def make(self, identifier: str) -> Path:
        """A new folder for a job's files."""
        if not self.in_place:
            raise StoreGoneError(f"{self._folder} was deleted, moved or replaced while it was open.")
        try:
            (path := self._folder / identifier).mkdir(mode=0o700)
        except OSError as error:
            raise refused(self._folder, error) from error
        return path

    def drop(self, identifier: str) -> None:
        """Delete a job's files."""
        try:
            if self.in_place:
                remove_tree(self._folder / identifier)
        except OSError as error:
            logger.warning("uploaded files in %s cannot be deleted: %s", self._folder, error.strerror)

    def _sweep(self) -> None:
        """Delete all uploaded files, also those of a killed server."""
        with suppress(FileNotFoundError):  # the index was deleted
            for path in list(self._folder.iterdir()):
                if path.name != "lock":
                    self.drop(path.name)


def refused(folder: Path, error: OSError) -> StoreError:
    """The error for a folder of an index that cannot be written."""
    if isinstance(error, FileNotFoundError):
        return StoreGoneError(f"{folder} was deleted, moved or replaced while it was open.")
    if error.errno in FULL:
        return StoreFullError(f"The disk or quota under {folder} is full: make room and try again.")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return StoreAccessError(f"{folder} may not be written by the server ({error.strerror}).")
    return StoreError(f"{folder} cannot be written ({error.strerror}): delete it, and try again.")


MAX_WAITING_JOBS = 16
MAX_ENDED_JOBS = 32
"""How many finished jobs are kept."""
_CUT_SHORT = "The server ended before this job did. What the report lists is in the index; send the rest again."


class JobQueue:
    """The ingest jobs of one index, in memory; thread-safe. `on_end` receives the final state of each job."""

    def __init__(self, rag: RagKV, on_end: Callable[[State], object]) -> None:
        self._rag = rag
        self._on_end = on_end
        self._lock = threading.RLock()
        self._folder = UploadFolder(rag.folder)
        self._jobs: dict[str, IngestJob] = {}
        self._receiving: set[str] = set()
        self._worker: threading.Thread | None = None
        self._closing = False

    @property
    def in_place(self) -> bool:
        """Whether the index is open and has not been replaced."""
        return self._rag.store.in_place and self._folder.in_place

    def reserve(self) -> tuple[str, Path]:
        """Reserve a place in the queue, and return the folder for its files; ApiError 429 if the queue is full."""
        with self._lock:
            self._require_open()
            waiting = len(self._receiving) + sum(job.facts.state == "queued" for job in self._jobs.values())
            if waiting >= MAX_WAITING_JOBS:
                message = f"{waiting} ingest jobs wait already, the most at a time: try again when one has ended."
                raise too_many(message, seconds=10)
            identifier = secrets.token_hex(8)
            folder = self._folder.make(identifier)
            self._receiving.add(identifier)
            return identifier, folder

    def release(self, identifier: str) -> None:
        """Give up a reserved place."""
        with self._lock:
            self._receiving.discard(identifier)
        self._folder.drop(identifier)

    def follow(self, changes: FolderChanges) -> IngestJob:
        """Queue the changes of a watched folder; errors as those of `reserve` and `accept`."""
        identifier, _ = self.reserve()
        try:
            return self.accept(identifier, changes.sources, changes)
        except BaseException:
            self.release(identifier)
            raise

    def accept(self, identifier: str, sources: Sequence[SourceFile], changes: FolderChanges | None = None) -> IngestJob:
        """Queue the received files; ApiError 503 if the server is stopping."""
        facts = JobStatus(
            id=identifier,
            state="queued",
            files=[source.name for source in sources][:MAX_UPLOAD_FILES],
            done=0,
            total=sum(source.size for source in sources),
            report=None,
            error=None,
            created=time.time(),
            ended=None,
        )
        job = IngestJob(facts, sources, changes)
        with self._lock:
            self._require_open()
            self._jobs[identifier] = job
            try:
                if self._worker is None:
                    self._worker = self._rag.index.start_thread(self._work, name="ragkv-ingest")
            except BaseException:
                del self._jobs[identifier]
                raise
            self._receiving.discard(identifier)
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
        self._folder.close()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                report = self._ingest(job)
            except Stopped:
                state: State = "interrupted" if self._closing else "cancelled"
                self._end(job, state, self._left_by(job), _CUT_SHORT if self._closing else None)
            except IngestError as error:
                self._end(job, "failed", IngestReport(skipped=list(error.skipped)), str(error))
            except RagkvError as error:
                self._end(job, "failed", self._left_by(job), str(error))
            except Exception:
                logger.exception("ingest job %s failed", job.facts.id)
                self._end(job, "failed", self._left_by(job), "The server failed; its log says more.")
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
        job.notify()
        return job

    def _ingest(self, job: IngestJob) -> IngestReport:
        stored = [self._rag.store.document(source.document_id) for source in job.sources]
        job.before = {row.document.document_id: row.document.content_hash for row in stored if row is not None}
        options: dict[str, Any] = {"timeout": 1, "on_wait": lambda _: None, "on_progress": job.progress}
        while True:
            job.progress()
            try:  # another process may be ingesting: wait for it, unless this job is cancelled
                if job.changes is not None:
                    return self._rag.follow(job.changes, **options)
                return self._rag.ingest(*job.sources, **options)
            except StoreBusyError:
                continue

    def _left_by(self, job: IngestJob) -> IngestReport | None:
        """What the job has committed; None if that cannot be determined."""
        try:
            return committed(self._rag.store, job.sources, job.before)
        except (RagkvError, OSError) as error:
            logger.warning("cannot find out what job %s has committed: %s", job.facts.id, type(error).__name__)
            return None

    def _end(self, job: IngestJob, state: State, report: IngestReport | None = None, error: str | None = None) -> None:
        with self._lock:
            # update everything before the watchers wake up
            self._folder.drop(job.facts.id)
            self._on_end(state)
            facts, job.sources = job.facts, []
            facts.report = None if report is None else _report_facts(report)
            facts.error = None if error is None else _unicode(error)
            facts.state, facts.ended = state, time.time()
            ended = [job for job in self._jobs.values() if job.over]
            for old in ended[: max(0, len(ended) - MAX_ENDED_JOBS)]:
                del self._jobs[old.facts.id]
        job.notify()

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
        self._closed = False
        self._stopping = threading.Event()

    def writable(self, name: str) -> RagKV:
        """The index; ApiError 403 if it is read-only."""
        rag = self._served.index(name)
        if rag.store.readonly:
            raise ApiError(403, f"Index {name!r} {self._refusal}.", kind="permission_error", code="read_only")
        return rag

    def queue(self, name: str) -> JobQueue:
        """The index's queue; ApiError 403 if the index is read-only, 409 if another server has its jobs."""
        rag = self.writable(name)
        folder = rag.folder.resolve()  # two names may be one index
        with self._lock:
            if self._closed:
                raise stopping_error()
            if folder in self._queues and not self._queues[folder].in_place:
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
            for skip in changes.skipped:
                logger.warning("%s is not in index %s: %s", skip.path, name, skip.reason)
            if not (changes.sources or changes.gone):
                return True
            try:
                job = self.queue(name).follow(changes)
            except (ApiError, RagkvError) as error:
                logger.warning("changes of %s wait: %s", folder, error)
                return False
            ended = threading.Event()
            job.watchers.add(ended.set)
            while not job.over:
                ended.wait(1)
                ended.clear()
            report = job.facts.report
            for left in () if report is None else report.skipped:
                logger.warning("%s is not in index %s: %s", left.path, name, left.reason)
            if job.facts.error:
                logger.warning("changes of %s: %s", folder, job.facts.error)
            return job.facts.state == "done"

        def work() -> None:
            try:
                rag.watcher([folder], prune=prune, notify=logger.warning).follow(apply, self._stopping)
            except (RagkvError, OSError) as error:
                logger.warning("%s is not watched any more: %s", folder, error)

        rag.index.start_thread(work, name="ragkv-watch")

    def recover(self) -> None:
        """Delete the files that a killed server left in the indexes."""
        for name, rag in self._served:
            if (rag.folder / "jobs").exists():
                with suppress(ApiError):  # another server's, or read-only
                    self.queue(name)

    def stop(self) -> None:
        """Ask all jobs to end, without waiting; committed work stays."""
        self._stopping.set()
        with self._lock:
            self._closed = True
        for queue in self._queues.values():
            queue.stop()

    def close(self) -> None:
        """`stop`, and wait for running jobs."""
        self.stop()
        while self._queues:
            self._queues.popitem()[1].close()


async def watch(job: IngestJob) -> AsyncIterator[dict[str, Any]]:
    """The job's state each time it changes, until it has ended."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(changed.set)

    job.watchers.add(wake)
    last: dict[str, Any] | None = None
    try:
        while True:
            changed.clear()
            over, payload = job.over, job.to_json()
            if payload != last:
                yield (last := payload)
            if over:
                return
            await changed.wait()
    finally:
        job.watchers.discard(wake)
