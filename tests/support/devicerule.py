"""What CUDA does with an op that `pretend` only acts out: which tensors it refuses, and when the host must wait."""

from typing import Any

import torch
from crossing import caller, count_upload

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
