"""Find engines, codecs, loaders, embedders and rerankers by name: ragkv's own and those of installed packages.

A package adds plug-ins under an entry-point group. Until a plug-in is used, only package metadata is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from ragkv.errors import RagkvError, UsageError, extra

logger = logging.getLogger(__name__)


class PluginRegistry:
    """The plug-ins of one entry-point group, by name.

    `built_in` are ragkv's own, as name to "module:attribute"; an installed package cannot replace them. `key` maps an
    entry's name to the name that it is found by.
    """

    def __init__(
        self, group: str, *, built_in: Mapping[str, str] | None = None, key: Callable[[str], str] | None = None
    ) -> None:
        self._group = group
        self._key = key
        self._built_in = {name: EntryPoint(name, value, group) for name, value in (built_in or {}).items()}

    @cached_property
    def added(self) -> dict[str, EntryPoint]:
        """The entry points of the group by key, less the built-in ones. Cached: it reads every package's metadata.

        If two packages add the same key, ragkv's own entry wins, else the first in alphabetical order. A warning
        names the other.
        """
        by_key: dict[str, EntryPoint] = {}
        for entry in sorted(entry_points(group=self._group), key=_rank):
            key = self._key(entry.name) if self._key else entry.name
            kept = by_key.setdefault(key, entry)
            if kept.value != entry.value:
                kind = self._group.rpartition(".")[2]
                logger.warning("two %s for %s: %s is used, not %s", kind, entry.name, kept.value, entry.value)
        return {key: entry for key, entry in by_key.items() if key not in self._built_in}

    def names(self) -> list[str]:
        """Every name that `load` knows, sorted."""
        return sorted({*self._built_in, *self.added})

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or name in self.added

    def load(self, name: str) -> Any:
        """Import the plug-in `name`; KeyError if it is unknown.

        Every error while importing is an ImportError, except a `RagkvError`, which already says what to do.
        """
        # Built-in plug-ins first, because they need no package metadata.
        entry = self._built_in.get(name) or self.added[name]
        try:
            return entry.load()
        except (ImportError, RagkvError):
            raise
        except AttributeError as error:
            raise ImportError(str(error)) from error
        except Exception as error:  # it is another package's code: a syntax error, say
            raise ImportError(f"{type(error).__name__}: {error}") from error


ENGINES = PluginRegistry("ragkv.engines")
"""All engines. Their names are known without `ragkv.engines`, whose import loads torch."""


def require_engine(name: str) -> None:
    """UsageError, which names the known engines, for an unknown one."""
    if name not in ENGINES:
        raise UsageError(f"Unknown engine {name!r}; choose one of {', '.join(ENGINES.names())}.", param="engine")


def join_ray(address: str, **options: Any) -> Any:
    """The module `ray`, connected to the cluster at `address`: "local" starts one on this machine, "auto" finds it.

    MissingExtraError without Ray; UsageError for no cluster.
    """
    with extra("--ray needs Ray", "ray"):
        import ray
    try:
        ray.init(address, log_to_driver=False, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"There is no Ray cluster at {address} ({error}).") from error
    return ray


def _rank(entry: EntryPoint) -> tuple[str, bool, str]:
    return entry.name, not entry.value.startswith("ragkv."), entry.value


@cache
def kernel_module(name: str) -> ModuleType | None:
    """A module of kernels that are compiled for this machine; None without numba, and for other processors."""
    try:
        return import_module(name)
    except ImportError as error:
        logger.info("torch's kernels are used, because those of %s cannot be compiled: %s", name, error)
        return None
