"""What an ingest would do, found out without a model and without writing anything."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.errors import IngestError
from ragkv.ingest.isolated import SourceReader
from ragkv.ingest.limit import Limits
from ragkv.ingest.reader import UnreadableSource
from ragkv.ingest.report import IngestReport
from ragkv.ingest.source import Skipped, SourceFile, find_sources

if TYPE_CHECKING:  # the process that reads files imports this package, and needs no torch
    from ragkv.store import Store

__all__ = ["gone", "is_current", "nothing_read", "preview", "require_readable"]


def preview(
    store: Store | None,
    recipe: str,
    paths: Sequence[Path | SourceFile],
    *,
    prune: bool = False,
    limits: Limits | None = None,
) -> IngestReport:
    """The report of an ingest by `recipe` (`Recipe.digest`) into `store` (None: into an index still to be made).

    Changed files are read, so that a file which cannot be is found now and not later; nothing is chunked or encoded.
    Raises UsageError for a missing path.
    """
    started = time.perf_counter()
    report = IngestReport(dry_run=True)
    sources, skipped = find_sources(paths)
    report.skipped += skipped
    with SourceReader(limits) as reader:
        for source in sources:
            try:
                reader.check(source)
                if store is not None and is_current(store, source, recipe):
                    report.unchanged.append(source.document_id)
                    continue
                text = reader.read(source)
            except UnreadableSource as error:
                report.skipped.append(Skipped(path=source.path, reason=error.reason))
                continue
            except OSError as error:
                report.skipped.append(Skipped(path=source.path, reason=(error.strerror or str(error)).lower()))
                continue
            report.left_out += [Skipped(path=source.path, reason=part) for part in text.left_out]
            known = store is not None and store.document(source.document_id) is not None
            (report.updated if known else report.added).append(source.document_id)
    if prune and store is not None:
        report.pruned = gone(store, paths, sources, report.skipped)
    report.seconds = time.perf_counter() - started
    return report


def require_readable(paths: Sequence[Path | SourceFile], *, limits: Limits | None = None) -> None:
    """Refuse what holds no readable document at all (IngestError), before an index is made for it.

    Reads no further than the first document that can be read. Raises UsageError for a missing path.
    """
    sources, skipped = find_sources(paths)
    with SourceReader(limits) as reader:
        for source in sources:
            try:
                reader.read(source)
            except UnreadableSource as error:
                skipped.append(Skipped(path=source.path, reason=error.reason))
            else:
                return
    raise nothing_read(skipped)


def nothing_read(skipped: Sequence[Skipped]) -> IngestError:
    """What is said when no document could be read."""
    reasons = "; ".join(f"{skip.path}: {skip.reason}" for skip in skipped[:3])
    return IngestError(f"Nothing to ingest: {reasons or 'no supported files found'}.")


def is_current(store: Store, source: SourceFile, recipe: str) -> bool:
    """Whether the store has this source as it is, read as what it is called now. OSError when it cannot be read."""
    if not store.is_current(source.document_id, source.digest(), recipe):
        return False
    stored = store.document(source.document_id)
    return stored is not None and stored.document.media_type == source.media_type


def gone(
    store: Store, paths: Sequence[Path | SourceFile], sources: Collection[SourceFile], skipped: Collection[Skipped]
) -> list[str]:
    """Documents that lie under the given folders and are no longer found there.

    A folder that could not be listed says nothing about what is in it: its documents stay.
    """
    found = {source.document_id for source in sources}
    roots = [path.resolve() for path in paths if isinstance(path, Path) and path.is_dir()]
    closed = [skip.path for skip in skipped if skip.path.is_dir()]
    return [
        document_id
        for stored in store.documents()
        if (document_id := stored.document.document_id) not in found
        and any(Path(document_id).is_relative_to(root) for root in roots)
        and not any(Path(document_id).is_relative_to(folder) for folder in closed)
    ]
