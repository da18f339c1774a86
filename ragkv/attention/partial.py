"""The attention primitive (docs/design.md): attention over some of the keys, and the merge of such partial results.

`partial_attention` gives (output, logsumexp) over some keys; `merge_partials` combines several of them into exactly
what one softmax over all their keys would give (APE Appendix C, Eqs. 8-10). Every engine is a choice of the key sets
(`ragkv.attention.batch`).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.attention import varlen
from ragkv.util.plugins import kernel_module

Mask = Tensor | Literal["causal"] | None
_SCORES = 1 << 26
"""Scores in memory at a time in the plain matmul: 256 MiB, plus temporaries of a few times that."""
_ROWS = 256
"""From this many queries per head, the CPU kernel is busy, and folding the heads of a group gains nothing."""
_QUERIES = 6
"""From this many queries on, ragkv's own kernel is faster than torch's."""
_TILE = 24
"""The number of queries from which transposing the keys pays off."""
_FAR = 1 << 40
_CODES = {torch.float16: 1, torch.int8: 2}
"""The codes of the kernels' table for dtypes other than the model's."""
_PRODUCTS = 1 << 19
"""Elements of queries, times keys, that are worth a thread: 12 µs of work."""
# (query, key, value, mask, scale, temperature, softcap) -> (out, lse)
Kernel = Callable[[Tensor, Tensor, Tensor, Mask, float, float, float | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class PartialAttention:
    """Attention over some keys: `out` is `(batch, q_heads, n, head_dim)`, `lse` is `(batch, q_heads, n)` in fp32.

    A query that saw no key has lse −inf and weighs nothing in a merge.
    """

    out: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCall:
    """The inputs of one layer's attention in a forward pass.

    `query` `(batch, q_heads, n, head_dim)`, `key`/`value` `(batch, kv_heads, n, head_dim)` of the pass's new tokens,
    already rotated. `window` is the layer's sliding window: a query at i sees keys at i-window+1..i. `sink`
    `(q_heads,)` is one more score in every token's softmax, without a value (gpt-oss).
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    softcap: float | None = None
    window: int | None = None
    sink: Tensor | None = None

    def capped(self, scores: Tensor) -> Tensor:
        """Scores after the layer's softcap, if it has one."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def partial(
        self, query: Tensor, key: Tensor, value: Tensor, *, temperature: float = 1.0, mask: Mask = None
    ) -> PartialAttention:
        """`partial_attention` of these tensors with the layer's scale and softcap."""
        return partial_attention(
            query, key, value, scale=self.scale, temperature=temperature, mask=mask, softcap=self.softcap
        )


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    temperature: float = 1.0,
    mask: Mask = None,
    softcap: float | None = None,
    reference: bool = False,
) -> PartialAttention:
    """Attention over one set of keys, with its logsumexp in fp32.

    `query` `(batch, q_heads, n, head_dim)`; `key`/`value` `(batch | 1, kv_heads, m, head_dim)`, read in place: query
    heads of a group, and batch rows over shared keys, are folded into the query axis if all keys are visible. If the
    value has width 0, the keys are also the values (latent attention, which uses some of the columns).

    `mask` is None (all visible), "causal" (n = m, lower triangle) or a bool tensor `(n, m)` or `(batch, n, m)`, True
    where visible. `softcap` caps scores as c·tanh(s/c) (Gemma 2); `temperature` divides the softmax's input, after the
    cap. `reference` selects the plain matmul against which every fast path is tested, and which computes what the fast
    kernels cannot.
    """
    batch, q_heads, n, _ = query.shape
    kv_heads, m = key.shape[1], key.shape[2]
    if not value.shape[-1]:
        value = key
    if m == 0:  # the CPU kernel divides by zero on an empty key axis
        empty = query.new_zeros((batch, q_heads, n, value.shape[-1]))
        return PartialAttention(empty, query.new_full((batch, q_heads, n), -torch.inf, dtype=torch.float32))
    shared = key.shape[0] != batch
    gains = q_heads != kv_heads and (n < _ROWS or query.device.type != "cpu")
    if gains and n == 1 and not reference:
        # that kernel folds the heads of a group itself
        gains = not varlen.takes(query, key, value, softcap=softcap)
    fold = mask is None and (shared or gains)
    if fold:
        query = _fold(query, kv_heads, shared=shared)
    elif shared:
        key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    kernel = _matmul if reference or softcap is not None else _kernel(query, key, value, mask)
    with nullcontext() if kernel is _flash or query.device.type != "cpu" else by_torch():
        out, lse = kernel(query, key, value, mask, scale, temperature, softcap)
    if fold:
        out, lse = _unfold(out, batch, q_heads, n), _unfold(lse[..., None], batch, q_heads, n)[..., 0]
    return PartialAttention(out, lse)


