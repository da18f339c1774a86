"""A family's own model as a reference: whole sequences, uncached, one dense attention; nothing moved, turned or merged.

Independent of the proof on load. `full` and `pced` are the family's own code, its eager attention included. `block` and
`ape` need masks and weights of their own: their attention is written out here, with each layer's window read from the
dense mask that transformers makes for it, and it is held against the family's eager attention before it is believed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ragkv.errors import UnsupportedModelError
from ragkv.model.families import adapt

__all__ = ["Dense", "Prompt"]

_NAME = "ragkv-whole"
_EAGER = 1e-4
"""Largest difference from eager attention, over the largest logit, at which the attention here is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids of a prompt's parts, each chunk's score, APE's pair (T, S) and PCED's γ."""

    prefix: list[int]
    chunks: list[list[int]]
    suffix: list[int]
    scores: list[float]
    temperature: float = 1.0
    scale: float = 1.0
    gamma: float = 2.5


class Dense:
    """The next token's scores `(vocab,)` of each engine, from forwards over whole sequences; `model` is copied."""

    def __init__(self, model: Any, prompt: Prompt) -> None:
        self.prompt = prompt
        self._plain = copy.deepcopy(model).eval()
        self._plain.set_attn_implementation("eager")
        self._own: Any = None
        self._windows: dict[int, int | None] = {}
        self._strengths: list[float] = []

    def scores(self, engine: str, more: Sequence[int]) -> Tensor:
        """What `engine` gives the token after the suffix and `more`."""
        reference: Callable[[list[int]], Tensor] = getattr(self, f"_{engine}")
        return reference([*self.prompt.suffix, *more])

    def _full(self, own: list[int]) -> Tensor:
        return self._whole([*self.prompt.prefix, *(t for chunk in self.prompt.chunks for t in chunk), *own])

    def _pced(self, own: list[int]) -> Tensor:
        prompt = self.prompt
        streams = [[*prompt.prefix, *part, *own] for part in ([], *prompt.chunks)]
        amateur, *experts = (self._whole(tokens) for tokens in streams)
        if not self._strengths:
            self._strengths = [_divergence(amateur, expert) for expert in experts]
        rows = [
            (1 + b) * expert - b * amateur + prompt.gamma * math.log(r)
            for b, expert, r in zip(self._strengths, experts, prompt.scores, strict=True)
        ]
        return torch.stack(rows).amax(0)

    def _block(self, own: list[int]) -> Tensor:
        tokens = [*self.prompt.prefix, *(t for chunk in self.prompt.chunks for t in chunk), *own]
        visible = _causal(len(tokens))
        at = 0
        for part in (self.prompt.prefix, *self.prompt.chunks):
            visible[at : at + len(part), :at] = False
            at += len(part)
        return self._attended(tokens, torch.arange(len(tokens)), visible)

    def _ape(self, own: list[int]) -> Tensor:
        prefix, chunks = self.prompt.prefix, self.prompt.chunks
        tokens = [*prefix, *(t for chunk in chunks for t in chunk), *own]
        start, longest = len(prefix), max(map(len, chunks))
        places = [*range(start), *(start + i for chunk in chunks for i in range(len(chunk)))]
        places += range(start + longest, start + longest + len(own))
        visible = _causal(len(tokens))
        at = start
        for chunk in chunks:
            visible[at : at + len(chunk), start:at] = False
            at += len(chunk)
        weigh = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        weigh[at:, start:at] = True
        return self._attended(tokens, torch.tensor(places), visible, weigh)

    def _whole(self, tokens: list[int]) -> Tensor:
        logits: Tensor = self._plain(input_ids=torch.tensor([tokens]), use_cache=False).logits
        return logits[0, -1].float()

    def _attended(self, tokens: list[int], positions: Tensor, visible: Tensor, weigh: Tensor | None = None) -> Tensor:
        if self._own is None:
            self._prepare()
        plan = _Plan(
            visible=visible,
            behind=positions[:, None] - positions,
            windows=self._windows,
            weigh=weigh,
            temperature=self.prompt.temperature,
            scale=self.prompt.scale,
        )
        with _bound(plan):
            out = self._own(input_ids=torch.tensor([tokens]), position_ids=positions[None], use_cache=False).logits
        found: Tensor = out[0, -1].float()
        return found

    def _prepare(self) -> None:
        """Read each layer's window from transformers' own mask, and hold the attention here against eager's."""
        tokens = [*self.prompt.prefix, *(t for chunk in self.prompt.chunks for t in chunk), *self.prompt.suffix]
        masks: dict[int, Tensor] = {}
        self._own = copy.deepcopy(self._plain)
        adapt(self._own)
        self._own.set_attn_implementation(_NAME)
        with _bound(masks):
            self._own(input_ids=torch.tensor([tokens]), use_cache=False)
        self._windows = {layer: _window(mask) for layer, mask in masks.items()}
        found = self._attended(tokens, torch.arange(len(tokens)), _causal(len(tokens)))
        expected = self._whole(tokens)
        if not (found - expected).abs().max() <= _EAGER * expected.abs().max():
            raise UnsupportedModelError("its eager attention does more than the reference for block and ape knows")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """`visible` and `weigh` `(n, n)`: what each query sees, and which of it is APE's weighted group; `behind` `(n, n)`:
    how far."""

    visible: Tensor
    behind: Tensor
    windows: dict[int, int | None]
    weigh: Tensor | None
    temperature: float
    scale: float


# read by the registered function, as not every family's layers hand call arguments through to it
_binding: ContextVar[_Plan | dict[int, Tensor] | None] = ContextVar("ragkv_whole", default=None)


@contextmanager
def _bound(what: _Plan | dict[int, Tensor]) -> Iterator[None]:
    """Forward passes attend by this plan, or tell their layers' masks."""
    token = _binding.set(what)
    try:
        yield
    finally:
        _binding.reset(token)


def _causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def _window(mask: Tensor) -> int | None:
    """The window that a dense causal mask `(1, 1, n, n)` has: the most that any token sees, None if that is all."""
    most = int(mask[0, 0].sum(-1).max())
    return None if most == mask.shape[-1] else most


def _divergence(a: Tensor, b: Tensor) -> float:
    p, q = torch.softmax(a.double(), -1), torch.softmax(b.double(), -1)
    m = (p + q) / 2
    return float(0.5 * (p * (p / m).log() + q * (q / m).log()).sum())


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    bound = _binding.get()
    if isinstance(bound, dict):
        bound[module.layer_idx] = attention_mask
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1).double(), value.repeat_interleave(groups, 1).double()
    scores = query.double() @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible, weigh = attention_mask[0, 0], None
    if isinstance(bound, _Plan):
        visible, weigh, window = bound.visible, bound.weigh, bound.windows[module.layer_idx]
        if window is not None:
            visible = visible & (bound.behind < window)
    scores = scores.masked_fill(~visible, -torch.inf)
    if weigh is not None:  # APE's Eq. 5: the group's sum Z of exp(s/T) enters the row as Z^(S·T)
        assert isinstance(bound, _Plan)
        sharp = (scores / bound.temperature).masked_fill(~weigh, -torch.inf)
        total = sharp.logsumexp(-1, keepdim=True)
        power = bound.scale * bound.temperature
        sharp = sharp + (power - 1) * torch.where(total.isinf(), 0.0, total)
        scores = torch.where(weigh, sharp, scores)
    if s_aux is not None:  # a sink: one more score in the softmax, whose value is nought
        sink = s_aux.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    return (shares @ value).to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, lambda **given: sdpa_mask(**given | {"allow_is_causal_skip": False}))
