"""Import paths and names of the public API before the modules were merged: they work for one more release, and warn.

`MOVED` maps an old dotted name to the new one. An old module that no longer exists is imported as a module that only
knows its moved names. A class keeps the old name of a member as a `RenamedMember`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

__all__ = ["MOVED", "RenamedMember", "install", "moved_names"]

_ENGINES = {
    "Ask": "Operation",
    "Choose": "Sample",
    "Greedy": "Argmax",
    "Leave": "Release",
    "Read": "Forward",
    "Row": "TokenSequence",
    "Segment": "PlacedChunk",
    "Until": "WaitFor",
    "able_engines": "supported_engines",
    "refusal": "unsupported_reason",
    "require_able": "require_supported",
}
_PROGRAM = ("Program", "Shared", "answer_from")

MOVED = {
    "ragkv.attention.kv.Segment": "ragkv.attention.kv.PlacedChunk",
    "ragkv.attention.row.Group": "ragkv.attention.sequence.ChunkGroup",
    "ragkv.attention.row.Row": "ragkv.attention.sequence.TokenSequence",
    **{f"ragkv.engines.{old}": f"ragkv.engines.{new}" for old, new in _ENGINES.items()},
    **{f"ragkv.engines.program.{old}": f"ragkv.engines.{new}" for old, new in _ENGINES.items()},
    **{f"ragkv.engines.program.{name}": f"ragkv.engines.{name}" for name in _PROGRAM},
    "ragkv.engines.stacked.Stacked": "ragkv.engines.ippd.Stacked",
    "ragkv.ingest.Limits": "ragkv.ingest.ParseLimits",
    "ragkv.ingest.Recipe": "ragkv.ingest.IngestFingerprint",
    "ragkv.ingest.supplied": "ragkv.ingest.from_bytes",
    "ragkv.pipeline.Asked": "ragkv.pipeline.QuestionWithOptions",
    "ragkv.planning.census.Census": "ragkv.planning.plan.CorpusEstimate",
    "ragkv.runtime.Limits": "ragkv.runtime.RuntimeLimits",
    "ragkv.runtime.decoder.Generation": "ragkv.runtime.decoding.Generation",
    "ragkv.runtime.stream.Stream": "ragkv.runtime.runtime.Stream",
    "ragkv.store.Finding": "ragkv.store.Problem",
    "ragkv.store.Ledger": "ragkv.store.UseTotals",
    "ragkv.store.Mender": "ragkv.store.RepairSource",
    "ragkv.store.Slab": "ragkv.store.KVSlice",
    "ragkv.store.codec.Codec": "ragkv.store.codecs.Codec",
    "ragkv.store.codec.Raw": "ragkv.store.codecs.Raw",
    "ragkv.store.codec.Zstd": "ragkv.store.codecs.Zstd",
    "ragkv.store.environment.Store": "ragkv.store.store.Store",
    "ragkv.store.quantiser.Int4": "ragkv.store.codecs.Int4",
    "ragkv.store.quantiser.Int8": "ragkv.store.codecs.Int8",
    "ragkv.types.Need": "ragkv.types.Capability",
}
_MODULES = {old.rpartition(".")[0] for old in MOVED}


def moved_names(module: str) -> Callable[[str], Any]:
    """A `__getattr__` for `module` that finds names which were moved or renamed."""

    def find(name: str) -> Any:
        new = MOVED.get(f"{module}.{name}")
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is {new} now.", DeprecationWarning, stacklevel=2)
        holder, _, current = new.rpartition(".")
        return getattr(import_module(holder), current)

    return find


class RenamedMember:
    """The old name of a property or method of a public class: it is the `new` one, and warns."""

    def __init__(self, new: str) -> None:
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        warnings.warn(f"{owner.__name__}.{self._old} is {self._new} now.", DeprecationWarning, stacklevel=2)
        return getattr(instance, self._new)


class _MovedModules(MetaPathFinder, Loader):
    """Finds the old modules. It is last on `sys.meta_path`, so an existing module is never shadowed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in _MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = moved_names(module.__name__)


def install() -> None:
    """Make the old modules importable; called once, when `ragkv` is imported."""
    sys.meta_path.append(_MovedModules())
