"""One family's verdict: ragkv's engines against dense, uncached fp32 forwards of transformers, greedy token by token.

Independent of ragkv's proof on load: every prompt is one whole sequence with explicit positions. A layer's window is
read from the dense mask that transformers makes for it, and the dense attention here is first held against
transformers' own eager attention. Nothing is cached, moved, turned or merged.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ragkv.engines.base import ContextChunk, Request
from ragkv.engines.registry import make_engine
from ragkv.errors import ModelLoadError, UnsupportedModelError
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.language import LanguageModel
from ragkv.model.proof import check_model
from ragkv.runtime import Stream, runtime_of

NAME = "ragkv-sweep"
PREFIX, CHUNKS, SUFFIX = 6, (17, 29, 11), 7  # together longer than a window of 24, and one chunk alone
T, S, GAMMA = 0.7, 0.6, 2.5
SCORES = (0.3, 0.8, 0.55)
Ids = list[int]


@dataclass(frozen=True)
class Verdict:
    """`error`: the largest difference of scores over the largest score; None for a refusal, whose `reason` is told."""

    family: str
    error: float | None
    reason: str = ""


def examine(family: str, model: Any, tokenizer: Any, *, seed: int = 0, steps: int = 8) -> Verdict:
    """Accept or refuse as ragkv does on load, then compare; no other exception is caught."""
    dense = Reference(copy.deepcopy(model))
    try:
        language = LanguageModel(model, tokenizer, Checkpoint(name=family, location=family, local=True))
        check_model(language)
    except (UnsupportedModelError, ModelLoadError) as error:
        return Verdict(family, None, str(error))
    with torch.inference_mode():
        return Verdict(family, _worst(language, dense, seed, steps))


def _worst(language: LanguageModel, dense: Reference, seed: int, steps: int) -> float:
    generator = torch.Generator().manual_seed(100 + seed)
    high = min(language.config.vocab_size, 300)
    sizes = (PREFIX, *CHUNKS, SUFFIX)
    prefix, *chunks, suffix = (torch.randint(3, high, (n,), generator=generator).tolist() for n in sizes)
    dense.prepare([*prefix, *(t for chunk in chunks for t in chunk), *suffix])
    [prefix_kv] = language.encode([prefix])
    kvs = {"full": [None] * 3, "block": language.encode(chunks)}
    kvs["ape"] = kvs["pced"] = language.encode(chunks, prefix=prefix_kv)
    worst = 0.0
    for name, options in {"full": {}, "block": {}, "ape": {"temperature": T, "scale": S}, "pced": {}}.items():
        request = Request(
            prefix_ids=tuple(prefix),
            chunks=tuple(
                ContextChunk(token_ids=tuple(c), score=r, kv=kv)
                for c, r, kv in zip(chunks, SCORES, kvs[name], strict=True)
            ),
            suffix_ids=tuple(suffix),
            prefix=None if name == "full" else prefix_kv,
        )
        stream = Stream(runtime_of(language), make_engine(name, {name: options}), request)
        out: Ids = []
        strengths: list[float] = []
        for _ in range(steps):
            expected = getattr(dense, name)(prefix, chunks, [*suffix, *out], strengths)
            off = float((stream.scores - expected).abs().max() / expected.abs().max())
            worst = max(worst, off if math.isfinite(off) else math.inf)
            out.append(int(expected.argmax()))
            stream.advance(out[-1])
    return worst


class Reference:
    """transformers' model with dense attention over whole sequences."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self._windows: dict[int, int | None] = {}

    def prepare(self, tokens: Ids) -> None:
        """Read each layer's window from transformers' own mask, and hold the dense attention against eager's."""
        ids = torch.tensor([tokens])
        masks: dict[int, Tensor] = {}
        self._model.set_attn_implementation("eager")
        expected = self._model(input_ids=ids, use_cache=False).logits[0, -1].float()
        self._model.set_attn_implementation(NAME)
        self._model(input_ids=ids, use_cache=False, sweep_masks=masks)
        self._windows = {layer: _window(mask) for layer, mask in masks.items()}
        positions = torch.arange(len(tokens))
        found = self._logits(tokens, positions, torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril())
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max(), "the sweep's own attention is not eager's"

    def _logits(self, tokens: Ids, positions: Tensor, visible: Tensor, weigh: Tensor | None = None) -> Tensor:
        plan = {
            "visible": visible,
            "behind": positions[:, None] - positions,
            "windows": self._windows,
            "weigh": weigh,
        }
        out = self._model(
            input_ids=torch.tensor([tokens]), position_ids=positions[None], use_cache=False, sweep=plan
        ).logits
        return out[0, -1].float()

    def full(self, prefix: Ids, chunks: list[Ids], own: Ids, _strengths: list[float]) -> Tensor:
        tokens = [*prefix, *(t for chunk in chunks for t in chunk), *own]
        return self._logits(tokens, torch.arange(len(tokens)), torch.ones(len(tokens), len(tokens)).tril().bool())

    def block(self, prefix: Ids, chunks: list[Ids], own: Ids, _strengths: list[float]) -> Tensor:
        tokens = [*prefix, *(t for chunk in chunks for t in chunk), *own]
        visible = torch.ones(len(tokens), len(tokens)).tril().bool()
        at = 0
        for part in (prefix, *chunks):
            visible[at : at + len(part), :at] = False
            at += len(part)
        return self._logits(tokens, torch.arange(len(tokens)), visible)

    def ape(self, prefix: Ids, chunks: list[Ids], own: Ids, _strengths: list[float]) -> Tensor:
        tokens = [*prefix, *(t for chunk in chunks for t in chunk), *own]
        start, longest = len(prefix), max(map(len, chunks))
        places = [*range(start), *(start + i for chunk in chunks for i in range(len(chunk)))]
        places += range(start + longest, start + longest + len(own))
        visible = torch.ones(len(tokens), len(tokens)).tril().bool()
        at = start
        for chunk in chunks:
            visible[at : at + len(chunk), start:at] = False
            at += len(chunk)
        weigh = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        weigh[at:, start:at] = True
        return self._logits(tokens, torch.tensor(places), visible, weigh)

    def pced(self, prefix: Ids, chunks: list[Ids], own: Ids, strengths: list[float]) -> Tensor:
        amateur, *experts = (self.full(prefix, part, own, []) for part in ([], *([chunk] for chunk in chunks)))
        if not strengths:
            strengths += [_divergence(amateur, expert) for expert in experts]
        rows = [
            (1 + b) * expert - b * amateur + GAMMA * math.log(r)
            for b, expert, r in zip(strengths, experts, SCORES, strict=True)
        ]
        return torch.stack(rows).amax(0)


