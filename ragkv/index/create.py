"""Create and open indexes. Nothing is written until the models of a new index are loaded.

If creation fails before anything was stored, `CreationRollback` removes what was made and leaves what existed before.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.config import (
    CONFIG_FILE,
    LLAMA_CPP,
    MODELS,
    NEW_CONFIG_FILE,
    VLLM,
    IndexConfig,
    RuntimeConfig,
    build_tables,
    load_config,
    save_config,
)
from ragkv.errors import ConfigError, RagkvError, UnsupportedModelError
from ragkv.index.index import (
    Index,
    check_names,
    load_models,
    require_vllm,
    retrieval_defaults,
    runs_by_llama_cpp,
    validate_vectors,
)
from ragkv.model.checkpoint import MINI, lasting, resolve
from ragkv.store import STORE_FILES, Store, codec_from_config
from ragkv.store.environment import LOCK_FILE, WriterLock
from ragkv.types import Capability
from ragkv.util.files import exists, locked, remove_tree

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel

logger = logging.getLogger(__name__)


class CreationRollback:
    """The files and folders that creating an index at `folder` would add; make one before creating the index."""

    def __init__(self, folder: Path) -> None:
        store = folder / "store"
        names = sorted(STORE_FILES - {LOCK_FILE})
        # In this order, so that an interrupted removal leaves an index or a valid place for one. The lock is last.
        files = (folder / "derived", folder / NEW_CONFIG_FILE, folder / CONFIG_FILE, *(store / name for name in names))
        self._folder = folder
        self._files = [path for path in (*files, store / LOCK_FILE) if not exists(path)]
        self._folders = [path for path in (store, folder, *folder.parents) if not exists(path)]

    def remove(self) -> bool:
        """Delete what was added, if nothing is stored in it and no other process writes to it; whether it was deleted.

        Only empty folders are deleted. Processes that wait to write to the index find that it does not exist.
        """
        store = self._folder / "store"
        if not store.is_dir():
            self._remove_folders()
            return False
        try:
            with WriterLock(store).hold("removing an index in which nothing was stored", timeout=0):
                if (self._folder / CONFIG_FILE).exists() and not _is_blank(self._folder):
                    return False
                for path in self._files:
                    remove_tree(path)
                self._remove_folders()
        except (RagkvError, OSError) as error:
            logger.info("%s is not changed: %s", self._folder, error)
            self._remove_folders()  # those that are still empty, because a full disk had no room for the lock
            return False
        return True

    def _remove_folders(self) -> None:
        for path in self._folders:
            with suppress(OSError):  # not empty, or never created
                path.rmdir()


def _is_blank(folder: Path) -> bool:
    """Whether the index has neither documents nor KV staged by an interrupted ingest."""
    with Store.open(folder, readonly=True) as store:
        return store.empty and next(store.maintenance.orphans(), None) is None


def create_index(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    device: str | None = None,
    replace_empty: bool = False,
    load: bool = True,
    vllm: str | None = None,
) -> Index:
    """Create an index at `folder`, which must be new or empty, or a remainder of an interrupted `create_index`.

    With `replace_empty`, an index without documents is replaced. With `load` False, models load at their first use.
    Engines that the model cannot run exactly are left out unless `settings` name them. `vllm` is the URL of the vLLM
    server that encodes, for `executor="vllm"`.

    Raises ConfigError if the folder holds something else, and ModelLoadError or UnsupportedModelError for the models.
    """
    taken = ConfigError(f"There is an index at {folder} already; open it, or choose another folder.")
    old = replace_empty and (folder / CONFIG_FILE).exists()
    if old:
        if not is_empty(folder):
            raise taken
        settings = kept_settings(folder) | dict(settings)
    elif (folder / CONFIG_FILE).exists():
        raise taken
    else:
        require_vacant(folder)
    config = new_config(settings)
    check_engines(config)
    codec = codec_from_config({"id": config.codec})
    config = validate_vectors(config, fetch=load)
    if config.executor == VLLM:
        from ragkv.runtime.vllm import VLLMServer, require_engine

        for name in {*config.engines, config.default_engine}:
            require_engine(name)
        _ = VLLMServer(require_vllm(vllm)).connector  # so that one that does not answer is seen now
        load = False
    loaded = load_models(config, device) if load else None
    if loaded is not None:
        config = _fitting(config, settings, loaded[0])
    rollback = CreationRollback(folder)
    store = None
    try:
        store = Store.open(folder, codec=codec) if old else Store.create(folder, codec=codec, exist_ok=True)
        with store.writing("making the index", timeout=10), locked(folder):
            # another process may have created or filled the index meanwhile
            if not store.empty if old else (folder / CONFIG_FILE).exists():
                raise taken
            if old:
                shutil.rmtree(folder / "derived", ignore_errors=True)
            save_config(folder, config)  # last, because a folder with this file is an index
    except BaseException:
        if store is not None:
            store.close()
        if not (folder / CONFIG_FILE).exists():  # otherwise it belongs to another process
            rollback.remove()
        raise
    return Index(folder, config, store, device=device, loaded=loaded, vllm=vllm)


def open_index(
    folder: Path,
    *,
    device: str | None = None,
    readonly: bool | None = None,
    limits: RuntimeConfig | None = None,
    vllm: str | None = None,
) -> Index:
    """Open the index at `folder`. `readonly` None opens it for writing if the file system permits that.

    `limits` override `[runtime]` of the index; `vllm` is the URL of a vLLM server that answers.

    Raises ConfigError if there is no index, and StoreError if it cannot be read.
    """
    config = load_config(folder)
    store = Store.open(folder, readonly=readonly, codec=codec_from_config({"id": config.codec}))
    return Index(folder, config, store, device=device, limits=limits, vllm=vllm)


def require_vacant(folder: Path) -> None:
    """ConfigError if an index cannot be made at `folder`, because there is something else."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, and an index is a folder; choose another.")
    if folder.exists() and not _is_unfinished(folder):
        raise ConfigError(f"{folder} is not empty and is not an index; choose another folder.")


