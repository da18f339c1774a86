"""A simulated device: every op runs on the CPU, but operations that an accelerator forbids or waits for are detected.

`pretend:0` is torch's PrivateUse1 backend, written in Python. Its tensors wrap a CPU tensor and claim to be on the
device; an op on them runs on the wrapped tensors. Host and device tensors in one op raise, as on CUDA, and so do those
of `pretend:0` and `pretend:1`. Transfers between host and device are recorded (`crossing`):

    with pretend.counting(model) as waits:    # the fixture `pretend_device` names the device
        ...
    waits.reads                               # [Crossing(place="ragkv/...py:98", op="_local_scalar_dense", bytes=8, …)]
    waits.steps[3].uploads                    # of the third forward pass, and of what follows until the fourth
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import packedkernel
import pytest
import recordedgraph
import torch
from crossing import count_read, count_upload, counting, generators, refuse_strangers, waits_for_numbers
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ragkv.attention import varlen
from ragkv.runtime import graphs

__all__ = ["counting", "device"]

DEVICE = "pretend:0"
# torch would create these by resizing an empty tensor, which a wrapper cannot follow
_FACTORIES = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm")
# torch.tensor(list, device=…) calls these without __torch_dispatch__
_LIFTING = ("copy_", "lift_fresh")
_HOST = torch.device("cpu")


class PretendTensor(torch.Tensor):
    """A tensor that claims to be on the device; `held` is the CPU tensor with its numbers."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: torch.Tensor, device: torch.device | str = DEVICE) -> PretendTensor:
        with torch.inference_mode(False):  # torch only marks views of plain tensors as views
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                real.size(),
                strides=real.stride(),
                storage_offset=real.storage_offset(),
                dtype=real.dtype,
                device=torch.device(device),
            )
        made.held = real
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"pretend({self.held!r})"


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    if graphs._composite(op):  # under inference_mode a composite op is not decomposed yet
        return op.decompose(*args, **kwargs)
    name = op._schema.name.removeprefix("aten::")
    real_args, real_kwargs = _held(args), {key: _held(value) for key, value in kwargs.items()}
    if name == "copy_":
        _count_copy(name, args[1], args[0].device, blocking=not any(args[2:]))
        op(*real_args, **real_kwargs)
        return args[0]
    target = kwargs.get("device")
    if name == "_to_copy" and target is not None and target.type == "cpu":
        _count_copy(name, args[0], target, blocking=not kwargs.get("non_blocking"))
        return op(*real_args, **real_kwargs)
    leaves = [*_leaves(args), *_leaves(list(kwargs.values()))]
    refuse_strangers(name, op, args, kwargs, leaves)
    out = op(*real_args, **real_kwargs)
    if waits_for_numbers(name, op, args, kwargs):
        first = next(_leaves(out))
        count_read(name, first if isinstance(first, torch.Tensor) else torch.tensor(first))
    # an in-place op, or one without effect, returns its input
    given = {id(leaf.held): leaf for leaf in leaves if isinstance(leaf, PretendTensor)}
    return _wrapped(op, out, given, _place(target, leaves))


def _place(target: torch.device | None, leaves: list[Any]) -> torch.device:
    """The device of an op's result: the requested one, else that of its inputs."""
    if target is not None and target.type == "pretend":
        return torch.device("pretend", target.index or 0)
    return next((leaf.device for leaf in leaves if isinstance(leaf, PretendTensor)), torch.device(DEVICE))


def _held(value: Any) -> Any:
    """An op's argument with the CPU tensors; arguments are values, and lists and tuples of them."""
    if isinstance(value, PretendTensor):
        return value.held
    if isinstance(value, torch.device):
        return _HOST
    return type(value)(map(_held, value)) if type(value) in (tuple, list) else value


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in (tuple, list):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _wrapped(op: Any, found: Any, given: dict[int, PretendTensor], place: torch.device) -> Any:
    if type(found) in (tuple, list):
        return type(found)(_wrapped(op, one, given, place) for one in found)
    if not isinstance(found, torch.Tensor):
        return found
    same = given.get(id(found))
    if same is None or same.device != place:
        return PretendTensor(found, place)
    if same.shape != found.shape or same.stride() != found.stride():
        raise NotImplementedError(f"{op} changes the shape of a tensor in place, which a pretend tensor cannot follow")
    return same


def _count_copy(name: str, source: torch.Tensor, target: torch.device, *, blocking: bool) -> None:
    if source.device != target:
        (count_read if target.type == "cpu" else count_upload)(name, source, blocking=blocking)


_Generator = torch.Generator


class _Generators(type):
    """Replaces `torch.Generator` while the device is in use: torch has none for a backend written in Python."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        if torch.device(device).type != "pretend":
            return _Generator(device)
        made = _Generator()
        generators.add(made._cdata)
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Generator)


@functools.cache
def _register() -> list[torch.library.Library]:
    """Register the backend, once per process: torch cannot undo it. It exists as long as the returned object."""
    accelerator = torch._C._accelerator_getAccelerator()
    _setup_privateuseone_for_python_backend("pretend")
    # it must not appear as the machine's accelerator
    torch._C._accelerator_getAccelerator = lambda: accelerator
    fallback, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    for name in (*_FACTORIES, *_LIFTING):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aten.impl(name, lambda *args, op=op, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    return [fallback, aten]


@contextmanager
def device() -> Iterator[str]:
    """The device's name, which torch accepts from now on."""
    if torch.accelerator.is_available():
        pytest.skip("the machine has a real device, which another backend in the same process would disturb")
    _register()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Generator", _Generators("Generator", (), {}))
        packedkernel.register()
        patch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # the original needs a real device
        patch.setattr(varlen, "DEVICES", {"pretend"})
        recordedgraph.use(patch)
        patch.setattr(varlen, "DTYPES", {torch.float32})
        yield DEVICE
