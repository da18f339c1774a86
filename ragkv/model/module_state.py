"""Whether a torch module still computes what it computed before: `ModuleState`.

What the runtime keeps between passes (recordings, CUDA graphs, KV that it prefilled) belongs to the weights and modules
that it was made with. Training, adapters, hooks and assigned weights change them from outside, without a notice.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

_BOOKKEEPING = ("backward", "state_dict", "_with_kwargs", "_always_called", "_non_persistent")
"""Parts of the names of a module's attributes that no forward pass reads, or that change with others."""
_TORCHS_OWN = frozenset({"_parameters", "_buffers", "_modules"})
_DEPTH = 4
"""Nested containers of an attribute that are compared: PEFT's settings are mappings of lists."""
_SAMPLE_BYTES = 64
_VERSION = operator.attrgetter("_version")


class ModuleState:
    """The modules below `module` at one time: their classes, attributes and hooks, and the address of every tensor.

    `same` takes 0.1 ms for 30 layers: containers are compared with copies of theirs by Python's own comparison, which
    does not look into an object that is still the same. What reads the tensors' memory again also reads what was
    written there meanwhile; what has kept numbers asks `same_numbers`. What is written through `Tensor.data` does not
    change a tensor's version, so some bytes are compared as well.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._classes: list[Any] = [*map(type, self._modules)]
        self._forwards = [(kind, kind.forward) for kind in dict.fromkeys(self._classes)]
        self._containers: list[Any] = []
        self._copies: list[Any] = []
        self._empty: list[Any] = []
        """Hooks' containers that were empty; other empty ones change nothing until a module's code changes too."""
        self._holders: list[Any] = []
        self._keys: list[Any] = []
        self._single: list[Tensor] = []
        self._tensors: list[Tensor] = []
        configs = {id(value): value for each in self._modules for value in vars(each).values() if _is_config(value)}
        seen: set[int] = set()
        for holder in (*map(vars, self._modules), *map(vars, configs.values()), *_global_hooks()):
            self._add(holder, seen, _DEPTH)
        self._placed = [tensor for tensor in self._tensors if _has_address(tensor)]
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._addresses = [*map(Tensor.data_ptr, self._placed)]
        self._versions = [*map(_VERSION, self._counted)]
        self._samples = [*self._read_samples()]

    def _add(self, container: Any, seen: set[int], depth: int) -> None:
        if id(container) in seen or not depth:
            return
        seen.add(id(container))
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            if isinstance(value, Tensor):
                if value.numel() == 1 and not isinstance(container, set | frozenset):  # an equal one would pass `==`
                    self._holders.append(container)
                    self._keys.append(key)
                    self._single.append(value)
                self._tensors.append(value)
            elif isinstance(value, dict | list | set | tuple) and not _ignored(key):
                if not value and isinstance(key, str) and "hooks" in key:
                    self._empty.append(value)
                elif value or key not in _TORCHS_OWN:
                    self._add(value, seen, depth - 1)
        if not isinstance(container, tuple):
            self._containers.append(container)
            self._copies.append(container.copy())

    def same(self) -> bool:
        """Whether nothing has changed that a pass reads, as far as Python can see."""
        try:
            return (
                self._addresses == [*map(Tensor.data_ptr, self._placed)]
                and self._containers == self._copies
                and not any(self._empty)
                and self._classes == [*map(type, self._modules)]
                and all(kind.forward is forward for kind, forward in self._forwards)
                and all(map(operator.is_, map(operator.getitem, self._holders, self._keys), self._single))
            )
        except (LookupError, TypeError, ValueError, RuntimeError):  # an attribute that was replaced cannot be compared
            return False

    def same_numbers(self) -> bool:
        """`same`, and whether nobody has written into a tensor, by its version and some of its bytes."""
        written = self._versions != [*map(_VERSION, self._counted)] or self._samples != [*self._read_samples()]
        return self.same() and not written

    def _read_samples(self) -> Iterator[bytes]:
        for tensor in self._placed:
            if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous():
                size = min(tensor.nbytes, _SAMPLE_BYTES)
                for start in (0, (tensor.nbytes - size) // 2, tensor.nbytes - size) if size else ():
                    yield ctypes.string_at(tensor.data_ptr() + start, size)


def _ignored(key: Any) -> bool:
    return isinstance(key, str) and any(part in key for part in _BOOKKEEPING)


def _is_config(value: object) -> bool:
    return hasattr(value, "get_text_config")


def _global_hooks() -> Iterator[dict[int, Any]]:
    yield torch_modules._global_forward_hooks
    yield torch_modules._global_forward_pre_hooks


def _has_address(tensor: Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True
