"""Attention classes that do not go through transformers' interface, but have a method that does nothing but attend.

GPT-J, CodeGen and GPT-NeoX Japanese call `self._attn(query, key, value, attention_mask)`. The method of each module
is replaced by one that calls whatever function the model is set to; where that is "eager" or "sdpa", it is
the family's own again.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["adapt_inner"]

_SIGNATURE = ["query", "key", "value", "attention_mask"]


def adapt_inner(model: Any) -> bool:
    """Replace the method in every such module of `model`, which is changed in place; whether there are any."""
    found = False
    for module in model.modules():
        method = getattr(type(module), "_attn", None)
        if not hasattr(module, "layer_idx") or method is None:
            continue
        if list(inspect.signature(method).parameters)[1:] != _SIGNATURE or _has_masks(module):
            continue
        module._ragkv = (model.config, _scale(module))
        module._attn = MethodType(_attend, module)
        found = True
    return found


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, Any]:
    """`(batch, heads, n, head_dim)` in and out, as the family's method has it."""
    config, scale = module._ragkv
    name = config._attn_implementation
    if name in ("eager", "sdpa"):
        found: tuple[Tensor, Any] = type(module)._attn(module, query, key, value, attention_mask)
        return found
    out, weights = ALL_ATTENTION_FUNCTIONS[name](module, query, key, value, attention_mask, scaling=scale)
    return out.transpose(1, 2), weights


def _has_masks(module: nn.Module) -> bool:
    """Whether a table for every pair of positions lies in the module: what it hides would not be known (GPT-Neo)."""
    return any(b.ndim >= 2 and b.shape[-1] == b.shape[-2] for b in module.buffers(recurse=False))


def _scale(module: Any) -> float:
    """What the method multiplies scores by; the proof on load would see another."""
    divisor: Any = getattr(module, "scale_attn", getattr(module, "norm_factor", 1.0))
    return 1 / float(divisor)
