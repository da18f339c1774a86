"""Engines by name, loaded when asked for; a package of yours adds its own by the entry-point group `ragkv.engines`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragkv.boundary.plugin import PluginRegistry
from ragkv.config import build_config
from ragkv.engines.base import Engine
from ragkv.errors import ConfigError, UsageError

__all__ = ["engine_class", "engine_names", "make_engine"]

ENGINES = PluginRegistry("ragkv.engines")


def engine_names() -> list[str]:
    """All names that `make_engine` knows, sorted."""
    return ENGINES.names()


def engine_class(name: str) -> type[Engine]:
    """The engine's class. UsageError names the known ones; ConfigError when a package's engine cannot be imported."""
    if name not in ENGINES:
        raise UsageError(f"Unknown engine {name!r}; choose one of {', '.join(engine_names())}.")
    try:
        loaded: type[Engine] = ENGINES.load(name)
    except ImportError as error:
        raise ConfigError(f"Engine {name!r} is installed but cannot be loaded ({error}); reinstall it.") from error
    return loaded


def make_engine(name: str, tuning: Mapping[str, Mapping[str, Any]]) -> Engine:
    """An engine with its own `[tuning.<name>]` table."""
    kind = engine_class(name)
    try:
        config = build_config(kind.Config, tuning.get(name, {}), f"[tuning.{name}]")
    except TypeError as error:
        raise ConfigError(f"[tuning.{name}] does not fit: {error}.") from error
    return kind(config)
