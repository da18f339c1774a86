"""PCED, parallel context-of-experts decoding (PCED §3): one expert per chunk, evidence joined at every token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ragkv.attention.kv import Segment
from ragkv.attention.row import Row
from ragkv.config import one_of
from ragkv.engines.base import Demand, Engine, ModelFacts, Request
from ragkv.engines.evidence import Evidence, divergence, divergence_terms
from ragkv.engines.program import Choose, Program, Read
from ragkv.errors import ConfigError
from ragkv.types import Encoding, Need

__all__ = ["PCED", "PCEDConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PCEDConfig:
    """γ and β of Eq. 2, the rule of Eq. 3 (`max`) or its ablations (`moe`, `poe`: Table 7), and what runs at once.

    `beta`: the Jensen-Shannon divergence between each expert and the amateur at the first generated token
    (AdaCAD), kept `per_expert` or averaged to one `shared` number; `released`, as the authors' code has it: the
    divergence's terms not summed, so one β per expert and vocabulary entry; or a fixed number (Table 4).
    `group_experts` bounds how many experts run in one batch; 0 is all. It changes memory, never the answer.
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
        one_of("pced: aggregation", self.aggregation, ("max", "moe", "poe"))
        if self.group_experts < 0:
            raise ConfigError("pced: group_experts must be 0 (all at once) or a number of experts.")


class PCED(Engine):
    """Expert k sees [prefix, chunk k], the amateur the prefix alone; all see the same question and tokens.

    A chunk without tokens has no evidence to give, so it is no expert. Experts are ordered by falling r, so that equal
    scores go to the higher r, then to the earlier expert.
    """

    name = "pced"
    encoding = Encoding.PREFIXED
    Config = PCEDConfig
    counts_winners = True

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset()

    def demand(self, request: Request, max_new_tokens: int) -> Demand:
        rows = 1 + len(request.filled)
        return Demand(rows=rows, tokens=rows * (len(request.suffix_ids) + max_new_tokens))

    def program(self, request: Request, model: ModelFacts) -> Program:
        config: PCEDConfig = self.config
        chunks, at, ids = request.chunks, request.prefix_tokens, request.suffix_ids
        order = tuple(sorted(request.filled, key=lambda i: (-chunks[i].score, -i)))
        kvs = [chunks[i].stored() for i in order]
        amateur = Row.over(request.before, position=at)
        # each stream's question continues from its own length
        experts = [Row.over((*request.before, Segment(kv=kv, start=at)), position=at + kv.tokens) for kv in kvs]
        size = config.group_experts or max(len(experts), 1)
        groups = [experts[i : i + size] for i in range(0, max(len(experts), 1), size)]
        contrast = _Contrast(config, [chunks[i].score for i in order])
        while True:
            for number, group in enumerate(groups):
                # the amateur reads with the first group, whose contrast needs it
                rows = group if number else [amateur, *group]
                logits = yield Read(rows, [ids] * len(rows))
                contrast.add(logits, first=not number)
                del logits  # gone before the next group is read
            scores, winners = contrast.joined()
            ids = ((yield Choose(scores, winners, order)),)


class _Contrast:
    """The experts' joint score, step by step; β is found at the first token and then fixed (PCED §3)."""

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
            relevance = torch.tensor(self._relevance).to(logits.device, non_blocking=True)
            self._evidence = Evidence(self._config.aggregation, relevance, self._config.gamma)
            self._number = 0
        if not len(logits):
            return
        if len(self._beta) <= self._number:
            if self._config.beta == "shared":
                self._waiting.append(logits)  # their mean is not known before all have read the question
                return
            self._beta.append(self._strength(logits))
        self._evidence.add(logits, self._amateur, self._beta[self._number])
        self._number += 1

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """Scores and winners `(vocab,)`; without experts the model's own prior answers."""
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
