"""PCED's arithmetic on logits: contrast strength β, and the experts' joint score (PCED Eqs. 2 and 3, Table 7).

Experts may come in groups. Between groups one `(vocab,)` row per running quantity is kept, and a group's fp32 logits
are worked on in place: they exist once, and no more than one group's at a time.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Evidence", "divergence", "divergence_terms"]

_LEAST = 1e-12  # r_k is clipped to [1e-12, 1) before its logarithm (PCED Appendix B)


class Evidence:
    """The experts' joint score of every token so far, `scores` `(vocab,)`, and who proposes it, `winners` `(vocab,)`.

    A winner is an index into `relevance`, the experts' r in the order in which they are added. Among equals the
    earlier one wins, so give them in falling relevance.
    """

    def __init__(self, rule: Literal["max", "moe", "poe"], relevance: Tensor, gamma: float) -> None:
        self._rule = rule
        self._prior = gamma * relevance.clamp_min(_LEAST).log()  # (experts,)
        if rule != "max":  # Table 7: a mixture or a product in probability space, weighed by r^γ
            self._prior = torch.log_softmax(self._prior, 0)
        self._seen = 0
        self.scores = self.winners = self._best = torch.empty(0)

    def add(self, logits: Tensor, amateur: Tensor, beta: Tensor) -> None:
        """The next experts: raw fp32 logits `(n, vocab)`, which are used up. `beta` is `(n, 1)` or `(n, vocab)`."""
        first, self._seen = self._seen, self._seen + len(logits)
        prior = self._prior[first : self._seen]
        logits.lerp_(amateur, -beta)  # (1+β)·s_k − β·s_0
        if self._rule == "max":
            best, winners = logits.add_(prior[:, None]).max(0)  # the first of equals
            self._merge(best, winners + first)
            self.scores = self._best
            return
        for at, (row, weight) in enumerate(zip(logits, prior, strict=True), start=first):
            row.sub_(row.logsumexp(0))
            product = row * weight.exp()
            share = row.add_(weight)
            self._merge(share, torch.full_like(share, at, dtype=torch.long))
            joint = product if self._rule == "poe" else share
            if at == 0:
                self.scores = joint
            else:
                self.scores = self.scores + joint if self._rule == "poe" else torch.logaddexp(self.scores, joint)

    def _merge(self, best: Tensor, winners: Tensor) -> None:
        if not len(self._best):
            self._best, self.winners = best, winners
            return
        self.winners = torch.where(best > self._best, winners, self.winners)  # equal: the earlier one stays
        self._best = torch.maximum(best, self._best)


def divergence_terms(expert: Tensor, amateur: Tensor) -> Tensor:
    """What each token adds to twice the Jensen-Shannon divergence: p·log(p/m) + q·log(q/m), `(vocab,)`, never negative.

    Full-vocabulary softmax in fp32, natural logarithm, m = (p+q)/2.
    """
    p, q = torch.log_softmax(expert.float(), -1), torch.log_softmax(amateur.float(), -1)
    m = torch.logaddexp(p, q) - math.log(2)
    return ((p.exp() * (p - m)).nan_to_num(0.0) + (q.exp() * (q - m)).nan_to_num(0.0)).clamp_min(0.0)


def divergence(experts: Tensor, amateur: Tensor) -> Tensor:
    """Jensen-Shannon divergence of each of `(n, vocab)` logits from `(vocab,)`, in [0, ln 2]: `(n,)` (AdaCAD).

    An expert at a time: the softmaxes of all would be several times their logits.
    """
    found = torch.stack([divergence_terms(expert, amateur).sum() for expert in experts])
    return (0.5 * found).clamp(0.0, math.log(2))
