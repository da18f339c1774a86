"""What crosses between the host and `pretend`'s device, each with the line that caused it, and what CUDA does there.

That is: which tensors it refuses, and when the host must wait.
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
    """One time that host and device met. `place` is `ragkv/…/file.py:line`, `function` the function of that line.

    `op` is torch's name of what was done, `bytes` what crossed, of `dtype` and `shape`. `blocking`: the host waits
    for all that the device still has to do; a copy with `non_blocking=True` does not. `step` is the forward pass,
    from 1; what follows a pass counts as its own.
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
    """Everything that crossed: `reads` by the host and `uploads` to the device, in order."""

    reads: list[Crossing] = field(default_factory=list)
    uploads: list[Crossing] = field(default_factory=list)
    step: int = 0

    @property
    def blocking(self) -> list[Crossing]:
        """Where the host waited for the device: a plain copy to it waits too (CUDA copies, then synchronises)."""
        return [crossing for crossing in (*self.reads, *self.uploads) if crossing.blocking]

    @property
    def steps(self) -> list[Waits]:
        """The same by forward pass; the first of the list is what came before any."""
        return [self._of(step) for step in range(self.step + 1)]

    def _of(self, step: int) -> Waits:
        reads, uploads = ([c for c in crossings if c.step == step] for crossings in (self.reads, self.uploads))
        return Waits(reads=reads, uploads=uploads, step=step)


_counting: list[Waits] = []


@contextmanager
def counting(model: Any = None) -> Iterator[Waits]:
    """Counts what crosses within the block, in all threads.

    `model`, a LanguageModel or any module, begins a new step whenever it is called, or what was captured of it is run.
    """
    waits, run = Waits(), graphs._Captured.run

    def begin(*_: Any) -> None:
        waits.step += not _get_current_dispatch_mode_stack()  # what is recorded is not run

    def replay(*given: Any) -> torch.Tensor:
        begin()
        return run(*given)

    hook = None if model is None else getattr(model, "module", model).register_forward_pre_hook(begin)
    _counting.append(waits)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if model is not None:
                patch.setattr(graphs._Captured, "run", replay)
            yield waits
    finally:
        _counting[:] = [other for other in _counting if other is not waits]
        if hook is not None:
            hook.remove()


def count_read(op: str, tensor: torch.Tensor, *, blocking: bool = True) -> None:
    """The host got these numbers of the device."""
    for waits in _counting:
        waits.reads.append(_crossing(op, tensor, blocking, waits.step))


def count_upload(op: str, tensor: torch.Tensor, *, blocking: bool = True) -> None:
    """The device got these numbers of the host."""
    for waits in _counting:
        waits.uploads.append(_crossing(op, tensor, blocking, waits.step))


def _crossing(op: str, tensor: torch.Tensor, blocking: bool, step: int) -> Crossing:
    place, function = caller()
    size, shape = tensor.numel() * tensor.element_size(), tuple(tensor.shape)
    return Crossing(place, op, size, tensor.dtype, shape, function, blocking, step)


def caller() -> tuple[str, str]:
    """The nearest line of ragkv or transformers that led here, or else of whatever is not torch; and its function."""
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
# ops that take a 0-dim tensor of the host, beside those that torch tags as pointwise
_BY_VALUE = {"fill_", "fill", "masked_fill", "masked_fill_", "index_put", "index_put_", "_index_put_impl_"}
# the last one makes sure on the host that its shares are probabilities
_WAITING = {"_local_scalar_dense", "equal", "multinomial"}
_WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

generators: set[int] = set()
"""Addresses of the generators that were made for the device: torch hands them on in new Python objects."""


def refuse_strangers(name: str, op: Any, args: Any, kwargs: Any, leaves: list[Any]) -> None:
    """Raise where CUDA raises: tensors of the host beside those of the device, but for what CUDA takes from there.

    That is a 0-dim tensor among numbers, which is passed by value, and the indices of an indexing, which are copied.
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
    """Whether the host must know numbers of the device to go on: for a Python number, or for the result's shape."""
    if name in _INDEXING:
        masked = any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        return masked and (len(args) < 3 or args[2].numel() != 1)  # one number behind a mask is a masked_fill
    payload = kwargs.get("output_size") is not None  # repeat_interleave
    return name in _WAITING or not (payload or _WAITING_TAGS.isdisjoint(op.tags))
