"""Adapters for model families whose attention or RoPE differs from transformers' usual interface.

`adapt` routes the attention of families with code of their own (Falcon, GPT-J, CodeGen, GPT-NeoX Japanese) through the
attention function that the model is set to; with "eager" or "sdpa" they compute as before. `rotaries_of` finds a
model's rotary functions. How a family calls its rotation (queries and keys together, one of them, or a slice) is not
visible from outside, so every candidate is returned, and the self-check chooses the one that the model's keys obey.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragkv.attention.rope import Rotary
from ragkv.model.attention_hook import rotated_last, rotated_last_in_pairs


def adapt_falcon(model: Any) -> bool:
    """Replace the forward of the attention modules of a Falcon `model` with RoPE, in place; whether there are any.

    Its own code attends inline, so this repeats its forward with a call of the attention function.
    """
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
    if module.new_decoder_architecture:  # it repeats each key head for its query heads
        groups = module.num_heads // module.num_kv_heads
        key, value = key[:, :, ::groups], value[:, :, ::groups]
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = apply(query, key, *position_embeddings)
    out, weights = ALL_ATTENTION_FUNCTIONS[name](
        module, query, key, value, attention_mask, scaling=module.head_dim**-0.5
    )
    return module.dense(out.flatten(2)), weights


def tabled(attention: Any, apply: Callable[..., Tensor], layers: int) -> Rotary | None:
    """The rotation of GPT-J and CodeGen, which keep sine and cosine of every position in a table of each layer.

    None for an attention without such a table `embed_positions` `(positions, rotary_dim)`.
    """
    if not isinstance(getattr(attention, "embed_positions", None), Tensor):
        return None

    def angles(positions: Tensor, _kind: str) -> tuple[Tensor, Tensor]:
        found = attention.embed_positions.to(positions.device)[positions.abs()]  # sines, then cosines
        sin, cos = found.float().chunk(2, -1)
        return cos, sin * positions.sign()[..., None]

    def turn(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = 2 * cos.shape[-1]
        moved = apply(states[..., :width].transpose(1, 2), sin, cos).transpose(1, 2)  # it wants (batch, n, heads, d)
        return torch.cat([moved, states[..., width:]], -1)

    return Rotary(apply=turn, angles=angles, kinds=("default",) * layers)


_SIGNATURE = ["query", "key", "value", "attention_mask"]


def adapt_inner(model: Any) -> bool:
    """Replace `self._attn(query, key, value, attention_mask)` in every such module, in place; whether there are any.

    GPT-J, CodeGen and GPT-NeoX Japanese have such a method, which only attends.
    """
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
    """`(batch, heads, n, head_dim)` in and out, like the family's method."""
    config, scale = module._ragkv
    name = config._attn_implementation
    if name in ("eager", "sdpa"):
        found: tuple[Tensor, Any] = type(module)._attn(module, query, key, value, attention_mask)
        return found
    out, weights = ALL_ATTENTION_FUNCTIONS[name](module, query, key, value, attention_mask, scaling=scale)
    return out.transpose(1, 2), weights


def _has_masks(module: nn.Module) -> bool:
    """Whether the module holds a mask table over pairs of positions, which could hide unknown ones (GPT-Neo)."""
    return any(b.ndim >= 2 and b.shape[-1] == b.shape[-2] for b in module.buffers(recurse=False))


def _scale(module: Any) -> float:
    """The factor of the method's scores; the self-check would notice a wrong one."""
    divisor: Any = getattr(module, "scale_attn", getattr(module, "norm_factor", 1.0))
    return 1 / float(divisor)


