"""The folder `jobs/` of an index: what its ingest jobs have come to, and uploaded files until they are ingested.

`journal.json` is replaced as a whole, so that a server which is killed leaves the last state of each job. Whoever
serves the index holds `lock`; the system lets go of it when that process ends. Backups leave the folder out.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from ragkv.boundary.plainfile import make_folder, open_plain, parse_json, read_plain, remove_tree, replace_plain
from ragkv.errors import StoreAccessError, StoreError, StoreFullError
from ragkv.ingest import SourceFile, supplied
from ragkv.server.failure import Refusal
from ragkv.server.ingestjob import IngestJob

__all__ = ["JobFolder"]

FORMAT = 1
_MOST_BYTES = 16 << 20

logger = logging.getLogger(__name__)


class JobFolder:
    """The jobs of the index in `folder`. Refusal 409 when another server has it; StoreError when it cannot be used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "jobs"
        try:
            make_folder(self._folder)
            self._lock = open_plain(self._folder / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise refused(self._folder, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            said = "Another server adds documents to this index: send them to that one, or stop it."
            raise Refusal(409, said, code="served_elsewhere") from error

    def close(self) -> None:
        os.close(self._lock)

    def read(self) -> list[IngestJob]:
        """The jobs as they were last saved; none, with a line in the log, when the journal cannot be read."""
        path = self._folder / "journal.json"
        try:
            found = parse_json(read_plain(path, limit=_MOST_BYTES))
            if found["format"] != FORMAT:
                raise ValueError("its format is another")
            return [IngestJob.of_row(row) for row in found["jobs"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("%s is not used, and will be written anew: %s", path, type(error).__name__)
            return []

    def save(self, jobs: Sequence[IngestJob]) -> None:
        """Keep the state of these jobs; StoreError when it cannot be written."""
        content = json.dumps({"format": FORMAT, "jobs": [job.row() for job in jobs]}).encode()
        try:
            replace_plain(self._folder / "journal.json", content)
        except OSError as error:
            raise refused(self._folder, error) from error

    def make(self, identifier: str) -> Path:
        """A new folder for a job's files."""
        try:
            (path := self._folder / identifier).mkdir(mode=0o700)
        except OSError as error:
            raise refused(self._folder, error) from error
        return path

    def kept(self, job: IngestJob) -> list[SourceFile]:
        """The job's files that are still there: their names are numbers, in the order of `files`."""
        places = [self._folder / job.facts.id / str(number) for number in range(len(job.facts.files))]
        named = zip(places, job.facts.files, strict=True)
        return [supplied(place, name=name) for place, name in named if place.is_file() and not place.is_symlink()]

    def drop(self, identifier: str) -> None:
        """Delete a job's files."""
        try:
            remove_tree(self._folder / identifier)
        except OSError as error:
            logger.warning("uploaded files in %s cannot be deleted: %s", self._folder, error.strerror)

    def sweep(self) -> None:
        """Delete all uploaded files, and what a killed server was writing."""
        try:
            found = list(self._folder.iterdir())
        except OSError as error:  # somebody has deleted the index
            logger.warning("uploaded files in %s cannot be deleted: %s", self._folder, error.strerror)
            return
        for path in found:
            if path.name not in ("lock", "journal.json"):
                self.drop(path.name)


def refused(folder: Path, error: OSError) -> StoreError:
    """The sentence for a folder of an index that the system does not let us write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(f"The disk or quota under {folder} is full: make room and try again.")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return StoreAccessError(f"{folder} may not be written by the server ({error.strerror}).")
    return StoreError(f"{folder} cannot be written ({error.strerror}): delete it, and try again.")