def by_torch() -> AbstractContextManager[None]:
    """Context in which torch's own CPU operations have their threads, also in a pass that leaves them to kernels."""
    module = kernel_module("ragkv.util.kernels")
    return nullcontext() if module is None else module.by_torch()


def merge_partials(partials: Sequence[PartialAttention]) -> PartialAttention:
    """Merge partial attentions into one softmax over all their keys: weights exp(lse), in fp32 (APE Eq. 10).

    Any of them may have seen no key (lse −inf). Returns fp32.
    """
    if len(partials) == 2:  # the common case, in fewer passes over the outputs
        before, after = partials
        share = torch.sigmoid((after.lse - before.lse).nan_to_num(0.0))  # nan: neither saw a key
        out = torch.lerp(before.out.float(), after.out.float(), share[..., None])
        return PartialAttention(out, torch.logaddexp(before.lse, after.lse))
    lse = torch.stack([partial.lse for partial in partials])  # (partials, batch, q_heads, n)
    top = lse.amax(0)
    weights = torch.exp(lse - torch.where(top.isinf(), 0.0, top))
    total = weights.sum(0)
    out = partials[0].out * weights[0, ..., None]
    for partial, weight in zip(partials[1:], weights[1:], strict=True):
        out.addcmul_(partial.out, weight[..., None])  # half types are widened as they are read
    out /= torch.where(total == 0, 1.0, total)[..., None]
    return PartialAttention(out, top + torch.where(total == 0, 1.0, total).log())


def merge_partials_of(partials: Sequence[tuple[slice | Tensor, PartialAttention]], tokens: int) -> PartialAttention:
    """`merge_partials` of partial attentions that each cover some of `tokens` tokens, `(slice or indices, partial)`.

    Returns fp32. A token that none of them covers has lse −inf.
    """
    if len(partials) > 2:
        partials = _side_by_side(partials)
    first = partials[0][1]
    if all(isinstance(which, slice) and partial.lse.shape[-1] == tokens for which, partial in partials):
        return merge_partials([partial for _, partial in partials])
    batch, q_heads, _, head_dim = first.out.shape
    lse = first.lse.new_full((len(partials), batch, q_heads, tokens), -torch.inf)
    for row, (which, partial) in zip(lse, partials, strict=True):
        row[:, :, which] = partial.lse
    top = lse.amax(0)
    weights = torch.exp(lse - torch.where(top.isinf(), 0.0, top))
    total = weights.sum(0)
    out = first.out.new_zeros((batch, q_heads, tokens, head_dim), dtype=torch.float32)
    for (which, partial), weight in zip(partials, weights, strict=True):
        if isinstance(which, slice):
            out[:, :, which].addcmul_(partial.out, weight[:, :, which, None])
        else:
            out.index_add_(2, which, partial.out.float() * weight[:, :, which, None])
    out /= torch.where(total == 0, 1.0, total)[..., None]
    return PartialAttention(out, top + torch.where(total == 0, 1.0, total).log())