Turn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(states `(batch, heads, n, head_dim)`, cos, sin `(batch, n, rotary_dim)`) -> states, rotated."""


def rotation_of(apply: Callable[..., Any]) -> tuple[Turn, ...]:
    """The ways in which a family's `apply_rotary_pos_emb` may have to be called, the usual one first."""

    def pair(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated: Tensor = apply(states, states[:, :1], cos, sin)[0]
        return rotated

    def lone(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # Gemma 3n, Gemma 4
        rotated: Tensor = apply(states, cos, sin)
        return rotated

    return pair, lone, _sliced(pair), _sliced(lone)


def _sliced(turn: Turn) -> Turn:
    """`turn` of the first dimensions alone, as many as have angles (Phi, Persimmon, StableLM)."""

    def first(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = cos.shape[-1]
        return torch.cat([turn(states[..., :width], cos, sin), states[..., width:]], -1)

    return first


logger = logging.getLogger(__name__)


def adapt(model: Any) -> None:
    """Route the attention of families that have their own code through transformers' interface, in place.

    With its own attention ("eager", "sdpa") the model computes as before.
    """
    if not (adapt_inner(model) | adapt_falcon(model)):
        return
    for module in model.modules():
        if hasattr(module, "set_attn_implementation"):  # which looks for the interface in the family's source code
            module._can_set_attn_implementation = _yes


def read_whole(model: Any, name: str) -> None:
    """Make BigBird attend to all tokens, in place.

    With more than 704 tokens, transformers uses sparse attention until the model has once read fewer, and then never
    again. So an answer would depend on what was read before.
    """
    for module in model.modules():
        if (
            getattr(module, "attention_type", None) == "block_sparse"
        ):  # the setting of the whole decoder, which comes first
            module.set_attention_type("original_full")
            logger.warning("Model %r attends to all tokens (original_full), not sparsely (block_sparse).", name)
            return


def _yes() -> bool:
    return True


def rotaries_of(model: Any, config: Any) -> tuple[Rotary, ...]:
    """The candidates for the model's RoPE, the usual one first; empty if none can be found.

    The self-check chooses the one that the keys obey, and finds the layers that have no RoPE.
    """
    decoder = model.get_decoder()
    if next(_attentions(decoder), None) is None:  # ModernBERT calls its last linear layer so
        decoder = model
    embedding = _embedding(decoder)
    attention = next(_attentions(decoder), None)
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    layers = config.num_hidden_layers
    if apply is not None and (table := tabled(attention, apply, layers)) is not None:
        return (table,)
    if any(hasattr(module, "expand_kv") for module in decoder.modules()):  # latent attention
        turns: tuple[Turn, ...] = (rotated_last, rotated_last_in_pairs)
    else:
        turns = () if apply is None else rotation_of(apply)
    if embedding is None or not turns:
        return ()
    typed = "layer_type" in inspect.signature(embedding.forward).parameters
    width = torch.zeros(1, device=model.device)

    def scaled(positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        found = embedding(width, positions, kind) if typed else embedding(width, positions)
        if isinstance(found, Tensor):  # complex numbers, one for each pair (DeepSeek V2)
            return found.real.repeat_interleave(2, -1), found.imag.repeat_interleave(2, -1)
        cos, sin = found
        return cos, sin

    def angles(positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        cos, sin = scaled(positions.to(width.device), kind)
        one = scaled(torch.zeros((1, 1), dtype=torch.long, device=width.device), kind)[
            0
        ]  # remove what a family folds in
        return (cos / one).to(positions.device), (sin / one).to(positions.device)

    kinds: tuple[str | None, ...] = tuple(config.layer_types[:layers]) if typed else ("default",) * layers
    return tuple(Rotary(apply=turn, angles=angles, kinds=kinds) for turn in turns)


def without_rotary(layers: int) -> Rotary:
    """The `Rotary` of a model whose queries are never rotated."""

    def none(states: Tensor, *_: object) -> Tensor:
        raise AssertionError("no layer of this model has a rotation")

    return Rotary(apply=none, angles=none, kinds=(None,) * layers)  # type: ignore[arg-type]


def _attentions(decoder: nn.Module) -> Iterator[nn.Module]:
    """The attention modules, which know their layer's number."""
    for module in decoder.modules():
        if hasattr(module, "layer_idx") and "Attention" in type(module).__name__:
            yield module


def _embedding(decoder: nn.Module) -> Any:
    """The module that makes cos and sin of positions: one for the model, or the first of one per layer."""
    named = (module for name, module in decoder.named_modules() if name.rpartition(".")[2] == "rotary_emb")
    return getattr(decoder, "rotary_emb", None) or next(named, None)