def _window(mask: Tensor) -> int | None:
    """The window that a dense causal mask `(1, 1, n, n)` has: the most that any token sees, None if that is all."""
    most = int(mask[0, 0].sum(-1).max())
    return None if most == mask.shape[-1] else most


def _divergence(a: Tensor, b: Tensor) -> float:
    p, q = torch.softmax(a.double(), -1), torch.softmax(b.double(), -1)
    m = (p + q) / 2
    return float(0.5 * (p * (p / m).log() + q * (q / m).log()).sum())


def _dense(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    sweep: dict[str, Any] | None = None,
    sweep_masks: dict[int, Tensor] | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if sweep_masks is not None:
        sweep_masks[module.layer_idx] = attention_mask
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1).double(), value.repeat_interleave(groups, 1).double()
    scores = query.double() @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible, weigh = attention_mask[0, 0], None
    if sweep is not None:
        visible, window = sweep["visible"], sweep["windows"][module.layer_idx]
        weigh = sweep["weigh"]
        if window is not None:
            visible = visible & (sweep["behind"] < window)
    scores = scores.masked_fill(~visible, -torch.inf)
    if weigh is not None:  # APE's Eq. 5: the group's sum Z of exp(s/T) enters the row as Z^(S·T)
        sharp = (scores / T).masked_fill(~weigh, -torch.inf)
        total = sharp.logsumexp(-1, keepdim=True)
        sharp = sharp + (S * T - 1) * torch.where(total.isinf(), 0.0, total)
        scores = torch.where(weigh, sharp, scores)
    out = scores.softmax(-1) @ value
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _dense)
AttentionMaskInterface.register(NAME, lambda **arguments: sdpa_mask(**arguments | {"allow_is_causal_skip": False}))
