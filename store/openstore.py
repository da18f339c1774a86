"""What every part of a store needs: the environment, the writer's lock, and to be closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar

from ragkv.errors import StoreAccessError, StoreError
from ragkv.store.codec import Codec
from ragkv.store.database import Database
from ragkv.store.format.identity import KVIdentity
from ragkv.store.format.record import EncodedRecord
from ragkv.store.lock import Holder, WriterLock
from ragkv.store.transaction import Transaction
from ragkv.store.upkeep.eviction import Evictor

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV

__all__ = ["KVRecords", "OpenStore"]

T = TypeVar("T")
KVRecords: TypeAlias = "Iterable[tuple[KVIdentity, ChunkKV]]"


class OpenStore:
    """An open environment with the codec for new records, until `close`; a context manager."""

    def __init__(self, database: Database, *, readonly: bool | None, codec: Codec) -> None:
        self._database: Database | None = database
        self._forced = readonly is None
        self._lock = WriterLock(database.directory)
        self._evictor = Evictor(database)
        self.readonly = database.readonly if readonly is None else readonly
        self.codec = codec
        self.directory = database.directory

    def close(self) -> None:
        """Release the environment. It is safe to call this again."""
        if self._database is not None:
            self._database.release()
            self._database = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def writing(
        self, command: str, *, timeout: float | None = None, on_wait: Callable[[Holder], None] | None = None
    ) -> Iterator[None]:
        """Hold the writer's lock, which one long job at a time can have, across threads and processes.

        Hold it for work that takes more than one transaction, from the first look at the store to the last commit:
        `with store.writing("ragkv gc", timeout=0): ...`. A thread may nest it. `command` names the job to those who
        wait; for the other parameters see `WriterLock.hold`. A single transaction neither needs the lock nor waits for
        it.
        """
        self._refuse_readonly()
        with self._lock.hold(command, timeout=timeout, on_wait=on_wait):
            yield

    def writer(self) -> Holder | None:
        """The process that holds the writer's lock now."""
        return self._lock.holder()

    def _live(self) -> Database:
        if self._database is None:
            raise StoreError(f"{self.directory} is closed: open it again")
        return self._database

    def _refuse_readonly(self) -> None:
        if self.readonly and self._forced:
            raise StoreAccessError(f"{self.directory} may not be written by you: it was opened read-only")
        if self.readonly:
            raise StoreError(f"{self.directory} is open read-only: open it with readonly=False to change it")

    def _write(self, apply: Callable[[Transaction], T], *, need: int = 0) -> T:
        self._refuse_readonly()
        return self._live().write(apply, need=need)

    def _encode(self, records: KVRecords) -> Iterator[EncodedRecord]:
        from ragkv.store.format.encode import encode_record

        return (encode_record(kv, identity, self.codec) for identity, kv in records)
