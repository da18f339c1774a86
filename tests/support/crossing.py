"""What crosses between the host and `pretend`'s device, each with the line that caused it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import recordedgraph
import torch

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
        waits.step += not recordedgraph.recording()

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
