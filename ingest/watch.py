"""Keep an index in sync with its folders: find their changes, and wait for the next one.

A walk over the folders finds the changes by comparing each file's size, times and inode with those of the last walk.
Notifications (watchfiles) only trigger a walk. So a lost notification, or a file system without notifications, delays a
change by at most `WALK_TICKS` seconds but loses none. Without notifications the folders are walked every
`POLL_SECONDS`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragkv.ingest.ingester import missing_sources
from ragkv.ingest.source import Skipped, SourceFile, find_sources, leads_to_folder
from ragkv.store import Store
from ragkv.util import batches

WALK_TICKS = 60  # seconds without a notification after which the folders are walked anyway
POLL_SECONDS = 5.0
SETTLE_MILLISECONDS = 300  # without a change, before a group of changes is complete
LONGEST_MILLISECONDS = 5000  # of a group of changes
MAX_TOGETHER = 500
"""Files, or documents to delete, in one call of `apply`."""
_RACY = 2_000_000_000
"""Nanoseconds: a file that changed this recently before a walk may change again and keep its times."""
_AHEAD = 86_400_000_000_000
"""Nanoseconds: a file that is dated further ahead was dated by hand, and not by a clock that will reach this time."""


@dataclass(slots=True, kw_only=True)
class FolderChanges:
    """New and changed files, documents whose files are gone, and paths that are newly left out."""

    sources: Sequence[SourceFile] = ()
    gone: Sequence[str] = ()
    skipped: Sequence[Skipped] = ()


class FolderWatcher:
    """Follows folders for one index. `prune` deletes the documents whose files are gone, except if their whole folder
    is gone or empty: it may be a disk that is not mounted.

    `is_current` says whether the index holds a file with this digest. Files beyond `largest` bytes are not hashed.
    `notify` gets sentences about folders that are gone and notifications that fail.
    """

    def __init__(
        self,
        folders: Iterable[Path],
        store: Store,
        is_current: Callable[[SourceFile, str], bool],
        *,
        prune: bool = False,
        largest: int,
        notify: Callable[[str], object],
    ) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._store = store
        self._is_current = is_current
        self._prune = prune
        self._largest = largest
        self._notify = notify
        self._notified: set[str] = set()
        self._last: dict[str, tuple[tuple[int, ...], bool, str]] | None = None
        """The last walk: document id -> (times, whether they are settled, digest). An unsettled file is read again."""
        self._skipped: frozenset[Skipped] = frozenset()
        self._unmounted = False
        self._polling = False

    def follow(self, apply: Callable[[FolderChanges], bool], stop: threading.Event) -> None:
        """Call `apply` with the changes, at once and after each group of changes, until `stop` is set.

        If `apply` returns False, the index does not hold these changes; the next walk finds them again.
        """
        for _ in self._ticks(stop):
            changes, files, skipped = self._walk()
            parts = [FolderChanges(sources=some) for some in batches(changes.sources, lambda _: 1, MAX_TOGETHER)]
            parts += [FolderChanges(gone=some) for some in batches(changes.gone, lambda _: 1, MAX_TOGETHER)]
            if changes.skipped:
                parts = parts or [FolderChanges()]
                parts[-1].skipped = changes.skipped
            if all(apply(part) for part in parts if not stop.is_set()) and not stop.is_set():
                self._last, self._skipped = files, skipped

    def _walk(self) -> tuple[FolderChanges, dict[str, tuple[tuple[int, ...], bool, str]], frozenset[Skipped]]:
        began = time.time_ns()
        present = [folder for folder in self._folders if leads_to_folder(folder, denied=False)]
        sources, skipped = find_sources(present)
        files: dict[str, tuple[tuple[int, ...], bool, str]] = {}
        changed = []
        for source in sources:
            known = (self._last or {}).get(source.document_id)
            try:
                status = source.path.stat()
            except OSError:  # gone meanwhile, as the next walk finds
                files[source.document_id] = ((), False, "")
                continue
            times = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, *self._above(source.path))
            if known is not None and known[:2] == (times, True):
                files[source.document_id] = known
                continue
            try:
                digest = source.digest() if status.st_size <= self._largest else str(times)
            except OSError as error:
                digest = str(error)
            dated = 0 if status.st_mtime_ns > began + _AHEAD else status.st_mtime_ns
            files[source.document_id] = (times, max(dated, status.st_ctime_ns) < began - _RACY, digest)
            # A file that was rewritten and now looks unchanged may have been ingested in between.
            same = known is not None and (known[0], known[2]) == (times, digest)
            if not same and not self._is_current(source, digest):
                changed.append(source)
        gone = self._gone(present, sources, skipped) if self._prune else []
        for folder in () if self._prune else self._folders:
            self._say(folder not in present, f"{folder} does not exist; its files are ingested once it does.")
        fresh = [skip for skip in skipped if skip not in self._skipped]
        return FolderChanges(sources=changed, gone=gone, skipped=fresh), files, frozenset(skipped)

    def _gone(self, present: Sequence[Path], sources: Sequence[SourceFile], skipped: Sequence[Skipped]) -> list[str]:
        """The documents to delete; the index is searched for them if something of the last walk is gone."""
        present_ids = {source.document_id for source in sources}
        if self._last is not None and not self._unmounted and self._last.keys() <= present_ids:
            return []
        filled = [folder for folder in present if any(source.path.is_relative_to(folder) for source in sources)]
        self._unmounted = len(filled) < len(self._folders)
        for folder in self._folders:
            self._say(
                folder not in filled,
                f"{folder} {'is empty' if folder in present else 'is gone'}: its documents stay, because it may be a "
                "disk that is not mounted; ragkv delete deletes them.",
            )
        return missing_sources(self._store, filled, sources, skipped)

    def _say(self, holds: bool, sentence: str) -> None:
        """Notify of a sentence once, while it holds."""
        if holds and sentence not in self._notified:
            self._notify(sentence)
        (self._notified.add if holds else self._notified.discard)(sentence)

    def _ticks(self, stop: threading.Event) -> Iterator[None]:
        """Yields when it is time to walk; first once the folders are watched, so that no change is missed."""
        while not stop.is_set():
            inodes = {folder: _inode(folder) for folder in self._folders}
            there = [folder for folder, inode in inodes.items() if inode]
            if self._polling or not there:
                yield
                stop.wait(POLL_SECONDS if self._polling else 1)
                continue
            try:
                from watchfiles import watch

                changes = watch(
                    *there,
                    watch_filter=lambda _, path: self._matters(Path(path)),
                    step=SETTLE_MILLISECONDS,
                    debounce=LONGEST_MILLISECONDS,
                    stop_event=stop,
                    rust_timeout=1000,
                    yield_on_timeout=True,
                    ignore_permission_denied=True,
                )
                for tick, some in enumerate(changes):
                    replaced = any(_inode(folder) != inode for folder, inode in inodes.items())
                    if some or replaced or tick % WALK_TICKS == 0:
                        yield
                    if replaced:
                        break
            except (ImportError, OSError, RuntimeError) as error:  # the system's limit, or watchfiles' own error
                reason = "watchfiles is not installed" if isinstance(error, ImportError) else str(error).rstrip(".")
                self._polling = True
                self._notify(f"No notifications of changes ({reason}): checking every {POLL_SECONDS:.0f} seconds.")

    def _matters(self, path: Path) -> bool:
        """Whether a walk may find something at this path: it is not hidden, and not in an index."""
        folder = next((folder for folder in self._folders if path.is_relative_to(folder)), None)
        if folder is None:
            return True
        below = path.relative_to(folder)
        try:
            return not any(part.startswith(".") for part in below.parts) and not any(
                (folder / parent / "store" / "data.mdb").is_file() for parent in [*below.parents][:-1]
            )
        except OSError:
            return True  # a walk finds what may not be looked at

    def _above(self, path: Path) -> Iterator[int]:
        """When the folders around a file, up to the watched one, were renamed; 0 for one that has got or lost a name
        since. One may be moved away and back while its files are ingested: they were missing, and look unchanged.
        """
        for folder in path.parents:
            try:
                status = folder.stat()
            except OSError:
                return
            yield status.st_ctime_ns if status.st_ctime_ns != status.st_mtime_ns else 0
            if folder in self._folders:
                return


def _inode(folder: Path) -> tuple[int, int] | None:
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
