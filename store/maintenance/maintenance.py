"""What looks after a store: verification, repair, garbage collection and copies (docs/operations.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from ragkv.errors import StoreError
from ragkv.store.codecs import Codec
from ragkv.store.data_file import give_back
from ragkv.store.environment import Database
from ragkv.store.maintenance.eviction import forget_gone
from ragkv.store.maintenance.repair import Repair, RepairSource, repair
from ragkv.store.maintenance.space import Collection, collect, copy_store, needed_models, orphans
from ragkv.store.maintenance.verify import Notify, Verification, verify
from ragkv.store.record import Manifest


class Maintenance:
    """The maintenance of one open store; get it from `Store.maintenance`."""

    def __init__(self, database: Database, codec: Codec, refuse_readonly: Callable[[], None]) -> None:
        self._database = database
        self._codec = codec
        self._refuse_readonly = refuse_readonly

    def verify(self, *, quick: bool = False, on_progress: Notify | None = None) -> Verification:
        """Check every row, checksum and reference, while others read and write; `quick` leaves out the slow checks
        (`Verification.unchecked`)."""
        return verify(self._database, quick=quick, on_progress=on_progress)

    def repair(
        self,
        repair_source: RepairSource,
        *,
        encode: bool = True,
        dry_run: bool = False,
        on_progress: Notify | None = None,
    ) -> Repair:
        """Repair what `verify` finds; with `encode=False`, bad KV is dropped, and encoded again when it is needed."""
        if not dry_run:
            self._refuse_readonly()
        return repair(
            self._database, repair_source, self._codec, encode=encode, dry_run=dry_run, on_progress=on_progress
        )

    def collect(
        self, *, in_use: Callable[[Manifest], bool], dry_run: bool = False, on_progress: Notify | None = None
    ) -> Collection:
        """Drop KV that nothing needs, and the index's own KV that is not `in_use`; no ingest may run meanwhile."""
        if not dry_run:
            self._refuse_readonly()
        collection = collect(self._database, in_use=in_use, dry_run=dry_run, on_progress=on_progress)
        collection.uses = forget_gone(self._database, dry_run=dry_run)
        return collection

    def copy(self, path: Path | str, *, compact: bool = False, on_progress: Notify | None = None) -> int:
        """Copy one snapshot to a new store in the index at `path`, which must have none; returns its bytes."""
        directory = Path(path) / "store"
        try:
            directory.mkdir(parents=True)
        except FileExistsError as error:
            raise StoreError(f"{path} has a store already: name a folder that has none") from error
        except OSError as error:
            raise StoreError(f"{directory} cannot be made ({error.strerror})") from error
        return copy_store(self._database, directory, compact=compact, on_progress=on_progress)

    def orphans(self) -> Iterator[bytes]:
        """Keys of the records that no chunk needs."""
        return orphans(self._database)

    def models(self) -> set[str]:
        """Fingerprints of the models that made the KV that chunks need."""
        return needed_models(self._database)

    def give_back_pages(self) -> int:
        """Release the memory of the store's pages that this process has read; they are mapped again when needed."""
        return give_back(self._database.directory / "data.mdb")
