"""An environment of which LMDB follows no page, and opens no table, before that was checked.

LMDB trusts its file: a damaged page kills the process, or lets it read what is not there. docs/formats.md, "What is
checked when".
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lmdb

from ragkv.errors import CorruptStoreError, StoreError, StoreExistsError
from ragkv.store.filemap import FileMap
from ragkv.store.migration import FORMAT_VERSION
from ragkv.store.pages.file import damaged_file
from ragkv.store.pages.note import Note
from ragkv.store.pages.snapshot import PageReport, check_catalog, check_pages
from ragkv.store.transaction import ADDED, TABLES, VALUE_BYTES
from ragkv.store.translation import translated

__all__ = ["CheckedMap"]

_OLDEST = 1
_SNAPSHOTS = 100  # attempts to check a snapshot before another process's commits write over its meta page


class CheckedMap(FileMap):
    """A map with the tables of a store, and what is known of its pages."""

    def __init__(self, directory: Path, *, readonly: bool, create: bool, map_size: int) -> None:
        super().__init__(directory, readonly=readonly, create=create, map_size=map_size)
        self.format = FORMAT_VERSION
        self._noted = False
        """Whether a process that has had all pages checked left the file as this one has found it."""
        self._trusting = threading.Lock()
        try:
            with translated(self.directory):
                self._prepare(check=self._guard is not None, create=create)
        except BaseException:
            self._env.close()
            raise

    @property
    def trusted(self) -> bool:
        """Whether a write costs its own pages only: all pages were checked, or are those of a process that did."""
        with self._trusting:
            return self._guard is None or self._is_noted()

    def _trust(self) -> None:
        """Check all pages before this process first writes, unless the last writer did and left a note of it.

        Then pages are checked when they are needed, until that has cost as much as checking all.
        """
        with self._trusting:
            guard = self._guard
            if guard is not None and (not self._is_noted() or guard.read > guard.pages):
                self.check_pages(heads=False)

    def _is_noted(self) -> bool:
        if not self._noted:
            note = Note.read(self.directory)
            self._noted = note is not None and note == self._note()
        return self._noted

    def _note(self) -> Note | None:
        """What is to be noted of the newest state; None when it cannot be read."""
        self._gate.enter()
        try:
            with translated(self.directory), self._snapshot() as txn:
                return Note.of(self._data, txn.id())
        except (lmdb.Error, StoreError):  # another process grew the map, for example
            return None
        finally:
            self._gate.leave()

    def check_pages(self, *, heads: bool = True) -> PageReport:
        """Check every page that LMDB would follow, and the list of free pages; `CorruptStoreError` for damage.

        `heads`: check the heads of large values too.
        """
        while True:
            self._gate.enter()
            try:
                with translated(self.directory):
                    self._live()
                    report = self._check(free=True, heads=heads)
                    self._guard = None
                    return report
            except lmdb.MapResizedError:
                pass  # another process grew the map
            finally:
                self._gate.leave()
            self._resize(None)

    def _prepare(self, *, check: bool, create: bool) -> None:
        """Check the first pages, then open the tables: LMDB follows no page before it opens a table."""
        while True:
            try:
                if check:
                    self._check_catalog()
                self._tables = self._create_tables() if create else self._open_tables()
                return
            except lmdb.MapResizedError:  # another process grew the map since the header was read
                self._env.set_mapsize(self._data.stat().st_size)
            except lmdb.MapFullError:  # there is no room for the tables that an older format lacks
                self._resize(0)

    def _check_catalog(self) -> None:
        """Check what opening the tables needs; the rest is checked when it is needed."""
        for _ in range(_SNAPSHOTS):
            with self._snapshot() as txn:
                number = txn.id()
                try:
                    if check_catalog(self._data, number, TABLES, free=not self.readonly):
                        return
                except CorruptStoreError:
                    if self._env.info()["last_txnid"] <= number + 1:
                        raise
        raise damaged_file(self._data, "is damaged (no meta page is that of its last transaction)")

    def _check(self, *, free: bool, heads: bool = False) -> PageReport:
        """Check the pages of the newest snapshot.

        While a transaction holds a snapshot, its pages are not written over, except for its meta page. Without a lock
        table, however, no writer knows of the transaction, and two commits later all of its pages may be.
        """
        for _ in range(_SNAPSHOTS):
            with self._snapshot() as txn:
                number = txn.id()
                try:
                    report = check_pages(self._data, number, TABLES, width=VALUE_BYTES, free=free, heads=heads)
                except CorruptStoreError:
                    if self._env.info()["last_txnid"] <= number + 1:
                        raise
                    report = None
            if report is not None:
                return report
        raise damaged_file(self._data, "is damaged (no meta page is that of its last transaction)")

    def _create_tables(self) -> dict[str, Any]:
        with self._env.begin(write=True) as txn:
            tables = {name: self._table(name, txn, create=True) for name in TABLES}
            if not txn.put(b"format", b"%d" % FORMAT_VERSION, db=tables["meta"], overwrite=False):
                raise StoreExistsError(f"{self.directory} holds a store already: open it instead")
        return tables

    def _open_tables(self) -> dict[str, Any]:
        """Open the tables, and add those that an older format lacks, which `_migrate` fills.

        This takes a write transaction even if nothing changes, because py-lmdb forgets tables that were opened in a
        read transaction.
        """
        with nullcontext() if self.readonly else self._env.begin(write=True) as txn:
            try:
                version = self._version(self._table("meta", txn), txn)
            except (lmdb.NotFoundError, TypeError, ValueError) as error:
                raise CorruptStoreError(
                    f"{self.directory} is an LMDB environment, but no finished store of ragkv: "
                    "delete it and ingest again"
                ) from error
            if not _OLDEST <= version <= FORMAT_VERSION:
                raise StoreError(
                    f"{self.directory} has format {version}, and this ragkv reads formats {_OLDEST} to "
                    f"{FORMAT_VERSION}: " + ("upgrade ragkv" if version > _OLDEST else "ingest again into a new index")
                )
            self.format = version if self.readonly else FORMAT_VERSION
            later = {name for since, names in ADDED.items() if since > version for name in names}
            tables = {name: self._table(name, txn) for name in TABLES if name not in later}
        if not self.readonly and later:
            self._check(free=True)  # making a table is the first write
            self._guard = None
            with self._env.begin(write=True) as txn:
                tables |= {name: self._table(name, txn, create=True) for name in TABLES if name in later}
        return tables

    def _version(self, meta: Any, txn: Any) -> int:
        with self._env.begin() if txn is None else nullcontext(txn) as reading:
            return int(reading.get(b"format", db=meta))

    def _table(self, name: str, txn: Any, *, create: bool = False) -> Any:
        several = TABLES[name]
        return self._env.open_db(name.encode(), txn=txn, create=create, dupsort=several, dupfixed=several)
