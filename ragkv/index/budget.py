"""How much KV a process may keep in memory between queries."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.config import byte_count

if TYPE_CHECKING:
    import torch

    from ragkv.attention.kv import Place

__all__ = ["VARIABLE", "memory_budget", "memory_of"]

VARIABLE = "RAGKV_MEMORY_BUDGET"
_CAP = 8 << 30
_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_budget(setting: int | str, place: Place) -> int:
    """The bytes that `memory_budget` of the index means, or the environment variable that overrides it.

    "auto" is a quarter of the memory, at most 8 GiB: of the GPU if the model is on one (of a split model, of what its
    layers' KV may take of each), else of the machine, or of the container if that has less. Raises `ConfigError` if the
    variable is not a number of bytes.
    """
    name, value = ("memory_budget", setting) if not os.environ.get(VARIABLE) else (VARIABLE, os.environ[VARIABLE])
    return min(memory_of(place) // 4, _CAP) if value == "auto" else byte_count(name, value)


def memory_of(place: Place) -> int:
    """Bytes of the device that the model is on; beside a CPU, of the machine, or of the container that has less.

    Of a split model, as many as fill the first device that is full when every layer takes as much.
    """
    if not isinstance(place, tuple):
        return _memory_of(place)
    return min(_memory_of(device) * len(place) // layers for device, layers in Counter(place).items())


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, _CGROUPS):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(limits)
