"""Which models are on this machine (an index's and the bundled ones), without loading or fetching any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ragkv.config import NONE, IndexConfig
from ragkv.errors import RagkvError
from ragkv.mini import embedder_path, lm_path, reranker_path
from ragkv.model.checkpoint import MINI, WEIGHTS, resolve

__all__ = ["ModelState", "models_present"]

State = Literal["here", "to be fetched", "missing"]
Role = Literal["model", "embedder", "reranker"]

_BUNDLED: dict[Role, Callable[[], Path]] = {
    "model": lm_path,
    "embedder": embedder_path,
    "reranker": reranker_path,
}
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
        own: list[tuple[Role, str]] = [
            ("model", config.model),
            ("embedder", config.embedder),
            ("reranker", config.reranker),
        ]
        wanted += [each for each in own if each[1] not in (MINI, NONE)]
    return tuple(_look(role, name) for role, name in wanted)


def _look(role: Role, name: str) -> ModelState:
    marks = ("config.json", "modules.json")
    try:
        found = resolve(name, bundled=_BUNDLED[role], marks=marks)
    except RagkvError as error:
        return ModelState(role=role, name=name, state="missing", what=str(error))
    if found.local:
        folder = Path(found.location)
    else:
        cached = _cached(found.location)
        if cached is None:
            return ModelState(role=role, name=name, state="to be fetched", what="of the hub; fetched when first used")
        folder = cached
    weights = {path for pattern in _WEIGHTS for path in folder.glob(pattern)}
    if not weights and role != "embedder":  # a sentence-transformers folder may keep them a level deeper
        return ModelState(role=role, name=name, state="missing", what=f"No weights in {folder}; fetch it again.")
    what = "bundled" if name == MINI else str(folder)
    return ModelState(role=role, name=name, state="here", what=what, bytes=sum(path.stat().st_size for path in weights))


def _cached(name: str) -> Path | None:
    """Its folder in the hub's cache, without asking the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
