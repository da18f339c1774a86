"""What an ingest would do, found out without a model and without writing anything.

The ingest itself decides by the same functions which files changed, which are unreadable and which are gone.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.errors import IngestError
from ragkv.ingest.isolated import SourceReader
from ragkv.ingest.limit import Limits
from ragkv.ingest.reader import SourceText, UnreadableSource
from ragkv.ingest.report import IngestReport
from ragkv.ingest.source import Skipped, SourceFile, find_sources, os_reason

if TYPE_CHECKING:  # the process that reads files imports this package, and needs no torch
    from ragkv.store import Store

__all__ = ["changed_text", "gone", "nothing_read", "preview", "require_readable", "skip_unreadable"]


def preview(
    store: Store | None,
    recipe: str,
    paths: Sequence[Path | SourceFile],
    *,
    prune: bool = False,
    limits: Limits | None = None,
) -> IngestReport:
    """The report of an ingest with `recipe` (`Recipe.digest`) into `store` (None: into an index yet to be made).

    Changed files are read, so that unreadable ones are reported now and not later. Nothing is chunked or encoded.
    Raises UsageError for a missing path.
    """
    started = time.perf_counter()
    report = IngestReport(dry_run=True)
    sources, skipped = find_sources(paths)
    report.skipped += skipped
    with SourceReader(limits) as reader:
        for source in sources:
            with skip_unreadable(source, report):
                text = changed_text(source, reader, store, recipe, report)
                if text is None:
                    continue
                report.left_out += [Skipped(path=source.path, reason=part) for part in text.left_out]
                known = store is not None and store.document(source.document_id) is not None
                (report.updated if known else report.added).append(source.document_id)
    if prune and store is not None:
        report.pruned = gone(store, paths, sources, report.skipped)
    report.seconds = time.perf_counter() - started
    return report


@contextmanager
def skip_unreadable(source: SourceFile, report: IngestReport) -> Iterator[None]:
    """Leave the `with` block when the source cannot be read, and say so in the report."""
    try:
        yield
    except UnreadableSource as error:
        report.skipped.append(Skipped(path=source.path, reason=error.reason))
    except OSError as error:
        report.skipped.append(Skipped(path=source.path, reason=os_reason(error)))


def changed_text(
    source: SourceFile, reader: SourceReader, store: Store | None, recipe: str, report: IngestReport
) -> SourceText | None:
    """Read a source that the store does not hold in this version; None, noted in the report, if it does.

    Raises UnreadableSource, or OSError as reading the file raises it.
    """
    reader.check(source)  # before it is hashed: a file beyond the limit may be endless
    if store is not None and _is_current(store, source, recipe):
        report.unchanged.append(source.document_id)
        return None
    return reader.read(source)


def require_readable(paths: Sequence[Path | SourceFile], *, limits: Limits | None = None) -> None:
    """Raise IngestError if none of the documents can be read, before an index is made for them.

    Reading stops at the first document that can be read. Raises UsageError for a missing path.
    """
    report = IngestReport()
    sources, report.skipped = find_sources(paths)
    with SourceReader(limits) as reader:
        for source in sources:
            with skip_unreadable(source, report):
                reader.read(source)
                return
    raise nothing_read(report.skipped)


def nothing_read(skipped: Sequence[Skipped]) -> IngestError:
    """The error for an ingest that found no document to read, with the first reasons."""
    reasons = "; ".join(f"{skip.path}: {skip.reason}" for skip in skipped[:3])
    return IngestError(f"Nothing to ingest: {reasons or 'no supported files found'}.", skipped)


def _is_current(store: Store, source: SourceFile, recipe: str) -> bool:
    """Whether the store holds this content, read as the same media type. OSError if the file cannot be hashed."""
    if not store.is_current(source.document_id, source.digest(), recipe):
        return False
    stored = store.document(source.document_id)
    return stored is not None and stored.document.media_type == source.media_type


def gone(
    store: Store, paths: Sequence[Path | SourceFile], sources: Collection[SourceFile], skipped: Collection[Skipped]
) -> list[str]:
    """The documents that an earlier ingest found under the given folders and that are no longer there.

    If a folder could not be listed, its documents stay: they may still be in it.
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
