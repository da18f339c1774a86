"""Falcon attends by code of its own; its layers' forward once more, through the function that the model is set to."""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["adapt_falcon"]


def adapt_falcon(model: Any) -> bool:
    """Replace the forward of the attention modules of a Falcon `model` with RoPE, in place; whether there are any."""
    modules = [module for module in model.modules() if type(module).__name__ == "FalconAttention"]
    if not modules or model.config.alibi:
        return False
    for module in modules:
        module.forward = MethodType(_forward, module)
    return True


def _forward(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Any,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: Any = None,
    **others: Any,
) -> tuple[Tensor, Any]:
    name = module.config._attn_implementation
    if name in ("eager", "sdpa"):
        given = (hidden_states, alibi, attention_mask, position_ids, layer_past, use_cache, output_attentions)
        found: tuple[Tensor, Any] = type(module).forward(module, *given, position_embeddings, **others)
        return found
    query, key, value = module._split_heads(module.query_key_value(hidden_states))  # (batch, n, heads, head_dim)
    if module.new_decoder_architecture:  # it hands each key head out to all its query heads
        groups = module.num_heads // module.num_kv_heads
        key, value = key[:, :, ::groups], value[:, :, ::groups]
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = apply(query, key, *position_embeddings)
    out, weights = ALL_ATTENTION_FUNCTIONS[name](
        module, query, key, value, attention_mask, scaling=module.head_dim**-0.5
    )
    return module.dense(out.flatten(2)), weights
