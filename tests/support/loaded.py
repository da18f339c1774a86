"""Models that are loaded and checked once per process, for tests that only ask questions."""

import copy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ragkv.retrievers
from ragkv.config import CONFIG_FILE, IndexConfig, load_config
from ragkv.index.index import load_models
from ragkv.model import self_check

ASKING = frozenset(
    {
        "ragkv.index.index",
        "ragkv.cli.query",
        "ragkv.doctor.compare",
        "ragkv.benchmarks.evaluation.answers",
        "ragkv.index.requirements",
    }
)
"""Modules that use a model without changing its weights."""


def loaded_once(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `load`, so that `ASKING` gets the same model again for the same options and an unchanged folder.

    Loading and the self-check take longer than most questions of the tests. Each call returns a new language model
    (with its own runtime and limits), and only the weights are shared. Training and the tests of loading call `load`
    itself.
    """
    kept: dict[str, Any] = {}

    def given(name: str, **options: Any) -> Any:
        device = options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        known = (name == "mini" or Path(name).is_dir()) and device == "cpu"
        if not known or sys._getframe(1).f_globals["__name__"] not in ASKING:
            return load(name, **options)
        files = [(path.name, path.stat()) for path in sorted(Path(name).rglob("*"))] if name != "mini" else []
        state = [(file, of.st_ino, of.st_mtime_ns, of.st_size) for file, of in files]
        key = repr((name, sorted({**options, "device": device}.items()), state))
        if key not in kept:
            kept[key] = load(name, **options)
            if len(kept) > 16:
                del kept[next(iter(kept))]
        found = kept[key]
        if hasattr(found, "_companions"):
            found = copy.copy(found)
            found._companions, found._lock = {}, threading.Lock()
        return found

    return given


def share_models(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(self_check, "load_model", loaded_once(self_check.load_model))
    for name in ("load_embedder", "load_reranker"):
        patch.setattr(ragkv.retrievers, name, loaded_once(getattr(ragkv.retrievers, name)))


def preload(*named: str) -> None:
    """Load the models of these indexes, or these models, for commands that are forked from this process."""
    share_models(pytest.MonkeyPatch())
    for name in named:
        index = (Path(name) / CONFIG_FILE).exists()
        load_models(load_config(Path(name)) if index else IndexConfig(model=name), None)
