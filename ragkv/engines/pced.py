"""PCED, parallel context-of-experts decoding (PCED §3): one expert per chunk, evidence joined at every token.

The arithmetic on logits is here too: contrast strength β and the experts' joint score (Eqs. 2 and 3, Table 7). Experts
may run in groups. Between groups one `(vocab,)` tensor per running quantity is kept, and a group's fp32 logits are
modified in place, so memory holds the logits of one group at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ragkv.attention.kv import PlacedChunk
from ragkv.attention.sequence import TokenSequence
from ragkv.config import one_of, require_types
from ragkv.engines.base import Demand, Engine, Forward, ModelFacts, Program, Request, Sample
from ragkv.errors import ConfigError
from ragkv.types import Encoding

_LEAST = 1e-12  # r_k is clipped to [1e-12, 1) before its logarithm (PCED Appendix B)


class Evidence:
    """The experts' joint score of every token so far, `scores` `(vocab,)`, and its expert, `winners` `(vocab,)`.

    A winner is an index into `relevance`, the experts' r in the order in which they are added. Among equals the earlier
    one wins, so add them in descending relevance.
    """

    def __init__(self, rule: Literal["max", "moe", "poe"], relevance: Tensor, gamma: float) -> None:
        self._rule = rule
        self._prior = gamma * relevance.clamp_min(_LEAST).log()  # (experts,)
        if rule != "max":  # Table 7: a mixture or a product in probability space, weighed by r^γ
            self._prior = torch.log_softmax(self._prior, 0)
        self._seen = 0
        self.scores = self.winners = self._best = torch.empty(0)

    def add(self, logits: Tensor, amateur: Tensor, beta: Tensor) -> None:
        """Add experts: raw fp32 logits `(n, vocab)`, which are overwritten. `beta` is `(n, 1)` or `(n, vocab)`."""
        first, self._seen = self._seen, self._seen + len(logits)
        prior = self._prior[first : self._seen]
        logits.lerp_(amateur, -beta)  # (1+β)·s_k − β·s_0
        if self._rule == "max":
            best, winners = logits.add_(prior[:, None]).max(0)  # the first of equals
            self._merge(best, winners + first)
            self.scores = self._best
            return
        for expert, (row, weight) in enumerate(zip(logits, prior, strict=True), start=first):
            row.sub_(row.logsumexp(0))
            product = row * weight.exp()
            share = row.add_(weight)
            self._merge(share, torch.full_like(share, expert, dtype=torch.long))
            joint = product if self._rule == "poe" else share
            if expert == 0:
                self.scores = joint
            else:
                self.scores = self.scores + joint if self._rule == "poe" else torch.logaddexp(self.scores, joint)

    def _merge(self, best: Tensor, winners: Tensor) -> None:
        if not len(self._best):
            self._best, self.winners = best, winners
            return
        self.winners = torch.where(best > self._best, winners, self.winners)  # equal: keep the earlier one
        self._best = torch.maximum(best, self._best)


def divergence_terms(expert: Tensor, amateur: Tensor) -> Tensor:
    """Each token's term of twice the Jensen-Shannon divergence: p·log(p/m) + q·log(q/m), `(vocab,)`, never negative.

    Full-vocabulary softmax in fp32, natural logarithm, m = (p+q)/2.
    """
    p, q = torch.log_softmax(expert.float(), -1), torch.log_softmax(amateur.float(), -1)
    m = torch.logaddexp(p, q) - math.log(2)
    return ((p.exp() * (p - m)).nan_to_num(0.0) + (q.exp() * (q - m)).nan_to_num(0.0)).clamp_min(0.0)


def divergence(experts: Tensor, amateur: Tensor) -> Tensor:
    """Jensen-Shannon divergence of each of `(n, vocab)` logits from `(vocab,)`, in [0, ln 2]: `(n,)` (AdaCAD).

    Computed one expert at a time, because the softmaxes of all would need several times the memory of their logits.
    """
    found = torch.stack([divergence_terms(expert, amateur).sum() for expert in experts])
    return (0.5 * found).clamp(0.0, math.log(2))


@dataclass(frozen=True, slots=True, kw_only=True)
class PCEDConfig:
    """γ and β of Eq. 2, the rule of Eq. 3 (`max`) or its ablations (`moe`, `poe`: Table 7), and the size of a batch.

    `beta`: the Jensen-Shannon divergence between each expert and the amateur at the first generated token (AdaCAD),
    kept `per_expert` or averaged to one `shared` number; `released`, as in the authors' code: the divergence's terms
    are not summed, so there is a β per expert and vocabulary entry; or a fixed number (Table 4). `group_experts` bounds
    how many experts run in one batch; 0 is all. It changes memory, never the answer.
    """

    gamma: float = 2.5
    beta: float | Literal["per_expert", "shared", "released"] = "per_expert"
    aggregation: Literal["max", "moe", "poe"] = "max"
    group_experts: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < math.inf:
            raise ConfigError("pced: gamma must be a number that is not negative.")
        if isinstance(self.beta, str):
            one_of("pced: beta", self.beta, ("per_expert", "shared", "released"))
        elif not 0 <= self.beta < math.inf:
            raise ConfigError("pced: beta must not be negative.")
        require_types(self, "pced: ")
        if self.group_experts < 0:
            raise ConfigError("pced: group_experts must be 0 (all at once) or a number of experts.")


class PCED(Engine):
    """Expert k sees [prefix, chunk k], the amateur the prefix alone; all see the same question and tokens.

    A chunk without tokens is not an expert. Experts are ordered by descending r, so equal scores go to the higher r,
    then to the earlier expert.
    """

    name = "pced"
    encoding = Encoding.PREFIXED
    Config = PCEDConfig
    counts_winners = True
    needs = frozenset()

    def demand(self, request: Request, max_new_tokens: int) -> Demand:
        sequences = 1 + len(request.filled)
        return Demand(sequences=sequences, tokens=sequences * (len(request.suffix_ids) + max_new_tokens))

    def program(self, request: Request, model: ModelFacts) -> Program:
        config: PCEDConfig = self.config
        chunks, start, ids = request.chunks, request.prefix_tokens, request.suffix_ids
        order = tuple(sorted(request.filled, key=lambda i: (-chunks[i].score, -i)))
        kvs = [chunks[i].stored() for i in order]
        amateur = TokenSequence.over(request.before, position=start)
        # each stream's question continues from its own length
        experts = [
            TokenSequence.over((*request.before, PlacedChunk(kv=kv, start=start)), position=start + kv.tokens)
            for kv in kvs
        ]
        size = config.group_experts or max(len(experts), 1)
        groups = [experts[i : i + size] for i in range(0, max(len(experts), 1), size)]
        contrast = _Contrast(config, [chunks[i].score for i in order])
        while True:
            for number, group in enumerate(groups):
                # the amateur reads with the first group, whose contrast needs it
                sequences = group if number else [amateur, *group]
                logits = yield Forward(sequences, [ids] * len(sequences))
                contrast.add(logits, first=not number)
                del logits  # freed before the next group is read
            scores, winners = contrast.joined()
            ids = ((yield Sample(scores, winners, order)),)


class _Contrast:
    """The experts' joint score, step by step; β is computed at the first token and then fixed (PCED §3)."""

    def __init__(self, config: PCEDConfig, relevance: Sequence[float]) -> None:
        self._config = config
        self._relevance = relevance
        self._beta: list[Tensor] = []
        self._waiting: list[Tensor] = []
        self._number = 0
        self._amateur: Tensor
        self._evidence: Evidence

    def add(self, logits: Tensor, *, first: bool) -> None:
        """The next group's logits `(experts, vocab)`, the amateur's before the `first` group's."""
        if first:
            self._amateur, logits = logits[0].clone(), logits[1:]
            relevance = torch.tensor(self._relevance, dtype=torch.float32).to(logits.device, non_blocking=True)
            self._evidence = Evidence(self._config.aggregation, relevance, self._config.gamma)
            self._number = 0
        if not len(logits):
            return
        if len(self._beta) <= self._number:
            if self._config.beta == "shared":
                self._waiting.append(logits)  # their mean is known once all have read the question
                return
            self._beta.append(self._strength(logits))
        self._evidence.add(logits, self._amateur, self._beta[self._number])
        self._number += 1

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """Scores and winners `(vocab,)`; without experts, the amateur's own distribution."""
        if not self._relevance:
            return self._amateur, None
        if self._waiting:
            mean = torch.cat([divergence(logits, self._amateur) for logits in self._waiting]).mean()
            self._beta = [mean.expand(len(logits), 1) for logits in self._waiting]
            for logits, beta in zip(self._waiting, self._beta, strict=True):
                self._evidence.add(logits, self._amateur, beta)
            self._waiting = []
        return self._evidence.scores, self._evidence.winners

    def _strength(self, logits: Tensor) -> Tensor:
        """β of some experts from their first token's logits, `(n, 1)` or `(n, vocab)`."""
        rule = self._config.beta
        if not isinstance(rule, str):
            return logits.new_full((len(logits), 1), rule)
        if rule == "per_expert":
            return divergence(logits, self._amateur)[:, None]
        return torch.stack([0.5 * divergence_terms(expert, self._amateur) for expert in logits]).clamp_(0.0, 1.0)
