"""The function that transformers calls for every layer's attention, and how a pass's context reaches it.

It is registered under one name. What attends is bound around the forward pass in a context variable: threads do not
see each other's, and no layer has to hand an argument through (StableLM's and Nemotron's do not).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ragkv.attention.visibility import Visible, require_neutral, visible, window_of
from ragkv.errors import UnsupportedModelError

__all__ = ["NAME", "Attending", "Seen", "attending"]

NAME = "ragkv"


class Attending(Protocol):
    """What computes the attention of a forward pass: a `Step`, or the slow reference of the proof on load."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """`(batch, heads, n, head_dim)` in and out; `sink` `(q_heads,)` is a score beside those of the keys."""
        ...


class Seen(NamedTuple):
    """One layer's attention of a pass: what its mask lets it see, and the lengths of its queries `(heads, n)`."""

    layer: int
    visible: Visible
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class _Pass:
    attending: Attending
    seen: list[Seen] | None


_running: ContextVar[_Pass | None] = ContextVar("ragkv_running", default=None)


@contextmanager
def attending(by: Attending, *, seen: list[Seen] | None = None) -> Iterator[None]:
    """Forward passes in this thread attend by `by`. Every layer adds to `seen` what the proof on load looks at."""
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
        running.seen.append(Seen(layer, attention_mask, query[0].float().norm(dim=-1)))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = running.attending.attend(layer, query, key, value, scale=scale, softcap=softcap, window=window, sink=s_aux)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, visible)
