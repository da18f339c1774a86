"""What ragkv runs on, which model is judged, and what to do about an index, as far as that is cheap to find out."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from ragkv.store import StoreStats

if TYPE_CHECKING:
    from ragkv.evaluation.subject import Subject

__all__ = ["Environment", "JudgedModel", "remedies"]

_PACKAGES = ("torch", "transformers", "lmdb", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Versions by package, and descriptions of the devices, the default device first."""

    versions: dict[str, str]
    devices: tuple[str, ...]

    @classmethod
    def look(cls) -> Environment:
        import torch

        import ragkv

        versions = {"ragkv": ragkv.__version__, "python": platform.python_version()}
        for package in _PACKAGES:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:  # some builds of torch carry no metadata
                versions[package] = "unknown"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        devices = [f"cpu: {platform.machine()}, {cores} cores, {torch.get_num_threads()} threads"]
        if torch.cuda.is_available():
            found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
            devices = [f"cuda:{i}: {p.name}, {p.total_memory / 2**30:.0f} GiB" for i, p in enumerate(found)] + devices
        return cls(versions=versions, devices=tuple(devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedModel:
    """The model that is judged. `same`: its fingerprint is that of the index's chunks."""

    model: str
    parameters: int
    dtype: str
    device: str
    fingerprint: str
    same: bool

    @classmethod
    def of(cls, subject: Subject) -> JudgedModel:
        model = subject.model
        return cls(
            model=subject.name,
            parameters=model.parameters,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            fingerprint=subject.fingerprint,
            same=subject.current,
        )


def remedies(stats: StoreStats, subject: Subject | None) -> list[str]:
    """One sentence for each thing that the user should do about the index."""
    found = []
    if not stats.chunks:
        found.append("The index holds no chunk: ragkv ingest PATH.")
    if subject is not None and subject.own and not subject.current:
        found.append("The model changed since the index was made: run ragkv ingest on all of its documents again.")
    if subject is not None and not subject.own:
        found.append(f"To answer with {subject.name}, ingest the documents into an index of its own.")
    if stats.unreadable:
        found.append(f"{stats.unreadable} KV records are damaged; run ragkv verify, then ragkv repair.")
    if stats.orphans:
        found.append(f"{stats.orphans} KV records are needed by no chunk; ragkv gc frees their space.")
    return found
