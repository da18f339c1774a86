"""The attention function that transformers calls for every layer, and how it finds the backend of the pass.

It is registered under one name. The backend is bound in a context variable around the forward pass: threads do not see
each other's, and no layer has to forward an argument (StableLM's and Nemotron's do not).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ragkv.attention.mask import Visible, require_neutral, visible, window_of
from ragkv.attention.partial import LayerCall
from ragkv.errors import UnsupportedModelError

NAME = "ragkv"


class AttentionBackend(Protocol):
    """Computes the attention of a forward pass: a `Step`, or the slow reference of the self-check."""

    def attend(self, call: LayerCall) -> Tensor:
        """The layer's output, `(batch, q_heads, n, head_dim)`."""
        ...


class LayerMask(NamedTuple):
    """What one layer's mask lets a token see in a pass."""

    layer: int
    visible: Visible


@dataclass(frozen=True, slots=True)
class _Pass:
    attending: AttentionBackend
    seen: list[LayerMask] | None


_running: ContextVar[_Pass | None] = ContextVar("ragkv_running", default=None)


@contextmanager
def attention_backend(by: AttentionBackend, *, seen: list[LayerMask] | None = None) -> Iterator[None]:
    """Forward passes in this thread attend by `by`. Every layer appends to `seen` what the self-check examines."""
    token = _running.set(_Pass(by, seen))
    try:
        yield
    finally:
        _running.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: `(batch, heads, n, head_dim)` in, `(batch, n, heads, head_dim)` out."""
    running = _running.get()
    if running is None:
        raise UnsupportedModelError("its attention was called outside of ragkv's forward pass")
    if is_causal is False:
        raise UnsupportedModelError("its attention looks ahead")
    require_neutral(others)
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise UnsupportedModelError("its attention sinks are not one number per head")
    window = window_of(attention_mask, sliding_window)
    layer: int = module.layer_idx  # type: ignore[assignment]
    if running.seen is not None and attention_mask is not None:
        running.seen.append(LayerMask(layer, attention_mask))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = LayerCall(
        layer=layer, query=query, key=key, value=value, scale=scale, softcap=softcap, window=window, sink=s_aux
    )
    out = running.attending.attend(call)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, visible)
