"""Making an index and opening one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragkv.config import CONFIG_FILE, IndexConfig, load_config, save_config
from ragkv.errors import ConfigError
from ragkv.index.encoders import check_factory, retrieval_defaults
from ragkv.index.index import Index
from ragkv.model.checkpoint import MINI, resolve
from ragkv.store import STORE_FILES, Store, codec_from_config

__all__ = ["create_index", "new_config", "open_index"]

_NEW_CONFIG_FILE = f"{CONFIG_FILE}.new"


def create_index(folder: Path, settings: Mapping[str, Any], *, device: str | None = None) -> Index:
    """Make an index at `folder`, which must be new, empty, or what an interrupted `create_index` left.

    Raises ConfigError when the folder holds something else, ModelLoadError when there is no such model.
    """
    from ragkv.engines import engine_class

    if (folder / CONFIG_FILE).exists():
        raise ConfigError(f"There is an index at {folder} already; open it, or choose another folder.")
    if folder.exists() and not (folder.is_dir() and _unfinished(folder)):
        raise ConfigError(f"{folder} is not empty and is not an index; choose another folder.")
    config = new_config(settings)
    for name in (*config.engines, config.default_engine):
        engine_class(name)
    codec = codec_from_config({"id": config.codec})
    check_factory(config)
    store = Store.create(folder, codec=codec, exist_ok=True)
    try:
        with store.writing("making the index", timeout=10):
            if (folder / CONFIG_FILE).exists():  # made by another process since we looked
                raise ConfigError(f"There is an index at {folder} already; open it, or choose another folder.")
            # the configuration comes last: a folder without it is not an index yet
            save_config(folder, config)
    except BaseException:
        store.close()
        raise
    return Index(folder, config, store, device=device)


def open_index(folder: Path, *, device: str | None = None, readonly: bool | None = None) -> Index:
    """Open the index at `folder`; `readonly` None: writable where the system permits it.

    Raises ConfigError when there is none, StoreError when it cannot be read.
    """
    config = load_config(folder)
    store = Store.open(folder, readonly=readonly, codec=codec_from_config({"id": config.codec}))
    return Index(folder, config, store, device=device)


def new_config(settings: Mapping[str, Any]) -> IndexConfig:
    """The configuration of a new index: `settings`, and what follows from the model where they are silent."""
    recommended = resolve(settings.get("model", MINI)).recommended
    defaults = {"default_engine": "block" if recommended.get("block_tuned") else "ape"}
    if "chunk_tokens" in recommended:
        defaults["chunk_tokens"] = recommended["chunk_tokens"]
    return IndexConfig(**(defaults | retrieval_defaults(settings) | dict(settings)))


def _unfinished(folder: Path) -> bool:
    """Whether all that is in the folder is what a `create_index` that was killed leaves behind, or nothing."""
    store = folder / "store"
    inside = {path.name for path in store.iterdir()} if store.is_dir() else set()
    return {path.name for path in folder.iterdir()} <= {"store", _NEW_CONFIG_FILE} and inside <= STORE_FILES
