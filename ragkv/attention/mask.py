"""Reads each layer's visibility from the mask that transformers would build for it.

transformers states a layer's window twice: in the function that makes the mask, and, in most families, in the attention
call. Its eager and sdpa attention obey the mask alone, so the mask is authoritative (qwen2_moe and phimoe state their
windows nowhere else). ragkv builds no mask: its registered mask function returns a `Visible`, which the model's own
code passes on to the layers that the mask is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragkv.errors import UnsupportedModelError

# arguments that do not change what is visible: shapes, and how transformers would build the mask
_BUILDING = frozenset(
    {
        "batch_size",
        "q_length",
        "kv_length",
        "q_offset",
        "kv_offset",
        "allow_is_causal_skip",
        "allow_is_bidirectional_skip",
        "allow_torch_fix",
        "dtype",
        "config",
        "device",
        "cache_position",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """Takes the place of a layer's mask: a token sees the `window` last tokens up to itself; all of them if None.

    `rule` is transformers' own function of (batch, head, query, key) indices, which `require_rule` compares with it.
    """

    window: int | None
    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def visible(
    *,
    mask_function: Callable[..., Tensor],
    local_size: int | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **building: Any,
) -> Visible:
    """The registered mask function; transformers calls it once per kind of layer and forward pass.

    Raises UnsupportedModelError for a mask that the model has changed by functions of its own (`use_vmap`), for
    padding, and for an unknown argument.
    """
    if use_vmap:
        raise UnsupportedModelError("it changes its attention mask by functions of its own")
    if attention_mask is not None:
        raise UnsupportedModelError("it makes a padding mask of its own")
    unknown = sorted(name for name in building.keys() - _BUILDING if not _neutral(building[name]))
    if unknown:
        raise UnsupportedModelError(f"its attention masks have arguments that ragkv does not know ({_list(unknown)})")
    return Visible(window=local_size, rule=mask_function)


def window_of(mask: object, named: int | None) -> int | None:
    """The layer's window as its mask states it; the attention call's own (`named`) must not contradict it."""
    if not isinstance(mask, Visible):
        raise UnsupportedModelError("its layers are not given the masks that transformers makes")
    if named is not None and named != mask.window:
        payload = "none" if mask.window is None else f"{mask.window} tokens"
        raise UnsupportedModelError(f"a layer names a window of {named} tokens, but its mask has {payload}")
    return mask.window


def require_rule(seen: Visible) -> None:
    """Compare transformers' function of indices with the window that came with it: UnsupportedModelError if they
    differ.

    The function is called near and far from the diagonal and from the window's edge, on both sides of each, for queries
    around every power of two. A chunked, bidirectional or otherwise changed mask differs somewhere there.
    """
    if seen.window is not None and seen.window < 1:
        raise UnsupportedModelError(f"a layer has a sliding window of {seen.window} tokens, so that it sees nothing")
    reach = seen.window or 4096
    near = torch.tensor([-2, -1, 0, 1, 2])
    behind = torch.cat([near, reach + near, 2 * reach + near, torch.tensor([3 * reach + 5, 40 * reach])])
    round_numbers = (2 ** torch.arange(3, 21))[:, None] + near  # (18, 5)
    queries = torch.cat([torch.arange(8), reach + near, 3 * reach + near, torch.tensor([41 * reach])])
    queries = torch.cat([queries.clamp_min(0), round_numbers.flatten()])
    query = queries[:, None].expand(-1, len(behind))  # (queries, keys)
    key = query - behind
    query, key = query[key >= 0], key[key >= 0]
    zero = torch.zeros_like(query)
    try:
        found = seen.rule(zero, zero, query, key)
    except IndexError as error:  # it looks something up per token of this very input
        raise UnsupportedModelError("its attention mask depends on more than positions") from error
    expected = key <= query
    if seen.window is not None:
        expected &= key > query - seen.window
    if not torch.equal(torch.as_tensor(found).expand_as(expected).cpu(), expected):
        kind = "causal" if seen.window is None else f"a causal window of {seen.window} tokens"
        raise UnsupportedModelError(f"its attention mask is not {kind}")


def require_neutral(arguments: dict[str, Any]) -> None:
    """Refuse arguments of an attention call that would change its result, naming them: UnsupportedModelError."""
    unknown = sorted(name for name, value in arguments.items() if name not in _NO_MATTER and not _neutral(value))
    for name in unknown:
        if name in _REASONS:
            raise UnsupportedModelError(_REASONS[name])
    if unknown:
        raise UnsupportedModelError(f"its attention has arguments that ragkv does not know ({_list(unknown)})")


_REASONS = {
    "position_bias": "its attention adds a bias for every pair of positions",
    "dropout": "its attention drops weights at random",
}
# positions are the request's own, and what is returned beside the output changes none of it
_NO_MATTER = frozenset(
    {
        "position_ids",
        "logits_to_keep",
        "num_items_in_batch",
        "use_cache",
        "output_attentions",
        "output_router_logits",
        "output_hidden_states",
    }
)


def _neutral(value: object) -> bool:
    return value is None or value is False or (isinstance(value, int | float) and value == 0)


def _list(names: list[str]) -> str:
    return ", ".join(names)
