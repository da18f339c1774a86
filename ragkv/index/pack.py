"""Packs: an index, or chosen documents of one with their KV, as one file that answers elsewhere without encoding.

A pack is a manifest and a compacted copy of the store. The manifest has the settings without their tiers, and a digest
of both (docs/formats.md, "Packs"). An unpacked index appears complete and verified, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ragkv.config import CONFIG_FILE, IndexConfig, QdrantConfig, load_config, save_config
from ragkv.errors import KVMismatchError, RetrievalError, StoreError, UsageError
from ragkv.index.create import create_index, open_index
from ragkv.index.filters import match
from ragkv.index.index import Index, read_metadata
from ragkv.index.ingestion import run_ingest
from ragkv.index.maintenance import copy_index, partial_folder, renamed, require_free
from ragkv.index.search import Finder
from ragkv.ingest import ReadyChunk, ReadyDocument
from ragkv.model.checkpoint import lasting
from ragkv.store import Notify, Store, sync_path
from ragkv.store.tier import ObjectTier
from ragkv.util import batches
from ragkv.util.files import parse_json, refusal

logger = logging.getLogger(__name__)

MAGIC = b"RAGKVPACK3\n"
_HEAD = struct.Struct("<I")
"""Length of the manifest in bytes."""
_MANIFEST_BYTES = 1 << 20
_BLOCK = 1 << 20
_TOGETHER = 1000
"""Documents and chunks that are deleted in one transaction, because each transaction waits for the disk."""
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """The contents of a pack, and the checkpoint that made its KV."""

    model: str
    fingerprint: str
    embedder: str
    documents: int
    chunks: int
    kv_records: int
    bytes: int
    encoded: int = 0
    """Chunk KV that had to be encoded while unpacking: 0 except with documents alone."""

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv pack --json` and `ragkv unpack --json` print."""
        return asdict(self)


def write_pack(index: Index, path: Path, *, names: Sequence[str] = (), on_progress: Notify | None = None) -> Pack:
    """Write a pack of the index, or of the documents that `names` select, to the new file `path`.

    UsageError for an existing file, an empty index, and a name without a document; KVMismatchError if the model has
    changed since the ingest.
    """
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already; name a new file.")
    index.require_same_model()
    documents = list(index.store.documents())
    if not documents:
        raise UsageError(f"The index at {index.folder} holds no document to pack.")
    chosen = {stored.document.document_id for stored in (match(documents, names) if names else documents)}
    with partial_folder(path) as work, renamed(work / "all" / "store", path), renamed(work / "pack" / "store", path):
        copy_index(index, work / "all", compact=False, verify=False, on_progress=on_progress)
        with Store.open(work / "all") as store:
            store.drop_meta("tiers")
            if names:
                store.drop_meta("qdrant")  # another index than that of the collection
            while keys := store.tombstones():
                store.purge_tombstones(keys, lambda _: True)
            others = (stored for stored in store.documents() if stored.document.document_id not in chosen)  # also later
            for batch in batches(others, lambda stored: 1 + stored.chunks, _TOGETHER):
                store.delete_documents([stored.document.document_id for stored in batch])
            store.maintenance.collect(in_use=lambda _: True)
            size = store.maintenance.copy(work / "pack", compact=True, on_progress=on_progress)  # without deleted data
            pack = _contents(store, index.config, size)
        settings = replace(index.config, tiers=(), qdrant=QdrantConfig()).to_toml()
        with (work / "pack" / "store" / "data.mdb").open("rb") as data:
            digest = hashlib.file_digest(data, lambda: _digest(settings)).hexdigest()
            manifest = json.dumps({"settings": settings, "bytes": size, "blake2b": digest}).encode()
            data.seek(0)
            with (work / "file").open("wb") as out:
                out.write(MAGIC + _HEAD.pack(len(manifest)) + manifest)
                shutil.copyfileobj(data, out, _BLOCK)
        sync_path(work / "file")
        (work / "file").rename(path)
        sync_path(path.parent)
        return replace(pack, bytes=path.stat().st_size)


def _contents(store: Store, config: IndexConfig, size: int) -> Pack:
    """What is in a store that takes `size` bytes."""
    stats, recorded = store.stats(), read_metadata(store, "model") or {}
    return Pack(
        model=config.model,
        fingerprint=recorded.get("fingerprint", ""),
        embedder=config.embedder,
        documents=stats.documents,
        chunks=stats.chunks,
        kv_records=stats.kv_records,
        bytes=size,
    )


def sealed(path: Path | str) -> str:
    """The digest of a pack's manifest, which contains that of the rest: with it, `unpack` makes exactly this index.

    Reads only the manifest; raises like `unpack` if it is not a pack.
    """
    with _opened(path) as read:
        return _parsed(read, path)[1]


