"""Where a model runs: one device, or several that its layers are split over; and what a processor is quick with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from ragkv.errors import ModelLoadError

__all__ = ["computes_in", "pick_device", "pick_devices", "shares"]

_AUTO = "auto"
_FILLED = 0.7
"""The share of a GPU's free memory that a model may fill; the rest is for KV and for what a forward pass makes."""


def pick_device(device: str | None) -> torch.device:
    """The device asked for, or CUDA where there is one, else the CPU; of several ("cuda:0,cuda:1"), the first."""
    if device is None or device == _AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return _device(device.split(",")[0])


def pick_devices(device: str | None, nbytes: Callable[[], int]) -> tuple[torch.device, ...]:
    """The devices that a model of `nbytes()` bytes is put on: one, or those that its layers are split over.

    "auto" is one GPU if the model fits on it, else all. A list names them. Raises ModelLoadError for a device that is
    not there, and for the CPU in a list: nothing is moved to a GPU for each token.
    """
    if device == _AUTO and torch.cuda.device_count() > 1:
        found = tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
        return found if nbytes() > _FILLED * torch.cuda.mem_get_info(found[0])[0] else found[:1]
    if device is None or "," not in device:
        return (pick_device(device),)
    devices = tuple(dict.fromkeys(_device(name) for name in device.split(",")))
    if len(devices) > 1 and any(each.type == "cpu" for each in devices):
        raise ModelLoadError(
            f"Device {device!r} splits a model between the CPU and other devices, which ragkv does not do; name GPUs "
            "alone, or the CPU alone."
        )
    return devices


def shares(devices: tuple[torch.device, ...]) -> tuple[float, ...]:
    """How much of a split model each device takes: by its free memory, which torch tells of GPUs only."""
    if all(device.type == "cuda" for device in devices):
        free = [float(torch.cuda.mem_get_info(device)[0]) for device in devices]
        return tuple(each / sum(free) for each in free)
    return (1 / len(devices),) * len(devices)


def computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device has units for a dtype: a processor without them is many times slower than in float32."""
    if device.type != "cpu" or dtype not in _UNITS:
        return True
    able = _capabilities()
    return any(able.get(name) for name in _UNITS[dtype])


_UNITS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "avx10_2", "fp16_arith"),
}
"""What cpuinfo calls the units that multiply in a dtype, of x86 and of ARM."""


@cache
def _capabilities() -> dict[str, object]:
    told = getattr(torch.cpu, "get_capabilities", None)
    if told is not None:
        return dict(told())
    private = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_fp16": "_is_amx_fp16_supported"}
    return {name: getattr(torch.cpu, asked, bool)() for name, asked in private.items()}


def _device(name: str) -> torch.device:
    try:
        found = torch.device(name.strip())
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise ModelLoadError(f"Device {name!r} is not available: {str(error).splitlines()[0]}") from error
    return found
