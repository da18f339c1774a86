"""The ingest jobs of one index: one runs at a time, in a thread, and a bounded number wait."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.errors import IngestError, RagkvError, StoreBusyError
from ragkv.ingest import IngestProgress, IngestReport, SourceFile
from ragkv.server.failure import Refusal
from ragkv.server.ingestjob import IngestJob, JobFacts, State, Stopped, committed
from ragkv.server.jobfolder import JobFolder

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

__all__ = ["JobQueue"]

MOST_WAITING = 16
MOST_KEPT = 32
"""Jobs that have ended, of which the last are remembered."""
_CUT_SHORT = "The server ended before this job did. What the report lists is in the index; send the rest again."

logger = logging.getLogger(__name__)


class JobQueue:
    """The jobs of `rag`; threads may share it. `on_end` is told the final state of each."""

    def __init__(self, rag: RagKV, on_end: Callable[[State], object]) -> None:
        self._rag = rag
        self._on_end = on_end
        self._lock = threading.RLock()
        self._folder = JobFolder(rag.folder)
        self._jobs: dict[str, IngestJob] = {}
        self._receiving: set[str] = set()
        self._worker: threading.Thread | None = None
        self._closing = False
        try:
            self._recover()
        except BaseException:
            self._folder.close()
            raise

    def reserve(self) -> tuple[str, Path]:
        """A place in the queue, and the folder to receive its files in; Refusal 429 when the queue is full."""
        with self._lock:
            self._require_open()
            waiting = len(self._receiving) + sum(job.facts.state == "queued" for job in self._jobs.values())
            if waiting >= MOST_WAITING:
                said = f"{waiting} ingest jobs wait already, the most at a time: try again when one has ended."
                raise Refusal(
                    429, said, kind="rate_limit_error", code="rate_limit_exceeded", headers={"retry-after": "10"}
                )
            identifier = secrets.token_hex(8)
            self._receiving.add(identifier)
        try:
            return identifier, self._folder.make(identifier)
        except BaseException:
            self._receiving.discard(identifier)
            raise

    def release(self, identifier: str) -> None:
        """Give up a place whose files did not come."""
        with self._lock:
            self._receiving.discard(identifier)
        self._folder.drop(identifier)

    def accept(self, identifier: str, sources: Sequence[SourceFile]) -> IngestJob:
        """Queue the files that were received; Refusal 503 when the server stops."""
        facts = JobFacts(
            id=identifier,
            state="queued",
            files=[source.name for source in sources],
            done=0,
            total=sum(source.size for source in sources),
            report=None,
            error=None,
            created=time.time(),
            ended=None,
        )
        job = IngestJob(facts, sources)
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
        """All that are known, the latest first."""
        with self._lock:
            return list(reversed(self._jobs.values()))

    def job(self, identifier: str) -> IngestJob:
        """One of them; Refusal 404."""
        with self._lock:
            if identifier not in self._jobs:
                raise Refusal(404, "There is no such job; only the last ones are remembered.", code="not_found")
            return self._jobs[identifier]

    def cancel(self, identifier: str) -> IngestJob:
        """End a job: one that waits at once, the one that runs between two batches of its work."""
        with self._lock:
            job = self.job(identifier)
            job.stopping = True
            if job.facts.state == "queued":
                self._end(job, "cancelled")
        return job

    def stop(self) -> None:
        """Have all jobs end, which are then interrupted."""
        with self._lock:
            self._closing = True
            for job in list(self._jobs.values()):
                job.stopping = True
                if job.facts.state == "queued":
                    self._end(job, "interrupted", error=_CUT_SHORT)

    def close(self) -> None:
        """`stop`, and wait for the job that runs."""
        self.stop()
        if (worker := self._worker) is not None:
            worker.join()
        self._folder.sweep()
        self._folder.close()

    def _recover(self) -> None:
        """Tell the jobs that a server left undone as interrupted, with what they have committed."""
        for job in self._folder.read():
            self._jobs[job.facts.id] = job
            if not job.over:
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
            self._tell(job)

        while True:
            self._go_on(job)
            try:  # another process may ingest: wait for it, but not longer than this job is wanted
                return self._rag.ingest(*job.sources, timeout=1, on_wait=lambda _: None, on_progress=on_progress)
            except StoreBusyError:
                continue

    def _go_on(self, job: IngestJob) -> None:
        if job.stopping:
            raise Stopped

    def _left_by(self, job: IngestJob) -> IngestReport | None:
        """What the job has committed; None when that cannot be found out."""
        try:
            return committed(self._rag.store, job.sources, job.before)
        except (RagkvError, OSError) as error:
            logger.warning("what job %s has committed cannot be told: %s", job.facts.id, type(error).__name__)
            return None

    def _end(
        self, job: IngestJob, state: State, *, report: IngestReport | None = None, error: str | None = None
    ) -> None:
        with self._lock:
            # all that is to be seen of the end is there before anybody is told of it
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
        except RagkvError as error:  # the job itself goes on: after a crash it would be told as it was
            logger.warning("the state of job %s is not kept: %s", job.facts.id, error)
        self._tell(job)

    def _save(self) -> None:
        self._folder.save(list(self._jobs.values()))

    def _tell(self, job: IngestJob) -> None:
        for watcher in list(job.watchers):
            watcher()

    def _require_open(self) -> None:
        if self._closing:
            raise Refusal(503, "The server is stopping.", kind="server_error", code="unavailable")
