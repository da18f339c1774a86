"""The form of every benchmark's result: each figure beside its baseline (docs/design.md)."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

__all__ = ["Report", "Row", "machine", "versions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. `ratio` > 1 means better than the baseline."""

    name: str
    value: float
    unit: str
    baseline: str
    baseline_value: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All figures of one run."""

    bench: str
    machine: str
    versions: dict[str, str]
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv bench NAME --json` prints."""
        return asdict(self)


def machine(device: str) -> str:
    """A line that names the processor, its cores and the device."""
    import torch

    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:  # noqa: PTH123 - not a file of ours
            name = next((line.split(":", 1)[1].strip() for line in stream if line.startswith("model name")), name)
    except OSError:
        name = platform.machine()
    gpu = f", {torch.cuda.get_device_name(device)}" if device.startswith("cuda") else ""
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads{gpu}"


def versions(*packages: str) -> dict[str, str]:
    """The versions of the packages that a figure depends on."""
    return {package: version(package) for package in ("ragkv", "torch", "transformers", *packages)}
