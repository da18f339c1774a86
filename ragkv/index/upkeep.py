"""Maintain an index: verify, repair, collect garbage, copy, delete.

The store does this for rows and checksums. This module adds what surrounds the store: the model and recipe that make
lost KV again, the retrieval indexes that are derived from it, and the configuration that makes a folder an index.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.boundary.plainfile import read_plain, remove_tree, write_plain
from ragkv.config import CONFIG_FILE
from ragkv.errors import StoreError, StoreFullError, UsageError
from ragkv.index.derived import derived_states, stale_derived
from ragkv.index.fact import damaged_facts, read_fact
from ragkv.index.index import Index
from ragkv.index.mode import indexes_of
from ragkv.index.recall import Recall
from ragkv.ingest import chunk_vectors, encode_identities, find_chunk
from ragkv.store import (
    Collection,
    Copy,
    KVIdentity,
    Manifest,
    Notify,
    Repair,
    Store,
    Verification,
    sync_path,
)
from ragkv.types import Chunk, Document

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.store import ChunkVectors

__all__ = ["collect_index", "copy_index", "delete_document", "repair_index", "verify_index"]

logger = logging.getLogger(__name__)


class IndexMender:
    """Makes lost data again for `Store.repair`; the model is loaded only when something has to be encoded."""

    def __init__(self, index: Index, recall: Recall) -> None:
        self._index = index
        self._recall = recall

    def find_chunk(
        self, document: Document, text: str, ordinal: int, low: int, high: int, known: Callable[[str], bool]
    ) -> tuple[str, int, int] | None:
        return find_chunk(document, text, ordinal, low, high, known)

    def tokens(self, text: str) -> tuple[int, ...]:
        return self._index.prompt.chunk_ids(self._index.model.tokens, text)

    def identities(self, chunk: Chunk) -> list[KVIdentity]:
        if not self._index.knows(chunk.token_ids):
            return []  # the model has no KV for tokens that are not its own
        _ = self._index.shape  # records the model's true shape first, so that what is made now does not contradict it
        return [self._recall.identity(encoding, chunk.token_ids) for encoding in self._index.encodings]

    def encode(self, identities: Sequence[KVIdentity]) -> list[ChunkKV]:
        """The KV of each identity, in their order."""
        made = encode_identities(self._index.model, identities, self._recall.prefix)
        return [made[identity] for identity in identities]

    def embed(self, chunks: Sequence[Chunk]) -> Mapping[str, ChunkVectors] | None:
        """The chunks' vectors, as an ingest makes them; None for an index without an embedder."""
        embedder = self._index.encoders.embedder
        return None if embedder is None else chunk_vectors(embedder, chunks, self._index.config.vectors)


def verify_index(index: Index, *, quick: bool, on_progress: Notify | None) -> Verification:
    """Verify the store and the facts in it, and say whether the retrieval indexes are up to date."""
    store = index.store
    found = store.verify(quick=quick, on_progress=on_progress)
    found = replace(found, findings=(*damaged_facts(store), *found.findings))
    needed = indexes_of(index.config.retrieval, index.config.vectors)
    return replace(found, derived=derived_states(index.derived, needed, store.generation))


def repair_index(index: Index, recall: Recall, *, encode: bool, dry_run: bool, on_progress: Notify | None) -> Repair:
    """Repair the store; if the name of the model that made the chunks was lost, find it in the KV and record it."""
    store = index.store
    facts = damaged_facts(store)
    for finding in () if dry_run else facts:
        store.drop_meta(finding.key.removeprefix(b"fact/").decode())
    report = store.repair(IndexMender(index, recall), encode=encode, dry_run=dry_run, on_progress=on_progress)
    report.found = (*facts, *report.found)
    report.facts += [finding.key.removeprefix(b"fact/").decode() for finding in facts]
    if "model" in report.facts and not dry_run:
        # If the KV comes from several models, "unknown" makes every question refuse to read the index.
        models = store.models()
        fingerprint = models.pop() if len(models) == 1 else "unknown"
        store.put_meta("model", {"name": index.config.model, "fingerprint": fingerprint})
    return report


def collect_index(index: Index, *, dry_run: bool, on_progress: Notify | None) -> Collection:
    """Delete the garbage of the store, and outdated retrieval indexes under `derived/`."""
    store = index.store
    prompt = read_fact(store, "prompt")
    wanted = None
    if prompt is not None and "prefix_ids" in prompt and "model" in prompt:
        wanted = (prompt["model"], tuple(prompt["prefix_ids"]))

    def in_use(manifest: Manifest) -> bool:
        """Whether the record is the prefix of the current prompt; if the index does not name one, keep all."""
        return wanted is None or wanted == (manifest.identity.model, manifest.identity.chunk_ids)

    derived, derived_bytes = 0, 0
    # first, because it frees space on a full disk
    for path in stale_derived(index.derived, lambda since: store.changes(since) is not None):
        derived, derived_bytes = derived + 1, derived_bytes + _weight(path)
        if not dry_run:
            remove_tree(path)
    found = store.collect(in_use=in_use, dry_run=dry_run, on_progress=on_progress)
    found.derived, found.derived_bytes = derived, derived_bytes
    return found


def _weight(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def copy_index(index: Index, path: Path, *, compact: bool, verify: bool, on_progress: Notify | None) -> Copy:
    """Copy a whole index to `path`, which must be new or empty. It appears there only once it is complete on the disk.

    The retrieval indexes are left out; the first question builds them again.
    """
    _require_free(path, index.folder)
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        size = index.store.copy(partial, compact=compact, on_progress=on_progress)
        write_plain(partial / CONFIG_FILE, read_plain(index.folder / CONFIG_FILE))
        if verify:
            with Store.open(partial, readonly=True) as copied:
                found = copied.verify(on_progress=on_progress)
            (partial / "store" / "lock.mdb").unlink(missing_ok=True)
            if not found.ok:
                raise StoreError(
                    f"the copy has {len(found.findings)} faults, of which the first is {found.findings[0]}; "
                    f"nothing was written to {path}"
                )
        sync_path(partial)
        partial.rename(path)
        sync_path(path.parent)
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after a success it has been renamed
    before, _ = index.store.sizes()
    return Copy(path=path, bytes_before=before, bytes_after=size, verified=verify)


def _require_free(path: Path, index: Path) -> None:
    inside, own = path.resolve(), index.resolve()
    if inside == own or own in inside.parents:
        raise UsageError(f"{path} is inside the index at {index}; name a folder outside of it.")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} is not empty; name a folder that does not exist yet.")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a folder that does not exist yet.")


def delete_document(index: Index, document_id: str) -> bool:
    """Delete a document with all that only it needed. On a full disk, the retrieval indexes may have to make room."""
    try:
        return index.store.delete_document(document_id)
    except StoreFullError:
        if not os.path.lexists(index.derived):
            raise
        with suppress(OSError):
            remove_tree(index.derived)  # it can be made again, and frees the space that is missing
        return index.store.delete_document(document_id)
