"""The proof on load (docs/design.md): what ragkv computes is what transformers computes, or the model is refused.

A silently wrong answer is the failure that users of KV reuse meet most; three small forward passes rule it out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragkv.attention.context import Context, ContextGroup
from ragkv.attention.kv import ChunkKV, PlacedKV
from ragkv.errors import UnsupportedModelError

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel

__all__ = ["check_model", "tolerance"]

_PREFIX, _CHUNK, _QUESTION, _SHIFT = 5, 9, 4, 11


def tolerance(dtype: torch.dtype) -> float:
    """Largest accepted ‖a − b‖ / ‖b‖; a wrong layout gives about 1.

    The half types differ by rounding between any two correct kernels: up to 0.045 on random 9-layer models.
    """
    return 1e-4 if dtype in (torch.float32, torch.float64) else 0.1


def check_model(model: LanguageModel) -> None:
    """Refuse a model whose keys or logits are not what its own implementation gives.

    (1) Keys of the same tokens at shifted positions must be R(shift)·keys, layer by layer; a layer whose keys do
    not move has no RoPE, and its queries are never turned. (2) A causal pass, and a question over cached context,
    equal transformers' own. (3) A chunk encoded alone and placed elsewhere equals transformers' own forward with
    the 4-D block mask.
    Raises UnsupportedModelError, naming the layer where it can.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(model.config.vocab_size, 1000)
    ids = torch.randint(3, vocabulary, (_PREFIX + _CHUNK + _QUESTION,), generator=generator).tolist()
    _check_rotation(model, ids)
    _check_logits(model, ids)


def _check_rotation(model: LanguageModel, ids: list[int]) -> None:
    still = _keys_at(model, ids, 0)
    moved = _keys_at(model, ids, _SHIFT)
    kinds = list(model.rotary.kinds)
    limit = tolerance(model.dtype)
    offsets = torch.full((1, len(ids)), _SHIFT, device=model.device)
    for layer, (before, after) in enumerate(zip(still.keys, moved.keys, strict=True)):
        turned = model.rotary.rotate(before[None], layer, offsets)[0]
        if _distance(turned, after) <= limit:
            continue
        if _distance(before, after) > limit:
            raise UnsupportedModelError(
                f"{_name(model)} is not supported: keys of layer {layer} do not follow its rotary embedding."
            )
        kinds[layer] = None
    model.rotary = replace(model.rotary, kinds=tuple(kinds))


def _check_logits(model: LanguageModel, ids: list[int]) -> None:
    cut = _PREFIX + _CHUNK
    everything = torch.tensor([ids], device=model.device)
    positions = torch.arange(len(ids), device=model.device)[None]
    visible = torch.ones(len(ids), len(ids), dtype=torch.bool, device=model.device).tril()
    visible[_PREFIX:cut, :_PREFIX] = False  # the chunk is a block of its own
    mask = torch.zeros(visible.shape, dtype=model.dtype, device=model.device)
    mask = mask.masked_fill(~visible, torch.finfo(model.dtype).min)[None, None]
    arguments = {"input_ids": everything, "position_ids": positions, "use_cache": False}
    with model.plain() as plain:
        whole = plain(**arguments).logits[0].float()
        block = plain(**arguments, attention_mask=mask).logits[0].float()

    causal = model.forward(everything, positions, own=model.own(), every=True)[0]
    _compare(model, causal, whole, "a causal pass")

    def question_after(*placed: PlacedKV) -> Tensor:
        context = Context(groups=(ContextGroup(chunks=placed),))
        new = {"ids": everything[:, cut:], "positions": positions[:, cut:]}
        return model.forward(**new, context=context, own=model.own(), every=True)[0]

    [together] = model.encode([ids[:cut]])
    _compare(model, question_after(PlacedKV(kv=together, start=0)), whole[cut:], "a question over cached context")
    if min(model.windows, default=len(ids)) < len(ids):
        return  # transformers puts no window on a 4-D mask, so it would be no yardstick
    prefix, chunk = model.encode([ids[:_PREFIX], ids[_PREFIX:cut]])
    placed = question_after(PlacedKV(kv=prefix, start=0), PlacedKV(kv=chunk, start=_PREFIX))
    _compare(model, placed, block[cut:], "a chunk placed away from where it was encoded")


def _keys_at(model: LanguageModel, ids: list[int], start: int) -> ChunkKV:
    own = model.own()
    tokens = torch.tensor([ids], device=model.device)
    model.forward(tokens, torch.arange(start, start + len(ids), device=model.device)[None], own=own)
    return own.chunk_kv(0)


def _compare(model: LanguageModel, found: Tensor, expected: Tensor, what: str) -> None:
    off = _distance(found, expected)
    if not off <= tolerance(model.dtype):
        raise UnsupportedModelError(
            f"{_name(model)} is not supported: {what} differs from transformers' own result by {off:.1e} "
            f"(at most {tolerance(model.dtype):.0e} is accepted)."
        )


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-20))


def _name(model: LanguageModel) -> str:
    return f"Model {model.checkpoint.name!r} ({model.config.model_type})"
