"""Ingest jobs for uploaded files.

An index runs one job at a time, in a thread; a limited number of jobs waits. The index's folder `jobs/` holds the state
of its jobs and the uploaded files until they are ingested. `journal.json` is always replaced as a whole, so a killed
server leaves the last state of each job. The process that serves the index holds the file lock `lock`. Backups leave
the folder out.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
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
from ragkv.ingest import IngestProgress, IngestReport, SourceFile, from_bytes
from ragkv.ingest.watch import FolderChanges
from ragkv.server.errors import ApiError, stopping_error, too_many
from ragkv.server.metrics import ConcurrencyLimiter
from ragkv.server.schemas import ServedIndexes
from ragkv.store import Store
from ragkv.util.files import FULL, make_folder, open_plain, read_plain, remove_tree, replace_plain

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

logger = logging.getLogger(__name__)

MOST_FILES = 64
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
    """An ingest job. `interrupted`: the server ended before it; what the report lists is in the index, the rest is not
    kept and has to be sent again."""

    id: str = Field(pattern="^[0-9a-f]{16}$")
    state: State
    files: list[str] = Field(
        description="The files' names; the first of them for a watched folder.", max_length=MOST_FILES
    )
    done: int = Field(description="Bytes of the files that are worked off.")
    total: int = Field(description="Bytes of the files.")
    report: ReportReply | None
    error: str | None
    created: float = Field(description="Seconds since 1970.", allow_inf_nan=False)
    ended: float | None = Field(allow_inf_nan=False)


class Stopped(Exception):  # noqa: N818 - asked for
    """Raised within an ingest that was cancelled, or whose server stops."""


class IngestJob:
    """A job and the files that it still has to ingest. `before` maps document ids to the hashes of those documents that
    were in the index when the job started.
    """

    def __init__(
        self,
        facts: JobStatus,
        sources: Sequence[SourceFile] = (),
        before: Mapping[str, str] | None = None,
        changes: FolderChanges | None = None,
    ) -> None:
        self.facts = facts
        self.sources = list(sources)
        self.changes = changes
        """What has changed in a watched folder; None for an upload."""
        self.before = dict(before or {})
        self.stopping = False
        """Whether it was asked to end."""
        self.watchers: set[Callable[[], object]] = set()

    def end(self, state: State, report: IngestReport | None, error: str | None) -> None:
        """Set the final state; the files are no longer needed."""
        facts = self.facts
        facts.report = None if report is None else _report_facts(report)
        facts.error = None if error is None else _unicode(error)
        facts.state, facts.ended = state, time.time()
        self.sources = []

    @property
    def over(self) -> bool:
        return self.facts.state in ENDED

    def to_json(self) -> dict[str, Any]:
        """The job for clients."""
        return self.facts.model_dump()


def _report_facts(report: IngestReport) -> ReportReply:
    payload = report.to_json()
    for name in ("skipped", "left_out"):
        payload[name] = [{"path": each["path"], "reason": _unicode(each["reason"])} for each in payload[name]]
    return ReportReply.model_validate(payload)


def _unicode(text: str) -> str:
    return text.encode(errors="replace").decode()


def committed(store: Store, sources: Sequence[SourceFile], before: Mapping[str, str]) -> IngestReport:
    """The report of an interrupted ingest: which of these files the index holds."""
    report = IngestReport()
    for source in sources:
        stored = store.document(source.document_id)
        if stored is None or stored.document.content_hash != source.digest():
            continue
        was = before.get(source.document_id)
        found = report.added if was is None else report.unchanged
        if was is not None and was != stored.document.content_hash:
            found = report.updated
        found.append(source.document_id)
        report.chunks += stored.chunks if found is not report.unchanged else 0
    return report


class _JournalRow(BaseModel):
    job: JobStatus
    before: dict[str, str]


class _Journal(BaseModel):
    format: Literal[1]
    jobs: list[_JournalRow]


_MOST_BYTES = 16 << 20
_MOST_JOBS = 64
"""More than a queue holds at any time."""


class JobStore:
    """The jobs of the index in `folder`. ApiError 409 if another server has it; StoreError if it cannot be used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "jobs"
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

    def close(self) -> None:
        os.close(self._lock)

    def read(self) -> list[IngestJob]:
        """The jobs as last saved; none, with a warning, if the journal cannot be read."""
        path = self._folder / "journal.json"
        try:
            found = _Journal.model_validate_json(read_plain(path, limit=_MOST_BYTES))
            return [IngestJob(row.job, before=row.before) for row in found.jobs[-_MOST_JOBS:]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            logger.warning("%s is not used, and will be rewritten: %s", path, type(error).__name__)
            return []

    @property
    def held(self) -> bool:
        """Whether the folder is still the one that was opened: the index may have been deleted or replaced."""
        try:
            return os.path.samestat(os.fstat(self._lock), (self._folder / "lock").lstat())
        except OSError:
            return False

    def save(self, jobs: Sequence[IngestJob]) -> None:
        """Write the state of these jobs to the journal; StoreError if that fails."""
        self._require_held()
        rows = [_JournalRow(job=job.facts, before={} if job.over else job.before) for job in jobs]
        content = json.dumps(_Journal(format=1, jobs=rows).model_dump())
        try:
            replace_plain(self._folder / "journal.json", content.encode())
        except OSError as error:
            raise refused(self._folder, error) from error

    def make(self, identifier: str) -> Path:
        """A new folder for a job's files."""
        self._require_held()
        try:
            (path := self._folder / identifier).mkdir(mode=0o700)
        except OSError as error:
            raise refused(self._folder, error) from error
        return path

    def kept(self, job: IngestJob) -> list[SourceFile]:
        """The job's files that still exist. Their names are numbers, in the order of `files`."""
        places = [self._folder / job.facts.id / str(number) for number in range(len(job.facts.files))]
        named = zip(places, job.facts.files, strict=True)
        return [from_bytes(place, name=name) for place, name in named if place.is_file() and not place.is_symlink()]

    def drop(self, identifier: str) -> None:
        """Delete a job's files."""
        if not self.held:
            return
        try:
            remove_tree(self._folder / identifier)
        except OSError as error:
            logger.warning("uploaded files in %s cannot be deleted: %s", self._folder, error.strerror)

    def sweep(self) -> None:
        """Delete all uploaded files, and the temporary files of a killed server."""
        if not self.held:
            return
        try:
            found = list(self._folder.iterdir())
        except OSError as error:  # the index was deleted
            logger.warning("uploaded files in %s cannot be deleted: %s", self._folder, error.strerror)
            return
        for path in found:
            if path.name not in ("lock", "journal.json"):
                self.drop(path.name)

    def _require_held(self) -> None:
        if not self.held:
            raise StoreGoneError(f"{self._folder} was deleted, moved or replaced while it was open.")


def refused(folder: Path, error: OSError) -> StoreError:
    """The error for a folder of an index that cannot be written."""
    if isinstance(error, FileNotFoundError):
        return StoreGoneError(f"{folder} was deleted, moved or replaced while it was open.")
    if error.errno in FULL:
        return StoreFullError(f"The disk or quota under {folder} is full: make room and try again.")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return StoreAccessError(f"{folder} may not be written by the server ({error.strerror}).")
    return StoreError(f"{folder} cannot be written ({error.strerror}): delete it, and try again.")


MOST_WAITING = 16
MOST_KEPT = 32
"""How many finished jobs are kept."""
_CUT_SHORT = "The server ended before this job did. What the report lists is in the index; send the rest again."


class JobQueue:
    """The ingest jobs of one index; thread-safe. `on_end` receives the final state of each job."""

    def __init__(self, rag: RagKV, on_end: Callable[[State], object]) -> None:
        self._rag = rag
        self._on_end = on_end
        self._lock = threading.RLock()
        self._folder = JobStore(rag.folder)
        self._jobs: dict[str, IngestJob] = {}
        self._receiving: set[str] = set()
        self._worker: threading.Thread | None = None
        self._closing = False
        try:
            self._recover()
        except BaseException:
            self._folder.close()
            raise

    @property
    def in_place(self) -> bool:
        """Whether the index is open and has not been replaced."""
        return self._rag.store.in_place and self._folder.held

    def reserve(self) -> tuple[str, Path]:
        """Reserve a place in the queue, and return the folder for its files; ApiError 429 if the queue is full."""
        with self._lock:
            self._require_open()
            waiting = len(self._receiving) + sum(job.facts.state == "queued" for job in self._jobs.values())
            if waiting >= MOST_WAITING:
                message = f"{waiting} ingest jobs wait already, the most at a time: try again when one has ended."
                raise too_many(message, seconds=10)
            identifier = secrets.token_hex(8)
            self._receiving.add(identifier)
        try:
            return identifier, self._folder.make(identifier)
        except BaseException:
            self._receiving.discard(identifier)
            raise

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
            files=[source.name for source in sources][:MOST_FILES],
            done=0,
            total=sum(source.size for source in sources),
            report=None,
            error=None,
            created=time.time(),
            ended=None,
        )
        job = IngestJob(facts, sources, changes=changes)
        with self._lock:
            self._require_open()
            self._jobs[identifier] = job
            try:
                self._save()
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
        self._folder.sweep()
        self._folder.close()

    def _recover(self) -> None:
        """Mark the jobs that an earlier server left unfinished as interrupted, and report what they had committed."""
        self._jobs = {job.facts.id: job for job in self._folder.read()}
        for job in [each for each in self._jobs.values() if not each.over]:
            job.sources = self._folder.kept(job)
            self._end(job, "interrupted", report=self._left_by(job), error=_CUT_SHORT)
        self._folder.sweep()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._run(job)
            except RagkvError as error:
                self._end(job, "failed", report=self._left_by(job), error=str(error))
            except Exception:
                logger.exception("ingest job %s failed", job.facts.id)
                self._end(job, "failed", report=self._left_by(job), error="The server failed; its log says more.")

    def _next(self) -> IngestJob | None:
        with self._lock:
            job = next((job for job in self._jobs.values() if job.facts.state == "queued"), None)
            if job is None or self._closing:
                self._worker = None
                return None
            job.facts.state = "running"
            return job

    def _run(self, job: IngestJob) -> None:
        stored = [self._rag.store.document(source.document_id) for source in job.sources]
        job.before = {one.document.document_id: one.document.content_hash for one in stored if one is not None}
        with self._lock:
            self._keep(job)
        try:
            report = self._ingest(job)
        except Stopped:
            state: State = "interrupted" if self._closing else "cancelled"
            self._end(job, state, report=self._left_by(job), error=_CUT_SHORT if self._closing else None)
        except IngestError as error:
            skipped = IngestReport(skipped=list(error.skipped))
            self._end(job, "failed", report=skipped, error=str(error))
        else:
            job.facts.done = job.facts.total
            self._end(job, "done", report=report)

    def _ingest(self, job: IngestJob) -> IngestReport:
        def on_progress(progress: IngestProgress) -> None:
            self._go_on(job)
            job.facts.done = min(int(progress.done_bytes), job.facts.total)
            self._notify(job)

        while True:
            self._go_on(job)
            try:  # another process may be ingesting: wait for it, unless this job is cancelled
                if job.changes is not None:
                    return self._rag.follow(job.changes, timeout=1, on_wait=lambda _: None, on_progress=on_progress)
                return self._rag.ingest(*job.sources, timeout=1, on_wait=lambda _: None, on_progress=on_progress)
            except StoreBusyError:
                continue

    def _go_on(self, job: IngestJob) -> None:
        if job.stopping:
            raise Stopped

    def _left_by(self, job: IngestJob) -> IngestReport | None:
        """What the job has committed; None if that cannot be determined."""
        try:
            return committed(self._rag.store, job.sources, job.before)
        except (RagkvError, OSError) as error:
            logger.warning("cannot find out what job %s has committed: %s", job.facts.id, type(error).__name__)
            return None

    def _end(
        self,
        job: IngestJob,
        state: State,
        *,
        report: IngestReport | None = None,
        error: str | None = None,
    ) -> None:
        with self._lock:
            # update everything before the watchers wake up
            self._folder.drop(job.facts.id)
            self._on_end(state)
            job.end(state, report, error)
            ended = [each for each in self._jobs.values() if each.over]
            for old in ended[: max(0, len(ended) - MOST_KEPT)]:
                del self._jobs[old.facts.id]
            self._keep(job)

    def _keep(self, job: IngestJob) -> None:
        try:
            self._save()
        except RagkvError as error:  # continue: only after a crash would the older state be shown
            logger.warning("the state of the ingest jobs is not kept: %s", error)
        self._notify(job)

    def _save(self) -> None:
        self._folder.save(list(self._jobs.values()))

    def _notify(self, job: IngestJob) -> None:
        for watcher in list(job.watchers):
            watcher()

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
        """Clean up what a killed server left in the indexes."""
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
