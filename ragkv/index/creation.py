"""Make and open indexes. Nothing is written until the models of a new index are loaded."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.config import (
    CONFIG_FILE,
    MODELS,
    NEW_CONFIG_FILE,
    IndexConfig,
    RuntimeConfig,
    load_config,
    save_config,
)
from ragkv.errors import ConfigError
from ragkv.index.encoders import check_factory, retrieval_defaults, settle_vectors
from ragkv.index.footprint import Footprint
from ragkv.index.index import Index
from ragkv.index.loaded import Loaded
from ragkv.model.checkpoint import MINI, lasting, resolve
from ragkv.store import STORE_FILES, Store, codec_from_config

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel

__all__ = ["change_settings", "create_index", "is_empty", "kept_settings", "new_config", "open_index"]


def create_index(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    device: str | None = None,
    replace_empty: bool = False,
    load: bool = True,
) -> Index:
    """Make an index at `folder`, which must be new or empty, or hold only what an interrupted `create_index` left.

    With `replace_empty`, an index without documents is replaced. With `load` False, models load at their first use.
    Engines that the model cannot run exactly are left out, unless `settings` name them.

    Raises ConfigError if the folder holds something else, and ModelLoadError or UnsupportedModelError for the models.
    """
    from ragkv.engines import engine_class

    taken = ConfigError(f"There is an index at {folder} already; open it, or choose another folder.")
    old = replace_empty and (folder / CONFIG_FILE).exists()
    if old:
        if not is_empty(folder):
            raise taken
        settings = kept_settings(folder) | dict(settings)
    elif (folder / CONFIG_FILE).exists():
        raise taken
    elif folder.exists() and not (folder.is_dir() and _is_unfinished(folder)):
        raise ConfigError(f"{folder} is not empty and is not an index; choose another folder.")
    config = new_config(settings)
    for name in (*config.engines, config.default_engine):
        engine_class(name)
    codec = codec_from_config({"id": config.codec})
    check_factory(config)
    config = settle_vectors(config, fetch=load)
    loaded = Loaded.load(config, device) if load else None
    if loaded is not None:
        config = _fitting(config, settings, loaded.model)
    footprint = Footprint.of(folder)
    store = Store.open(folder, codec=codec) if old else Store.create(folder, codec=codec, exist_ok=True)
    try:
        with store.writing("making the index", timeout=10):
            # another process may have made or filled the index since we looked
            if not store.empty if old else (folder / CONFIG_FILE).exists():
                raise taken
            if old:
                shutil.rmtree(folder / "derived", ignore_errors=True)
            save_config(folder, config)  # last, because a folder with this file is an index
    except BaseException:
        store.close()
        if not (folder / CONFIG_FILE).exists():  # else it is another process's index
            footprint.remove()
        raise
    return Index(folder, config, store, device=device, loaded=loaded)


def open_index(
    folder: Path, *, device: str | None = None, readonly: bool | None = None, limits: RuntimeConfig | None = None
) -> Index:
    """Open the index at `folder`. `readonly` None opens it for writing if the file system permits that.

    What `limits` sets overrides `[runtime]` of the index.

    Raises ConfigError if there is no index, and StoreError if it cannot be read.
    """
    config = load_config(folder)
    store = Store.open(folder, readonly=readonly, codec=codec_from_config({"id": config.codec}))
    return Index(folder, config, store, device=device, limits=limits)


def new_config(settings: Mapping[str, Any]) -> IndexConfig:
    """The configuration of a new index: `settings`, completed by what the model recommends. Paths may be `Path`s.

    Models that are folders here are kept by their whole paths: questions may be asked from another folder.
    """
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    settings |= {name: lasting(value) for name in MODELS if isinstance(value := settings.get(name), str)}
    model = settings.get("model", MINI)
    checkpoint = resolve(model) if isinstance(model, str) else None  # IndexConfig refuses anything else below
    recommended = {} if checkpoint is None else checkpoint.recommended
    defaults = {"default_engine": "block" if recommended.get("block_tuned") else "ape"}
    if "chunk_tokens" in recommended:
        defaults["chunk_tokens"] = recommended["chunk_tokens"]
    config = IndexConfig(**(defaults | retrieval_defaults(settings) | dict(settings)))
    return config if checkpoint is None else replace(config, prompt=checkpoint.tuned_words(config.prompt))


def _fitting(config: IndexConfig, settings: Mapping[str, Any], model: LanguageModel) -> IndexConfig:
    """`config` without the engines that `model` cannot run exactly, if nobody asked for them by name.

    Raises UnsupportedModelError if somebody did.
    """
    from ragkv.engines import make_engine, refusal, require_able
    from ragkv.engines.ability import able_or

    engines = {name: make_engine(name, config.tuning) for name in (*config.engines, config.default_engine)}
    for name in (*settings.get("engines", ()), *filter(None, [settings.get("default_engine")])):
        require_able(engines[name], model)
    able = [name for name in config.engines if refusal(engines[name], model) is None]
    return replace(config, engines=tuple(able), default_engine=able_or([config.default_engine], model))


def change_settings(folder: Path, settings: Mapping[str, Any]) -> int:
    """Change settings of an index in its `ragkv.toml`; returns how many KV records had to leave for a smaller budget.

    Raises ConfigError for a value that is wrong, StoreError when the index cannot be written.
    """
    from ragkv.engines import engine_class

    config = replace(load_config(folder), **settings)
    engine_class(config.default_engine)
    with Store.open(folder, codec=codec_from_config({"id": config.codec})) as store:
        save_config(folder, config)
        return store.set_budget(config.budget)


def is_empty(folder: Path) -> bool:
    """Whether the index at `folder` holds no document."""
    with Store.open(folder, readonly=True) as store:
        return store.empty


def kept_settings(folder: Path) -> dict[str, Any]:
    """What an index that is replaced keeps of the old one: settings that a user wrote and that have no flag."""
    old, plain = load_config(folder), IndexConfig()
    names = ("prompt", "decoding", "ingest", "runtime", "memory_budget")
    return {name: getattr(old, name) for name in names if getattr(old, name) != getattr(plain, name)}


def _is_unfinished(folder: Path) -> bool:
    """Whether the folder holds nothing, or only what a `create_index` that was killed leaves behind."""
    store = folder / "store"
    inside = {path.name for path in store.iterdir()} if store.is_dir() else set()
    return {path.name for path in folder.iterdir()} <= {"store", NEW_CONFIG_FILE} and inside <= STORE_FILES