def _side_by_side(
    partials: Sequence[tuple[slice | Tensor, PartialAttention]],
) -> list[tuple[slice | Tensor, PartialAttention]]:
    """Join the partial attentions of adjacent tokens: those of sixteen sequences with eight chunks each become eight
    partial attentions of all tokens, whose merge has a sixteenth of the operations."""
    rows: dict[int, list[list[tuple[slice, PartialAttention]]]] = {}  # by the next token
    joined: list[tuple[slice | Tensor, PartialAttention]] = []
    for which, partial in partials:
        if isinstance(which, slice):
            waiting = rows.get(which.start)
            row = waiting.pop() if waiting else []
            row.append((which, partial))
            rows.setdefault(which.stop, []).append(row)
        else:
            joined.append((which, partial))
    for row in (row for each in rows.values() for row in each):
        if len(row) > 1:
            out = torch.cat([partial.out for _, partial in row], 2)
            lse = torch.cat([partial.lse for _, partial in row], 2)
            joined.append((slice(row[0][0].start, row[-1][0].stop), PartialAttention(out, lse)))
        else:
            joined.append(row[0])
    return joined


def _fold(query: Tensor, kv_heads: int, *, shared: bool) -> Tensor:
    """`(batch, kv_heads·g, n, d)` as `(batch, kv_heads, g·n, d)`, or `(1, kv_heads, batch·g·n, d)` if `shared`."""
    batch, q_heads, n, head_dim = query.shape
    grouped = query.reshape(batch, kv_heads, (q_heads // kv_heads) * n, head_dim)
    if not shared:
        return grouped
    return grouped.transpose(0, 1).reshape(1, kv_heads, -1, head_dim)  # (1, kv_heads, batch·g·n, head_dim)


def _unfold(folded: Tensor, batch: int, q_heads: int, n: int) -> Tensor:
    """Undo `_fold`: back to `(batch, q_heads, n, d)`."""
    if folded.shape[0] == batch:
        return folded.reshape(batch, q_heads, n, -1)
    kv_heads = folded.shape[1]
    rows = folded.reshape(kv_heads, batch, -1, folded.shape[-1]).transpose(0, 1)
    return rows.reshape(batch, q_heads, n, -1)


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Kernel:
    """The fastest kernel that gives a logsumexp for these tensors."""
    same = query.dtype == key.dtype == value.dtype and key.shape[-1] == value.shape[-1] == query.shape[-1]
    if not isinstance(mask, Tensor) and query.shape[2] >= _QUERIES and flash_takes(query, key, value):
        return _flash
    if same and query.device.type == "cpu" and query.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return _flash_cpu
    if not isinstance(mask, Tensor) and varlen.takes(query, key, value):
        return varlen.kernel
    return _matmul


def flash_takes(query: Tensor, key: Tensor, value: Tensor, softcap: float | None = None) -> bool:
    """Whether ragkv's own kernel (`flash`) can compute with tensors like these, and is faster for enough queries (torch
    uses AMX for bfloat16).
    """
    module = kernel_module("ragkv.attention.flash_kernel")
    if module is None or query.device.type != "cpu" or torch.is_grad_enabled() or softcap is not None:
        return False
    has_dot = module.kernels.has_dot("bfloat16") and not module.kernels.has_tiles()
    return (
        query.dtype == key.dtype == value.dtype
        and (query.dtype == torch.float32 or (query.dtype == torch.bfloat16 and has_dot))
        and value.shape[-1] in (key.shape[-1], 0)
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] * query.element_size() % 64 == 0
        and query.stride(-1) == key.stride(-1) == 1
        and (value.stride(-1) == 1 or not value.shape[-1])
    )


@functools.cache
def float_bits(number: float) -> int:
    """The bits of a number in float32."""
    bits: int = struct.unpack("i", struct.pack("f", number))[0]
    return bits


def table_row(key: Tensor, value: Tensor, rotation: int) -> tuple[int, ...]:
    """A row of the kernels' table for keys and values `(kv_heads, tokens, head_dim)`, or `(1, …)` of that, that are all
    visible, to queries that are rotated by row `rotation` of the rotations (-1: none).
    """
    if not value.shape[-1]:  # latent attention: the keys are the values
        value = key
    size = key.element_size()
    steps = (size * stride for t in (key, value) for stride in t.stride()[-3:-1])
    return key.data_ptr(), value.data_ptr(), key.shape[-2], *steps, rotation, _CODES.get(key.dtype, 0), -_FAR


def flash(
    query: Tensor,
    parts: NDArray[np.int64],
    kv_heads: int,
    rows: tuple[int, int],
    rotations: Sequence[int],
    result: tuple[Tensor, Tensor],
    products: int,
) -> None:
    """Run `ragkv.attention.flash_kernel` on `query` `(…, q_heads, n, head_dim)`, with its parts, the address and row
    size of its table, and the addresses of its rotations. Fills (out, lse), which have the same strides. `products` is
    the number of query-key pairs.
    """
    module = kernel_module("ragkv.attention.flash_kernel")
    assert module is not None
    out, lse = result
    heads, width, size = query.shape[-3], query.shape[-1], query.element_size()
    kernel = module.attention(str(query.dtype).removeprefix("torch."), width)
    threads = module.kernels.threads_for(products * heads * width, _PRODUCTS)
    longest = int(parts[:, module.COUNT].max()) * (heads // kv_heads)
    tiles = max(-(-longest // module.QUERIES_AT_A_TIME), min(threads // (len(parts) * kv_heads), longest // _TILE))
    units = len(parts) * kv_heads * tiles
    where = *rows, parts.ctypes.data, tiles, out.data_ptr(), lse.data_ptr(), *rotations
    steps = size * query.stride(-3), size * query.stride(-2), lse.stride(-2), lse.stride(-1)
    module.kernels.run(kernel, units, min(units, threads), *where, kv_heads, heads // kv_heads, *steps)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scale: float,
    temperature: float,
    _softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """ragkv's own kernel for processors with AVX-512."""
    batch, heads, n, _ = query.shape
    out = torch.empty(query.shape, dtype=query.dtype)
    lse = torch.empty((batch, heads, n), dtype=torch.float32)
    rows = np.array([table_row(*pair, -1) for pair in zip(key, value, strict=True)], np.int64)
    causal, bits = int(mask is not None), float_bits(scale / temperature)
    first, step = query.data_ptr(), query.element_size() * query.stride(0)
    each = [(first + at * step, at * heads * n, n, at, at + 1, causal, bits) for at in range(batch)]
    table = rows.ctypes.data, rows.strides[0]
    flash(query, np.array(each, np.int64), key.shape[1], table, (0, 0, 0), (out, lse), batch * n * key.shape[2])
    return out, lse


def _flash_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scale: float,
    temperature: float,
    _softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """torch's CPU flash kernel; it reads grouped heads natively and returns the logsumexp in fp32."""
    bias = None
    if isinstance(mask, Tensor):  # the kernel takes an additive mask of the query's dtype
        mask = mask.expand(query.shape[0], -1, -1)[:, None]  # (batch, 1, n, m)
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=isinstance(mask, str), attn_mask=bias, scale=scale / temperature
    )
    if isinstance(mask, Tensor):
        blind = ~mask.any(-1)  # the kernel's result is undefined for queries that see no key
        if bool(blind.any()):
            out = out.masked_fill(blind[..., None], 0.0)
            lse = lse.masked_fill(blind, -torch.inf)
    return out, lse


def _matmul(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scale: float,
    temperature: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """The reference: scores and one softmax in fp32."""
    batch, q_heads, n, head_dim = query.shape
    kv_heads, m = key.shape[1], key.shape[2]
    most = max(1, _SCORES // (batch * q_heads * m))
    if n > most:  # queries are independent of each other, so compute some at a time
        if isinstance(mask, str):
            mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril()
        merged = [
            _matmul(
                query[:, :, at], key, value, None if mask is None else mask[..., at, :], scale, temperature, softcap
            )
            for at in (slice(start, start + most) for start in range(0, n, most))
        ]
        return torch.cat([out for out, _ in merged], 2), torch.cat([lse for _, lse in merged], 2)
    # (batch, kv_heads, g, n, head_dim) against (batch, kv_heads, 1, m, head_dim)
    grouped = query.reshape(batch, kv_heads, q_heads // kv_heads, n, head_dim).float()
    scores = grouped @ key[:, :, None].float().transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores / temperature
    if mask is not None:
        if isinstance(mask, str):
            mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~mask.expand(batch, -1, -1)[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    out = weights @ value[:, :, None].float()
    return out.reshape(batch, q_heads, n, -1).to(query.dtype), lse.reshape(batch, q_heads, n)
