"""A model's own rotary functions, found where its family keeps them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ragkv.attention.rope import Rotary
from ragkv.model.families.gptj import tabled
from ragkv.model.families.latent import last_turned, last_turned_in_pairs
from ragkv.model.families.turn import Turn, turns_of

__all__ = ["rotaries_of", "without_rotary"]


def rotaries_of(model: Any, config: Any) -> tuple[Rotary, ...]:
    """The ways in which the model's RoPE may be meant, the usual one first; empty where it has none that can be found.

    The proof on load takes the one that the keys obey, and finds the layers that have no RoPE.
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
        turns: tuple[Turn, ...] = (last_turned, last_turned_in_pairs)
    else:
        turns = () if apply is None else turns_of(apply)
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
        one = scaled(torch.zeros((1, 1), dtype=torch.long, device=width.device), kind)[0]  # whatever a family folds in
        return (cos / one).to(positions.device), (sin / one).to(positions.device)

    kinds: tuple[str | None, ...] = tuple(config.layer_types[:layers]) if typed else ("default",) * layers
    return tuple(Rotary(apply=turn, angles=angles, kinds=kinds) for turn in turns)


def without_rotary(layers: int) -> Rotary:
    """Of a model none of whose queries is ever turned."""

    def none(states: Tensor, *_: object) -> Tensor:
        raise AssertionError("no layer of this model has a rotation")

    return Rotary(apply=none, angles=none, kinds=(None,) * layers)  # type: ignore[arg-type]


def _attentions(decoder: nn.Module) -> Iterator[nn.Module]:
    """The modules that know which layer's attention they are."""
    for module in decoder.modules():
        if hasattr(module, "layer_idx") and "Attention" in type(module).__name__:
            yield module


def _embedding(decoder: nn.Module) -> Any:
    """What makes cos and sin of positions: one for the model, or one for each layer, of which the first is taken."""
    named = (module for name, module in decoder.named_modules() if name.rpartition(".")[2] == "rotary_emb")
    return getattr(decoder, "rotary_emb", None) or next(named, None)
