"""A model that is larger than one device: which of its modules goes where.

The layers follow each other over the devices, on each as many as it has memory for. What stands before and after them
is on the first device, where the token ids are; an output matrix of its own, often the largest of all, is on the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["module_map"]


def module_map(model: Any, devices: Sequence[torch.device], shares: Sequence[float]) -> dict[str, torch.device]:
    """Name of a module -> its device, every parameter within one of them; `model` may be without weights.

    `shares[i]` is how much of the layers `devices[i]` takes.
    """
    layers = model.get_decoder().layers
    [stack] = (name for name, module in model.named_modules() if module is layers)
    found = {f"{stack}.{index}": device for index, device in enumerate(_runs(len(layers), devices, shares))}
    head = model.get_output_embeddings()
    tied = head is None or head.weight is model.get_input_embeddings().weight or _ties(model)
    everything = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, _ in everything:
        if not name.startswith(f"{stack}."):
            module = name.rpartition(".")[0]
            if stack.startswith(f"{module}."):  # it holds the layers too, so only this one tensor of it is meant
                found[name] = devices[0]
                continue
            last = not tied and model.get_submodule(module) is head
            found[module] = devices[-1] if last else devices[0]
    return found


def _ties(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False))


def _runs(layers: int, devices: Sequence[torch.device], shares: Sequence[float]) -> list[torch.device]:
    """Each layer's device: runs of layers whose lengths are as near to the shares as whole layers are."""
    found: list[torch.device] = []
    total = 0.0
    for device, share in zip(devices, shares, strict=True):
        total += share
        found += [device] * (round(total * layers) - len(found))
    return found + [devices[-1]] * (layers - len(found))
