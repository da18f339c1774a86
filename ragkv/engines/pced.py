"""PCED, parallel context-of-experts decoding (PCED §3): one expert per chunk, evidence joined at every token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ragkv.config import one_of
from ragkv.context import Context, ContextGroup
from ragkv.engines.base import Engine, Request, Stream
from ragkv.errors import ConfigError
from ragkv.kv import PlacedKV
from ragkv.types import Encoding

if TYPE_CHECKING:
    from ragkv.model import LanguageModel

__all__ = ["PCED", "PCEDConfig", "divergence"]

_LEAST = 1e-12  # r_k is clipped to [1e-12, 1) before its logarithm (PCED Appendix B)


@dataclass(frozen=True, slots=True, kw_only=True)
class PCEDConfig:
    """γ and β of Eq. 2, and the rule of Eq. 3 (`max`) or its ablations (`moe`, `poe`: Table 7).

    `beta`: the Jensen-Shannon divergence between each expert and the amateur at the first generated token
    (AdaCAD), kept `per_expert` or averaged to one `shared` number; or a fixed number (Table 4).
    """

    gamma: float = 2.5
    beta: float | Literal["per_expert", "shared"] = "per_expert"
    aggregation: Literal["max", "moe", "poe"] = "max"

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < math.inf:
            raise ConfigError("pced: gamma must be a number that is not negative.")
        if isinstance(self.beta, str):
            one_of("pced: beta", self.beta, ("per_expert", "shared"))
        elif not 0 <= self.beta < math.inf:
            raise ConfigError("pced: beta must not be negative.")
        one_of("pced: aggregation", self.aggregation, ("max", "moe", "poe"))


class PCED(Engine):
    """Expert k sees [prefix, chunk k], the amateur the prefix alone; all see the same question and tokens."""

    name = "pced"
    encoding = Encoding.PREFIXED
    Config = PCEDConfig
    counts_winners = True

    def start(self, model: LanguageModel, request: Request) -> ExpertStream:
        return ExpertStream(model, request, self.config)


class ExpertStream(Stream):
    """N+1 rows in one batch: row 0 is the amateur, row k+1 the expert of the k-th most relevant chunk.

    Experts are ordered by falling r, so that equal scores go to the higher r, then to the earlier expert.
    """

    def __init__(self, model: LanguageModel, request: Request, config: PCEDConfig) -> None:
        self._model, self._config = model, config
        chunks = request.chunks
        self._order = sorted(range(len(chunks)), key=lambda i: (-chunks[i].score, -i))
        experts = [chunks[i] for i in self._order]
        groups = []
        if request.prefix is not None:
            groups.append(ContextGroup(chunks=(PlacedKV(kv=request.prefix, start=0),)))
        at = request.prefix_tokens
        for row, chunk in enumerate(experts, start=1):
            groups.append(ContextGroup(chunks=(PlacedKV(kv=chunk.stored(), start=at),), row=row))
        self._context = Context(groups=tuple(groups))
        self._own = model.own()
        # each stream's question continues from its own length
        self._next = torch.tensor([at, *(at + chunk.stored().tokens for chunk in experts)], device=model.device)
        model.require_positions(int(self._next.max()) + len(request.suffix_ids))
        self._prior = torch.tensor([max(chunk.score, _LEAST) for chunk in experts], device=model.device)
        self._beta: Tensor | None = None
        self._winners: Tensor | None = None
        self._read(request.suffix_ids)

    def advance(self, token_id: int) -> None:
        self._read((token_id,))

    def best(self) -> int:
        """Eq. 3 with ties in the total order (score, r, expert, token id)."""
        if self._winners is None:
            return super().best()
        tied = (self.scores == self.scores.max()).nonzero()[:, 0]
        return int(tied[self._winners[tied].argmin()])

    def winner(self, token_id: int) -> int | None:
        return None if self._winners is None else self._order[int(self._winners[token_id])]

    def _read(self, ids: tuple[int, ...]) -> None:
        rows = len(self._next)
        tokens = torch.tensor(ids, device=self._model.device).expand(rows, -1)
        steps = torch.arange(len(ids), device=self._model.device)
        logits = self._model.forward(
            tokens, self._next[:, None] + steps, context=self._context, own=self._own
        )  # (1 + experts, vocab)
        self._next = self._next + len(ids)
        amateur, experts = logits[0], logits[1:]
        if not len(experts):  # nothing was retrieved: the model's own prior answers
            self.scores = amateur
            return
        if self._beta is None:
            self._beta = self._strength(amateur, experts)
        self._aggregate(torch.lerp(experts, amateur, -self._beta))  # (1+β)·s_k − β·s_0

    def _strength(self, amateur: Tensor, experts: Tensor) -> Tensor:
        """β as `(experts, 1)`, set at the first token and fixed thereafter (PCED §3)."""
        rule = self._config.beta
        if not isinstance(rule, str):
            return experts.new_full((len(experts), 1), rule)
        beta = divergence(experts, amateur)[:, None]
        return beta if rule == "per_expert" else beta.mean().expand_as(beta)

    def _aggregate(self, contrasted: Tensor) -> None:
        """`scores` and `_winners` from (1+β)·s_k − β·s_0, `(experts, vocab)`."""
        gamma, prior = self._config.gamma, self._prior
        if self._config.aggregation == "max":
            self.scores, self._winners = (contrasted + gamma * prior.log()[:, None]).max(0)
            return
        # Table 7: a mixture or a product in probability space, weighed by r^γ
        weights = torch.softmax(gamma * prior.log(), 0)[:, None]
        shares = torch.log_softmax(contrasted, -1) + weights.log()
        self._winners = shares.max(0).indices
        if self._config.aggregation == "moe":
            self.scores = shares.logsumexp(0)
        else:
            self.scores = (weights * torch.log_softmax(contrasted, -1)).sum(0)


def divergence(experts: Tensor, amateur: Tensor) -> Tensor:
    """Jensen-Shannon divergence of `(n, vocab)` logits from `(vocab,)`, natural logarithm, in [0, ln 2]: `(n,)`.

    Full-vocabulary softmax in fp32: ½[KL(p‖m) + KL(q‖m)], m = (p+q)/2 (AdaCAD).
    """
    p = torch.log_softmax(experts.float(), -1)
    q = torch.log_softmax(amateur.float(), -1).expand_as(p)
    m = torch.logaddexp(p, q) - math.log(2)

    def kl(a: Tensor) -> Tensor:
        return (a.exp() * (a - m)).nan_to_num(0.0).sum(-1)

    return (0.5 * (kl(p) + kl(q))).clamp(0.0, math.log(2))
