"""CUDA graphs without CUDA, for `ragkv.runtime.graphs`: the ops between `begin` and `end` are recorded.

The outputs of a recorded piece are overwritten at its end, as if it had not run, and a replay calls the same ops on the
same tensors. So anything that was computed outside of the pieces, or reads memory that another pass has changed, gives
NaN or a wrong number.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from crossing import waits_for_numbers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragkv.runtime import graphs


def use(patch: pytest.MonkeyPatch) -> None:
    """Rerun whole steps, and replay pieces."""
    patch.setattr(graphs, "Capture", RecordedCapture)


def _memory(tensor: Any) -> int:
    return getattr(tensor, "held", tensor).untyped_storage().data_ptr()


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        """(op, args, kwargs, the tensors that it creates)"""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if waits_for_numbers(op._schema.name.removeprefix("aten::"), op, args, kwargs):
            raise RuntimeError("operation not permitted when stream is capturing")
        found = op(*args, **kwargs)
        given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and _memory(leaf) not in given]
        if made or op._schema.is_mutable:
            self.calls.append((op, args, kwargs, made))
        return found

    def spoil(self) -> None:
        for _, _, _, made in self.calls:
            for tensor in made:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)

    def replay(self) -> None:
        for op, args, kwargs, made in self.calls:
            again = op(*args, **kwargs)
            fresh = [leaf for leaf in tree_leaves(again) if isinstance(leaf, Tensor)]
            for tensor, one in zip(made, fresh, strict=False) if made else ():
                tensor.copy_(one)


class RecordedCapture:
    """A recording replacement for `graphs.Capture`."""

    shares = True

    def __init__(self, device: torch.device) -> None:
        self._mode: _Recording | None = None

    def whole(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return work

    @contextmanager
    def aside(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._mode is not None:
                self.end()

    def begin(self) -> None:
        self._mode = _Recording()
        self._mode.__enter__()

    def end(self) -> Callable[[], None]:
        assert self._mode is not None
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        mode.spoil()
        return mode.replay