def unpack(
    path: Path | str,
    folder: Path,
    *,
    documents_only: bool = False,
    model: str | None = None,
    device: str | None = None,
    digest: str | None = None,
) -> Pack:
    """Make the index of a pack, a file or an object (`s3://…`, `gs://…`, `az://…`), at the new folder `folder`.

    `documents_only` takes only documents and chunks, and encodes them. `model` is the model's location, or with
    `documents_only` another model; by default the pack's. `digest`, from `sealed`, identifies the expected pack.

    StoreError for a file that is not a pack or was changed; KVMismatchError if the model or embedder is not the one
    that made it; UsageError for a folder that is not new.
    """
    require_free(folder, Path(path))
    with partial_folder(folder) as work, renamed(work / "index", path):
        with _opened(path) as read:
            manifest, manifest_digest = _parsed(read, path)
            if digest not in (None, manifest_digest):
                raise UsageError(f"{path} is not the pack any more that was to be unpacked: it was replaced meanwhile.")
            (work / "index" / "store").mkdir(parents=True)
            _extract(read, work / "index" / "store" / "data.mdb", manifest, path)
        (work / "index" / CONFIG_FILE).write_text(manifest["settings"], encoding="utf-8")
        config = load_config(work / "index")
        with Store.open(work / "index", readonly=True) as store:
            pack = _contents(store, config, manifest["bytes"])
        config = replace(
            config, tiers=(), qdrant=QdrantConfig(), model=config.model if model is None else lasting(model)
        )
        save_config(work / "index", config)
        if documents_only:
            encoded = _encode_again(work / "index", work / "new", device, other_model=model is not None)
            (work / "new").rename(folder)
            sync_path(folder.parent)
            return replace(pack, encoded=encoded)
        index = open_index(work / "index", device=device, readonly=True)
        try:
            if (now := index.cut_by) != pack.fingerprint:
                raise KVMismatchError(
                    f"{path} was made by another model than {config.model!r} here ({pack.fingerprint[:12]}…, not "
                    f"{now[:12]}…): name that model with --model, or encode the documents again with --documents-only."
                )
            if index.config.embedder != "none":
                index.encoders.require_same_embedder()
            if (makers := index.store.maintenance.models()) and index.fingerprint not in makers:
                logger.warning("%s holds KV of another build of llama.cpp: questions encode their chunks again.", path)
        except RetrievalError as error:
            raise KVMismatchError(f"{error} Or add --documents-only to encode its documents again.") from error
        finally:
            index.close()
        (work / "index" / "store" / "lock.mdb").unlink(missing_ok=True)
        sync_path(work / "index")
        (work / "index").rename(folder)
        sync_path(folder.parent)
        return pack


def _encode_again(packed: Path, folder: Path, device: str | None, *, other_model: bool) -> int:
    """Make an index at `folder` with the settings, documents and chunks of another one; returns the encoded KVs."""
    config = load_config(packed)
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    if other_model:
        del settings["executor"]  # what suits the model runs it
    index = create_index(folder, settings, device=device)
    try:
        with Store.open(packed, readonly=True) as store:
            documents, names = [], [field.name for field in fields(ReadyChunk)]
            for stored in store.documents():
                chunks = [
                    ReadyChunk(**{name: getattr(chunk, name) for name in names})
                    for chunk in store.chunks(stored.document.document_id)
                ]
                if chunks:
                    text = store.text(stored.document.document_id)
                    documents.append(ReadyDocument(document=stored.document, text=text or "", chunks=chunks))
        with index.store.writing("ragkv unpack"):
            return run_ingest(index, Finder(index), lambda ingester: ingester.run_chunks(documents)).kv_encoded
    finally:
        index.close()


@contextmanager
def _opened(path: Path | str) -> Iterator[Callable[[int], bytes]]:
    """A function that reads the next bytes of a file, or of an object by its URL."""
    path = str(path).removeprefix("file://")
    with ExitStack() as stack:
        try:
            if "://" in path:
                place, _, name = path.rpartition("/")
                read = ObjectTier(place, timeout=_CONNECT_SECONDS).reader(name)
            elif Path(path).is_file():  # a pipe would block
                read = stack.enter_context(Path(path).open("rb")).read
            else:
                raise FileNotFoundError
        except FileNotFoundError as error:
            raise UsageError(f"There is no pack at {path}; ragkv pack writes one.") from error
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({refusal(error)}).") from error

        def checked(size: int) -> bytes:
            try:
                return read(size)
            except OSError as error:
                raise StoreError(f"{path} cannot be read ({refusal(error)}).") from error

        yield checked


def _damaged(path: Path | str, why: str) -> StoreError:
    return StoreError(f"{path} is not a pack, or not as it was written ({why}): get it again")


def _parsed(read: Callable[[int], bytes], path: Path | str) -> tuple[dict[str, Any], str]:
    """A pack's manifest and its digest; `read` then continues with the store."""
    head = read(len(MAGIC) + _HEAD.size)
    if len(head) != len(MAGIC) + _HEAD.size or not head.startswith(MAGIC):
        raise _damaged(path, "its first bytes are not those of a pack")
    [length] = _HEAD.unpack(head[len(MAGIC) :])
    if length > _MANIFEST_BYTES:
        raise _damaged(path, "its manifest is too long")
    packed = read(length)
    try:
        manifest = parse_json(packed)
        kinds = {name: type(manifest[name]) for name in ("settings", "bytes", "blake2b")}
        if kinds != {"settings": str, "bytes": int, "blake2b": str} or manifest["bytes"] < 0:
            raise ValueError("it lacks something")
        manifest["settings"].encode()
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(path, f"its manifest cannot be read: {error}") from error
    return manifest, hashlib.blake2b(MAGIC + packed, digest_size=32).hexdigest()


def _extract(read: Callable[[int], bytes], target: Path, manifest: dict[str, Any], path: Path | str) -> None:
    """Copy a pack's store to `target`, and compare the digest."""
    left, digest = manifest["bytes"], _digest(manifest["settings"])
    with target.open("xb") as out:
        while left and (block := read(min(left, _BLOCK))):
            digest.update(block)
            out.write(block)
            left -= len(block)
    if left or read(1) or digest.hexdigest() != manifest["blake2b"]:
        raise _damaged(path, "it ends early" if left else "its digest or its length does not match")


def _digest(settings: str) -> hashlib.blake2b:
    """The digest of a pack, which the store's bytes still have to be added to."""
    return hashlib.blake2b(settings.encode(), digest_size=32)
