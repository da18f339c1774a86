"""Take back the making of an index in which nothing was stored, without touching anything that was there before."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ragkv.boundary.plainfile import remove_tree
from ragkv.config import CONFIG_FILE, NEW_CONFIG_FILE
from ragkv.errors import RagkvError
from ragkv.store import STORE_FILES, Store
from ragkv.store.lock import LOCK_FILE, WriterLock

__all__ = ["Footprint"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What an index at `folder` would add: `files` of its own and `folders`, which are not there yet."""

    folder: Path
    files: tuple[Path, ...]
    folders: tuple[Path, ...]

    @classmethod
    def of(cls, folder: Path) -> Footprint:
        """Look before the index is made."""
        store = folder / "store"
        names = sorted(STORE_FILES - {LOCK_FILE})
        # In this order, so that what a killed removal leaves is an index or can become one. The lock goes last.
        files = (folder / "derived", folder / NEW_CONFIG_FILE, folder / CONFIG_FILE, *(store / name for name in names))
        return cls(
            folder,
            tuple(path for path in (*files, store / LOCK_FILE) if not path.exists()),
            tuple(path for path in (store, folder, *folder.parents) if not path.exists()),
        )

    def remove(self) -> bool:
        """Delete what was added, if nothing is stored in it and nobody else writes to it; whether that was done.

        Folders go only when they are empty. Who waits to write to the index is told that there is none.
        """
        store = self.folder / "store"
        if not store.is_dir():
            self._remove_folders()
            return False
        try:
            with WriterLock(store).hold("removing an index in which nothing was stored", timeout=0):
                if (self.folder / CONFIG_FILE).exists() and not _is_blank(self.folder):
                    return False
                for path in self.files:
                    remove_tree(path)
                self._remove_folders()
        except (RagkvError, OSError) as error:
            logger.info("%s is left as it is: %s", self.folder, error)
            return False
        return True

    def _remove_folders(self) -> None:
        for path in self.folders:
            with suppress(OSError):  # somebody else has put something there, or it was never made
                path.rmdir()


def _is_blank(folder: Path) -> bool:
    """Whether the index holds neither a document nor KV of a document that an interrupted ingest had begun."""
    with Store.open(folder, readonly=True) as store:
        return store.empty and next(store.orphans(), None) is None
