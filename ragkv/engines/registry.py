"""Engines by name, loaded when asked for; a package of yours adds its own by the entry-point group `ragkv.engines`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ragkv.config import build_config
from ragkv.engines.base import Engine
from ragkv.errors import ConfigError, UsageError

__all__ = ["engine_class", "engine_names", "make_engine"]

GROUP = "ragkv.engines"


@cache
def _found() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def engine_names() -> list[str]:
    """All names that `make_engine` knows, sorted."""
    return sorted(_found())


def engine_class(name: str) -> type[Engine]:
    """The engine's class; UsageError with the known names otherwise."""
    if name not in _found():
        raise UsageError(f"Unknown engine {name!r}; choose one of {', '.join(engine_names())}.")
    loaded: type[Engine] = _found()[name].load()
    return loaded


def make_engine(name: str, tuning: Mapping[str, Mapping[str, Any]]) -> Engine:
    """An engine with its own `[tuning.<name>]` table."""
    kind = engine_class(name)
    try:
        config = build_config(kind.Config, tuning.get(name, {}), f"[tuning.{name}]")
    except TypeError as error:
        raise ConfigError(f"[tuning.{name}] does not fit: {error}.") from error
    return kind(config)
