"""One ingest of uploaded files: its state, as clients are told it and as its index keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from ragkv.ingest import IngestReport, SourceFile
from ragkv.store import Store

__all__ = ["ENDED", "IngestJob", "JobFacts", "Stopped", "committed"]

State = Literal["queued", "running", "done", "failed", "cancelled", "interrupted"]
ENDED = frozenset({"done", "failed", "cancelled", "interrupted"})


class LeftOut(BaseModel):
    path: str = Field(description="The file's name.")
    reason: str


class ReportFacts(BaseModel):
    """What is in the index now, as `ragkv ingest --json` tells it: the ids of documents, and counts."""

    added: list[str]
    updated: list[str]
    unchanged: list[str]
    pruned: list[str]
    skipped: list[LeftOut] = Field(description="Files that are not in the index.")
    left_out: list[LeftOut] = Field(description="Parts missing from files that are.")
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


class JobFacts(BaseModel):
    """An ingest job. `interrupted`: the server ended before it; what the report lists is in the index, the rest is not
    kept and has to be sent again."""

    id: str = Field(pattern="^[0-9a-f]{16}$")
    state: State
    files: list[str] = Field(description="The names of the files.")
    done: int = Field(description="Bytes of the files that are worked off.")
    total: int = Field(description="Bytes of the files.")
    report: ReportFacts | None
    error: str | None
    created: float = Field(description="Seconds since 1970.", allow_inf_nan=False)
    ended: float | None = Field(allow_inf_nan=False)


class Stopped(Exception):  # noqa: N818 - asked for
    """Raised within an ingest that was cancelled, or whose server stops."""


class IngestJob:
    """A job with the files that it has still to ingest. `before`: the hashes of those that the index had at its start,
    by document id."""

    def __init__(
        self, facts: JobFacts, sources: Sequence[SourceFile] = (), before: Mapping[str, str] | None = None
    ) -> None:
        self.facts = facts
        self.sources = list(sources)
        self.before = dict(before or {})
        self.stopping = False
        """Whether it was asked to end."""
        self.watchers: set[Callable[[], object]] = set()

    def end(self, state: State, report: IngestReport | None, error: str | None) -> None:
        """Its state is final; its files are not needed any more."""
        facts = self.facts
        facts.report = None if report is None else _report_facts(report)
        facts.error = None if error is None else _unicode(error)
        facts.state, facts.ended = state, time.time()
        self.sources = []

    @property
    def over(self) -> bool:
        return self.facts.state in ENDED

    def to_json(self) -> dict[str, Any]:
        """What clients are told."""
        return self.facts.model_dump()

    def row(self) -> dict[str, Any]:
        """What the index keeps."""
        return {"job": self.to_json(), "before": {} if self.over else self.before}

    @classmethod
    def of_row(cls, row: Any) -> IngestJob:
        """ValueError when the row is not one."""
        try:
            before = {str(name): str(digest) for name, digest in row["before"].items()}
            return cls(JobFacts.model_validate(row["job"]), before=before)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError("no job") from error


def _report_facts(report: IngestReport) -> ReportFacts:
    told = report.to_json()
    for name in ("skipped", "left_out"):
        told[name] = [{"path": each["path"], "reason": _unicode(each["reason"])} for each in told[name]]
    return ReportFacts.model_validate(told)


def _unicode(text: str) -> str:
    return text.encode(errors="replace").decode()


def committed(store: Store, sources: Sequence[SourceFile], before: Mapping[str, str]) -> IngestReport:
    """Which of these files the index holds, when an ingest of them did not come to its end."""
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
