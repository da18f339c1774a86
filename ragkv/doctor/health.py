"""What `ragkv doctor` says of the machine, the models and the index, and what to do about them."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import ragkv
from ragkv.config import NONE, IndexConfig
from ragkv.doctor.compare import ChunkReader
from ragkv.errors import RagkvError
from ragkv.mini import embedder_path, lm_path, reranker_path
from ragkv.model.checkpoint import MINI, WEIGHTS, resolve
from ragkv.store import StoreStats
from ragkv.util.processors import describe, fit_threads

_PACKAGES = ("torch", "transformers", "lmdb", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions by package, and descriptions of the devices, the default device first."""

    versions: dict[str, str]
    devices: tuple[str, ...]

    @classmethod
    def look(cls) -> Environment:
        import torch

        versions = {"ragkv": ragkv.__version__, "python": platform.python_version()}
        for package in _PACKAGES:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:  # some builds of torch carry no metadata
                versions[package] = "unknown"
        fit_threads()
        devices = [f"cpu: {platform.machine()}, {describe()}"]
        if torch.cuda.is_available():
            gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
            devices = [f"cuda:{i}: {p.name}, {p.total_memory / 2**30:.0f} GiB" for i, p in enumerate(gpus)] + devices
        return cls(versions=versions, devices=tuple(devices))


def remedies(stats: StoreStats, reader: ChunkReader | None) -> list[str]:
    """One sentence for each thing that the user should do about the index; `reader` has the model that is judged."""
    sentences = []
    if not stats.chunks:
        sentences.append("The index holds no chunk: ragkv ingest PATH.")
    if reader is not None and reader.own and not reader.current:
        sentences.append("The model changed since the index was made: run ragkv ingest on all of its documents again.")
    if reader is not None and not reader.own:
        sentences.append(f"To answer with {reader.name}, ingest the documents into an index of its own.")
    if stats.unreadable:
        sentences.append(f"{stats.unreadable} KV records are damaged; run ragkv verify, then ragkv repair.")
    if stats.orphans:
        sentences.append(f"{stats.orphans} KV records are needed by no chunk; ragkv gc frees their space.")
    return sentences


State = Literal["here", "to be fetched", "missing"]
Role = Literal["model", "embedder", "reranker"]

_BUNDLED: dict[Role, Callable[[], Path]] = {"model": lm_path, "embedder": embedder_path, "reranker": reranker_path}
_WEIGHTS = (*WEIGHTS, "*.bin", "*.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """A model by role and name. `bytes` is the size of its weights if they are here; `what` describes the state."""

    role: Role
    name: str
    state: State
    what: str
    bytes: int | None = None


def models_present(config: IndexConfig | None) -> tuple[ModelState, ...]:
    """The bundled models, then the other models of the index."""
    wanted: list[tuple[Role, str]] = [(role, MINI) for role in _BUNDLED]
    if config is not None:
        own: dict[Role, str] = {"model": config.model, "embedder": config.embedder, "reranker": config.reranker}
        wanted += [(role, name) for role, name in own.items() if name not in (MINI, NONE)]
    return tuple(_look(role, name) for role, name in wanted)


def _look(role: Role, name: str) -> ModelState:
    marks = ("config.json",) if role == "model" else ("config.json", "modules.json")
    try:
        resolved = resolve(name, bundled=_BUNDLED[role], marks=marks)
    except RagkvError as error:
        return ModelState(role=role, name=name, state="missing", what=str(error))
    if resolved.local:
        folder = Path(resolved.location)
    else:
        cached = _cached(resolved.location)
        if cached is None:
            return ModelState(role=role, name=name, state="to be fetched", what="of the hub; fetched when first used")
        folder = cached
    patterns = _WEIGHTS if resolved.file is None else (resolved.file,)
    weights = {path for pattern in patterns for path in folder.glob(pattern)}
    if not weights and role != "embedder":  # a sentence-transformers folder may keep them a level deeper
        return ModelState(role=role, name=name, state="missing", what=f"No weights in {folder}; download it again.")
    what = "bundled" if name == MINI else str(folder)
    return ModelState(role=role, name=name, state="here", what=what, bytes=sum(path.stat().st_size for path in weights))


def _cached(name: str) -> Path | None:
    """The model's folder in the hub's local cache; does not ask the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(path).parent if isinstance(path, str) else None
