"""Transfers between the host and `pretend`'s device, each with the line that caused it, following CUDA's rules.

These rules state which tensors are refused, and when the host must wait.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ragkv.runtime import graphs


class Crossing(NamedTuple):
    """A transfer between host and device. `place` is `ragkv/…/file.py:line`, `function` the function of that line.

    `op` is torch's name of the operation, `bytes` the amount, with `dtype` and `shape`. `blocking`: the host waits for
    all pending work of the device; a copy with `non_blocking=True` does not. `step` is the number of the forward pass,
    from 1, including what follows it.
    """

    place: str
    op: str
    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    function: str
    blocking: bool
    step: int


@dataclass
class Waits:
    """All transfers in order: `reads` by the host and `uploads` to the device."""

    reads: list[Crossing] = field(default_factory=list)
    uploads: list[Crossing] = field(default_factory=list)
    step: int = 0

    @property
    def blocking(self) -> list[Crossing]:
        """Transfers for which the host waited: a plain upload waits too (CUDA copies, then synchronises)."""
        return [crossing for crossing in (*self.reads, *self.uploads) if crossing.blocking]

    @property
    def steps(self) -> list[Waits]:
        """The transfers by forward pass; the first item has those before any pass."""
        return [self._of(step) for step in range(self.step + 1)]

    def _of(self, step: int) -> Waits:
        reads, uploads = ([c for c in crossings if c.step == step] for crossings in (self.reads, self.uploads))
        return Waits(reads=reads, uploads=uploads, step=step)


_counting: list[Waits] = []


@contextmanager
def counting(model: Any = None) -> Iterator[Waits]:
    """Record the transfers within the block, in all threads.

    A call of `model`, a LanguageModel or any module, begins a new step, and so does a replay of what was captured of
    it.
    """
    waits, run = Waits(), graphs._Captured.run

    def begin() -> None:
        waits.step += not _get_current_dispatch_mode_stack()  # recording is not running

    def replay(*given: Any) -> torch.Tensor:
        begin()
        return run(*given)

    module = getattr(model, "module", model)

    def call(
        self: Any, *given: Any, **named: Any
    ) -> Any:  # not a hook: KV and captures of a module with one are not used
        if self is module:
            begin()
        return self._wrapped_call_impl(*given, **named)

    _counting.append(waits)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if model is not None:
                patch.setattr(graphs._Captured, "run", replay)
                patch.setattr(type(module), "__call__", call, raising=False)
            yield waits
    finally:
        _counting[:] = [other for other in _counting if other is not waits]


def count_read(op: str, tensor: torch.Tensor, *, blocking: bool = True) -> None:
    """The host reads from the device."""
    for waits in _counting:
        waits.reads.append(_crossing(op, tensor, blocking, waits.step))


def count_upload(op: str, tensor: torch.Tensor, *, blocking: bool = True) -> None:
    """The host uploads to the device."""
    for waits in _counting:
        waits.uploads.append(_crossing(op, tensor, blocking, waits.step))


def _crossing(op: str, tensor: torch.Tensor, blocking: bool, step: int) -> Crossing:
    place, function = caller()
    size, shape = tensor.numel() * tensor.element_size(), tuple(tensor.shape)
    return Crossing(place, op, size, tensor.dtype, shape, function, blocking, step)


def caller() -> tuple[str, str]:
    """The calling line of ragkv or transformers, otherwise the nearest one outside torch; and its function."""
    frame, nearest = sys._getframe(1), ("?", "?")
    while frame is not None:
        module = frame.f_globals.get("__name__", "?")
        found = f"{module.replace('.', '/')}.py:{frame.f_lineno}", frame.f_code.co_qualname
        room = module.partition(".")[0]
        if room in ("ragkv", "transformers"):
            return found
        if nearest == ("?", "?") and room not in ("torch", "pretend", "crossing"):
            nearest = found
        frame = frame.f_back
    return nearest


_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
# ops that take a 0-dim tensor of the host, in addition to those that torch tags as pointwise
_BY_VALUE = {"fill_", "fill", "masked_fill", "masked_fill_", "index_put", "index_put_", "_index_put_impl_"}
# multinomial checks on the host that its input is a distribution
_WAITING = {"_local_scalar_dense", "equal", "multinomial"}
_WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

generators: set[int] = set()
"""Addresses of the device's generators: torch passes them on in new Python objects."""


def refuse_strangers(name: str, op: Any, args: Any, kwargs: Any, leaves: list[Any]) -> None:
    """Raise where CUDA raises: for host tensors beside device tensors, unless CUDA accepts them.

    CUDA accepts a 0-dim tensor as a scalar, which is passed by value, and the indices of an indexing op, which are
    copied.
    """
    if name in _INDEXING:
        for index in args[1]:
            if isinstance(index, torch.Tensor) and index.device.type == "cpu":
                count_upload(name, index)
            elif isinstance(index, torch.Tensor) and index.device != args[0].device:
                raise RuntimeError(f"indices should be on the device of the indexed tensor ({args[0].device})")
        leaves = [args[0], *args[2:]]
    by_value = torch.Tag.pointwise in op.tags or name in _BY_VALUE
    there = {str(leaf.device) for leaf in leaves if isinstance(leaf, torch.Tensor)} - {"cpu"}
    if len(there) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two ({op}: {there})")
    for leaf in leaves:
        if isinstance(leaf, torch.Generator) and leaf._cdata not in generators:
            raise RuntimeError(f"Expected a 'pretend' device type for generator but found 'cpu' ({op})")
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
            continue
        written = leaf is kwargs.get("out") or (name.endswith("_") and leaf is args[0])
        if written or leaf.ndim or not by_value:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, pretend:0 and cpu! "
                f"({op} of {leaf.dtype} {tuple(leaf.shape)} at {caller()[0]})"
            )


def waits_for_numbers(name: str, op: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host needs numbers from the device to continue: for a Python number, or for the result's shape."""
    if name in _INDEXING:
        masked = any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return masked and (len(args) < 3 or args[2].numel() != 1)  # assigning one number behind a mask is a masked_fill
    payload = kwargs.get("output_size") is not None  # repeat_interleave
    return name in _WAITING or not (payload or _WAITING_TAGS.isdisjoint(op.tags))