def check_engines(config: IndexConfig) -> None:
    """`check_names`, and ConfigError for a `[tuning.ENGINE]` that does not fit its engine."""
    from ragkv.engines import make_engine

    check_names(config)
    for name in {*config.engines, config.default_engine, *config.tuning}:
        make_engine(name, config.tuning)


def new_config(settings: Mapping[str, Any]) -> IndexConfig:
    """The configuration of a new index: `settings`, completed by the model's recommendations. Paths may be `Path`s.

    Model folders are stored as absolute paths, so that questions work from any folder.
    """
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    settings |= {name: lasting(value) for name in MODELS if isinstance(value := settings.get(name), str)}
    settings = build_tables(IndexConfig, settings)
    block = (settings.get("tuning") or {}).get("block") or {}
    model = settings.get("model", MINI)
    checkpoint = resolve(model) if isinstance(model, str) else None  # IndexConfig refuses other types below
    recommended = {} if checkpoint is None else checkpoint.recommended
    defaults: dict[str, Any] = {"default_engine": "block" if recommended.get("block_tuned") else "ape"}
    engines = settings.get("engines")
    if isinstance(engines, list | tuple) and engines and defaults["default_engine"] not in engines:
        defaults["default_engine"] = engines[0]
    defaults |= {name: recommended[name] for name in ("chunk_tokens", "top_k") if name in recommended}
    if checkpoint is not None and runs_by_llama_cpp(checkpoint, settings):
        defaults["executor"] = LLAMA_CPP
    if settings.get("executor") == VLLM:
        defaults |= {"engines": ("block",), "default_engine": "block"}
    config = IndexConfig(**(defaults | retrieval_defaults(settings) | dict(settings)))
    if checkpoint is None:
        return config
    tuning, block = config.tuning, config.tuning.get("block", {})
    # "standalone" is the engine's default
    if checkpoint.block_over != "standalone" and block.get("preset") != "no-positions":
        tuning = {**tuning, "block": {"over": checkpoint.block_over, **block}}
    return replace(config, prompt=checkpoint.tuned_words(config.prompt), tuning=tuning)


def _fitting(config: IndexConfig, settings: Mapping[str, Any], model: LanguageModel) -> IndexConfig:
    """`config` without the engines that `model` cannot run exactly.

    Raises UnsupportedModelError if one of them was requested by name.
    """
    from ragkv.engines import make_engine, require_supported, unsupported_reason
    from ragkv.engines.base import supported_or

    context = config.encoding.context
    missing = model.missing_capabilities
    if context and (why := missing.get(Capability.MOVE) or missing.get(Capability.TENSORS)):
        raise UnsupportedModelError(
            f"[encoding] context = {context} does not fit model {model.checkpoint.name!r}: {why}; leave it out, or use "
            "another model."
        )
    names = (*config.engines, config.default_engine)
    engines = {name: make_engine(name, config.tuning, context=context) for name in names}
    for name in (*settings.get("engines", ()), *filter(None, [settings.get("default_engine")])):
        require_supported(engines[name], model)
    able = [name for name in config.engines if unsupported_reason(engines[name], model) is None]
    return replace(config, engines=tuple(able), default_engine=supported_or([config.default_engine], model))


def change_settings(folder: Path, settings: Mapping[str, Any]) -> int:
    """Change settings in an index's `ragkv.toml`; returns the number of KV records evicted for a smaller budget.

    A name may be that of a table's setting, as in "steps.count". Raises ConfigError for an invalid value, StoreError
    if the index cannot be written.
    """
    load_config(folder)  # refuses what is no index
    with locked(folder):
        config = load_config(folder)
        for name, value in settings.items():
            table, _, key = name.rpartition(".")
            if table:
                key, value = table, replace(getattr(config, table), **{key: value})
            config = replace(config, **{key: value})
        check_engines(config)
        with Store.open(folder, codec=codec_from_config({"id": config.codec})) as store:
            save_config(folder, config)
            return store.set_budget(config.budget)


def is_empty(folder: Path) -> bool:
    """Whether the index at `folder` holds no document."""
    with Store.open(folder, readonly=True) as store:
        return store.empty


def kept_settings(folder: Path) -> dict[str, Any]:
    """Settings that a replacing index takes over: those that a user wrote and that have no flag."""
    old, plain = load_config(folder), IndexConfig()
    names = ("prompt", "decoding", "steps", "ingest", "runtime", "memory_budget", "history", "tiers", "qdrant")
    return {name: getattr(old, name) for name in names if getattr(old, name) != getattr(plain, name)}


def _is_unfinished(folder: Path) -> bool:
    """Whether the folder is empty or a remainder of an interrupted `create_index`."""
    store = folder / "store"
    inside = {path.name for path in store.iterdir()} if store.is_dir() else set()
    return {path.name for path in folder.iterdir()} <= {"store", NEW_CONFIG_FILE} and inside <= STORE_FILES
