"""Looking after an index: what it holds, whether it is sound, copies of it (docs/operations.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from ragkv.errors import UsageError
from ragkv.index.finder import Finder
from ragkv.index.index import Index
from ragkv.index.inspection import DocumentPage, list_documents, select
from ragkv.index.recall import Recall
from ragkv.index.selection import match
from ragkv.index.task import Asked
from ragkv.index.upkeep import collect_index, copy_index, delete_document, repair_index, verify_index
from ragkv.index.warming import Wanted, Warming, of_documents, of_questions, of_the_most_used, warm
from ragkv.store import (
    Collection,
    Copy,
    DocumentStats,
    Holder,
    MemoryUse,
    Notify,
    Repair,
    Store,
    StoredDocument,
    StoreStats,
    Verification,
)

__all__ = ["Care"]


class Care:
    """The part of `RagKV` that looks after an index. What writes takes the writer's lock: it waits for another that
    has it, `timeout` seconds at most, and tells `on_wait` for whom."""

    index: Index
    recall: Recall
    _finder: Finder

    @property
    def store(self) -> Store:
        """The documents and KV themselves, for those who look after an index rather than ask it."""
        return self.index.store

    def stats(self) -> StoreStats:
        """Counts and sizes of the store."""
        return self.store.stats()

    def document_stats(self) -> list[DocumentStats]:
        """Each document's part of the store, in the order of their ids."""
        return list(self.store.document_stats())

    def memory_use(self) -> MemoryUse:
        """What this process keeps of the index's KV in memory, and how often that was of use; loads the model."""
        return self.recall.memory().use()

    def select(self, names: Sequence[str] = (), where: Sequence[str] = ()) -> list[StoredDocument]:
        """The documents that `names` mean and that meet the conditions `where`, without names all that do.

        UsageError for a name that means no document or, unasked, several, and if no document meets `where`.
        """
        return select(self.store, names, where) if names else self._finder.documents(where)

    def list_documents(
        self, names: Sequence[str] = (), where: Sequence[str] = (), *, after: str = "", limit: int | None = None
    ) -> DocumentPage:
        """What `select` gives, with the sizes, page by page: at most `limit` documents behind the id `after`.

        `after` may also name one document as `match` does; the id of one that is gone still has its place.
        """
        if after and self.store.document(after) is None:
            with suppress(UsageError):
                found = self.match([after])
                after = found[0].document.document_id if len(found) == 1 else after
        chosen = self.select(names, where) if names or where else None
        return list_documents(self.store, chosen, after=after, limit=limit)

    def match(self, names: Sequence[str]) -> list[StoredDocument]:
        """The documents that ids, source names, paths or patterns mean; UsageError for none or, unasked, several."""
        return match(list(self.store.documents()), names)

    def delete(
        self, document_id: str, *, timeout: float | None = None, on_wait: Callable[[Holder], None] | None = None
    ) -> bool:
        """Drop a document and what only it needed, and hide it in the retrieval indexes; False when there is none."""
        return bool(self.delete_many([document_id], timeout=timeout, on_wait=on_wait))

    def delete_many(
        self,
        document_ids: Sequence[str],
        *,
        timeout: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
    ) -> list[str]:
        """`delete` of several, each in a transaction of its own; returns the ids of those that there were."""
        with self.store.writing("ragkv delete", timeout=timeout, on_wait=on_wait):
            gone = [document_id for document_id in document_ids if delete_document(self.index, document_id)]
            self._finder.catch_up(build=False)
            return gone

    def wanted(
        self,
        *,
        questions: Iterable[str | Asked] = (),
        documents: Sequence[str] | None = None,
        where: Sequence[str] = (),
        most: int | None = None,
        on_question: Callable[[int], None] = lambda done: None,
    ) -> Wanted:
        """The KV that is worth making ahead (`warm`): what `questions` would read (`on_question` is told how many were
        searched for), the chunks of `documents` (names or patterns; with `where`, those that meet it), or the `most`
        chunks that were read most.

        Raises UsageError for a wrong option, or a name that means no document.
        """
        if most is not None:
            return of_the_most_used(self.index, self.recall, most, self.index.encodings)
        if documents is not None:
            return of_documents(self.index, self.recall, self.select(documents, where), self.index.encodings)
        return of_questions(self.index, self.recall, self._finder, questions, on_question)

    def warm(self, wanted: Wanted, *, on_progress: Callable[[Warming], None] | None = None) -> Warming:
        """Make what is missing of this KV, within the index's budget; StoreError when it cannot be written."""
        return warm(self.index, self.recall, wanted, on_progress or (lambda done: None))

    def settle(self) -> None:
        """Wait until everything that questions have computed is stored, and what they used is recorded."""
        self.index.keeper.settle(whole=True)

    def verify(self, *, quick: bool = False, on_progress: Notify | None = None) -> Verification:
        """Check every row, checksum and reference; `quick` leaves out the payloads of KV."""
        return verify_index(self.index, quick=quick, on_progress=on_progress)

    def repair(
        self,
        *,
        encode: bool = True,
        dry_run: bool = False,
        timeout: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
        on_progress: Notify | None = None,
    ) -> Repair:
        """Put right what `verify` finds; the model is loaded when KV has to be made again.

        `encode=False` drops bad KV, which the first question that asks for it makes again.
        """
        with nullcontext() if dry_run else self.store.writing("ragkv repair", timeout=timeout, on_wait=on_wait):
            report = repair_index(self.index, self.recall, encode=encode, dry_run=dry_run, on_progress=on_progress)
            if not dry_run:
                self._finder.catch_up(build=False)
            return report

    def gc(
        self,
        *,
        dry_run: bool = False,
        timeout: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
        on_progress: Notify | None = None,
    ) -> Collection:
        """Drop what nothing needs: orphan KV, old prefixes' KV, stale derived files.

        Only while no ingest runs: until its document is complete, what it has staged looks like garbage.
        """
        with nullcontext() if dry_run else self.store.writing("ragkv gc", timeout=timeout, on_wait=on_wait):
            return collect_index(self.index, dry_run=dry_run, on_progress=on_progress)

    def backup(self, path: str | Path, *, verify: bool = False, on_progress: Notify | None = None) -> Copy:
        """A copy of the index at `path`, of one moment, while others read and write."""
        return copy_index(self.index, Path(path), compact=False, verify=verify, on_progress=on_progress)

    def compact(self, path: str | Path, *, verify: bool = False, on_progress: Notify | None = None) -> Copy:
        """As `backup`, without free pages: smaller, and rid of what was deleted."""
        return copy_index(self.index, Path(path), compact=True, verify=verify, on_progress=on_progress)
