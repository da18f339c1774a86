"""A checkpoint whose weights are packed: which package unpacks them, and whether they are computed with as they are.

transformers decides while it loads whether it keeps packed weights or unpacks them, by what it finds on the machine. KV
of one differs from KV of the other, so ragkv decides first, and the fingerprint knows (`Quantised.regime`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ragkv.errors import MissingExtraError

if TYPE_CHECKING:
    import torch

__all__ = ["Quantised"]

_NEEDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "awq": ("gptq", ("gptqmodel", "accelerate")),
    "bitsandbytes": ("bitsandbytes", ("bitsandbytes", "accelerate")),
    "compressed-tensors": ("compressed-tensors", ("compressed_tensors", "accelerate")),
    "fp8": ("split", ("accelerate",)),
    "gguf": ("gguf", ("gguf", "accelerate")),
    "gptq": ("gptq", ("optimum", "gptqmodel", "accelerate")),
    "mxfp4": ("split", ("accelerate",)),
    "torchao": ("torchao", ("torchao", "accelerate")),
}
"""Method, as `quant_method` names it -> the extra of ragkv that brings what transformers needs, and these modules."""

_NATIVE = {"fp8": (8, 9), "mxfp4": (7, 5)}
"""Methods that a GPU computes with as they are from this compute capability on; elsewhere they are unpacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """How a packed checkpoint is run on a device."""

    method: str
    unpacked: bool
    """Its weights become ordinary ones when it is loaded, so that it needs the memory of an ordinary model."""

    @classmethod
    def of(cls, config: Mapping[str, Any], device: torch.device) -> Quantised | None:
        """By `quantization_config` of a config.json; None for ordinary weights."""
        told = config.get("quantization_config")
        if not isinstance(told, Mapping):
            return None
        method = str(told.get("quant_method", "bitsandbytes" if "load_in_4bit" in told else "unknown"))
        return cls(method=method, unpacked=method == "gguf" or (method in _NATIVE and not _native(method, device)))

    @property
    def regime(self) -> str:
        """What of it changes numbers, beside the weights and the configuration, which are known by their digest."""
        return f"{self.method}{'-unpacked' if self.unpacked else ''}"

    @property
    def settings(self) -> dict[str, Any]:
        """What `quantization_config` must say, so that transformers does what is said here."""
        return {"dequantize": self.unpacked} if self.method in _NATIVE else {}

    def require(self, name: str) -> None:
        """MissingExtraError if a package is not installed that transformers needs to load model `name`."""
        extra, modules = _NEEDS.get(self.method, ("", ()))
        missing = [module for module in modules if find_spec(module) is None]
        if missing:
            raise MissingExtraError(
                f"Model {name!r} is quantised ({self.method}), which needs {' and '.join(missing)}; install it with: "
                f'pip install "ragkv[{extra}]"'
            )


def _native(method: str, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    import torch

    kernels = method != "mxfp4" or all(find_spec(module) is not None for module in ("triton", "kernels"))
    return kernels and torch.cuda.get_device_capability(device) >= _NATIVE[method]
