"""Keeping an index well: what verification, repair, garbage, copies and deletion need beyond the store.

The store knows rows and checksums; this module adds what surrounds it: the model and recipe that make lost KV again,
the retrieval indexes that are derived from it, the configuration that makes a folder an index.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.config import CONFIG_FILE
from ragkv.errors import RetrievalError, StoreError, UsageError
from ragkv.ingest import find_chunk
from ragkv.retrievers import BM25
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
from ragkv.types import Chunk, Document, Encoding

if TYPE_CHECKING:
    from ragkv.kv import ChunkKV
    from ragkv.pipeline import RagKV
    from ragkv.store import ChunkVectors

__all__ = ["IndexMender", "collect_index", "copy_index", "delete_document", "repair_index", "verify_index"]

SETTLED_SECONDS = 3600
"""A derived folder that nobody names and nobody has touched for so long is no index that is being written."""

logger = logging.getLogger(__name__)


class IndexMender:
    """What the index can make again; the model is loaded when something has to be encoded, and not before."""

    def __init__(self, rag: RagKV, encodings: Sequence[Encoding]) -> None:
        self._rag = rag
        self._encodings = encodings

    def find_chunk(
        self, document: Document, text: str, ordinal: int, low: int, high: int, known: Callable[[str], bool]
    ) -> tuple[str, int, int] | None:
        return find_chunk(document, text, ordinal, low, high, known)

    def tokens(self, text: str) -> tuple[int, ...]:
        return self._rag.prompt.chunk_ids(self._rag.model.tokens, text)

    def identities(self, chunk: Chunk) -> list[KVIdentity]:
        return [self._rag.recall.identity(encoding, chunk.token_ids) for encoding in self._encodings]

    def encode(self, identities: Sequence[KVIdentity]) -> list[ChunkKV]:
        """In the order of `identities`; those of one encoding go through the model together."""
        made: dict[KVIdentity, ChunkKV] = {}
        for encoding in sorted({identity.encoding for identity in identities}):
            group = [identity for identity in identities if identity.encoding is encoding]
            prefix = self._rag.recall.prefix() if encoding is Encoding.PREFIXED else None
            kvs = self._rag.model.encode([identity.chunk_ids for identity in group], prefix=prefix)
            made.update(zip(group, kvs, strict=True))
        return [made[identity] for identity in identities]

    def embed(self, chunks: Sequence[Chunk]) -> Mapping[str, ChunkVectors] | None:
        """None: retrieval needs no vectors today (BM25), so there is nothing to make them with."""
        return None


def verify_index(rag: RagKV, store: Store, *, quick: bool, on_progress: Notify | None) -> Verification:
    """The store, and whether the retrieval index is at its generation."""
    found = store.verify(quick=quick, on_progress=on_progress)
    return replace(found, derived={rag.config.retrieval: _state(rag.derived, store.generation)})


def _state(folder: Path, generation: int) -> str:
    """In words, what the next question will find; a missing index is no damage either."""
    if not folder.exists():
        return "not built yet: the next question builds it"
    try:
        kept = BM25.load(folder)
    except RetrievalError as error:
        return f"will be rebuilt by the next question ({error})"
    if kept.generation != generation:
        return "will be rebuilt by the next question (documents have changed since)"
    return "current"


def repair_index(
    rag: RagKV, store: Store, mender: IndexMender, *, encode: bool, dry_run: bool, on_progress: Notify | None
) -> Repair:
    """Repair the store; then say again which model made the chunks, if that was lost."""
    report = store.repair(mender, encode=encode, dry_run=dry_run, on_progress=on_progress)
    if "model" in report.facts and not dry_run:
        # Unless all KV is one model's nobody knows, and an index of nobody knows whom must not be read.
        models = store.models()
        fingerprint = models.pop() if len(models) == 1 else "unknown"
        store.put_meta("model", {"name": rag.config.model, "fingerprint": fingerprint})
    return report


def collect_index(rag: RagKV, store: Store, *, dry_run: bool, on_progress: Notify | None) -> Collection:
    """Garbage of the store, and what is stale under `derived/`."""
    prompt = store.get_meta("prompt")
    wanted = None
    if isinstance(prompt, dict) and "prefix_ids" in prompt:
        wanted = (prompt["model"], tuple(prompt["prefix_ids"]))

    def in_use(manifest: Manifest) -> bool:
        """The prefix of the prompt that was last used; of an index that does not say which, all are."""
        return wanted is None or wanted == (manifest.identity.model, manifest.identity.chunk_ids)

    found = store.collect(in_use=in_use, dry_run=dry_run, on_progress=on_progress)
    for path in _stale(rag.derived, store.generation):
        found.derived += 1
        found.derived_bytes += _weight(path)
        if not dry_run:
            shutil.rmtree(path)
    return found


def _stale(folder: Path, generation: int) -> Iterator[Path]:
    """A retrieval index that is behind (the next question would replace it), or what an interrupted save left."""
    if not folder.is_dir():
        return
    manifest: dict[str, object] = {}
    with suppress(OSError, ValueError):
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    settled = time.time() - SETTLED_SECONDS
    if manifest and manifest.get("generation") != generation and folder.stat().st_mtime < settled:
        yield folder
        return
    for data in folder.glob("data-*"):
        if data.name != manifest.get("data") and data.stat().st_mtime < settled:
            yield data


def _weight(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def copy_index(
    rag: RagKV, store: Store, path: Path, *, compact: bool, verify: bool, on_progress: Notify | None
) -> Copy:
    """A whole index at `path`, which must be new or empty: it appears there at once, when all of it is on the disk.

    What is derived is left out, and built again by the first question.
    """
    _require_free(path, rag.folder)
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        size = store.copy(partial, compact=compact, on_progress=on_progress)
        shutil.copyfile(rag.folder / CONFIG_FILE, partial / CONFIG_FILE)
        if verify:
            with Store.open(partial, readonly=True) as copied:
                found = copied.verify(on_progress=on_progress)
            (partial / "store" / "lock.mdb").unlink(missing_ok=True)
            if not found.ok:
                raise StoreError(
                    f"the copy has {len(found.findings)} faults, of which the first is {found.findings[0]}; "
                    f"nothing was written to {path}"
                )
        sync_path(partial / CONFIG_FILE)
        sync_path(partial)
        partial.rename(path)
        sync_path(path.parent)
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # renamed, it is there no more
    before, _ = store.sizes()
    return Copy(path=path, bytes_before=before, bytes_after=size, verified=verify)


def _require_free(path: Path, index: Path) -> None:
    inside, own = path.resolve(), index.resolve()
    if inside == own or own in inside.parents:
        raise UsageError(f"{path} is inside the index at {index}; name a folder outside of it.")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} is not empty; name a folder that does not exist yet.")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a folder that does not exist yet.")


def delete_document(rag: RagKV, store: Store, document_id: str) -> bool:
    """A document with all that only it needed, and the retrieval index, which holds its words."""
    gone = store.delete_document(document_id)
    if gone and rag.derived.exists():
        shutil.rmtree(rag.derived, ignore_errors=True)
        if rag.derived.exists():
            logger.warning("%s holds words of a deleted document until the next question", rag.derived)
    return gone
