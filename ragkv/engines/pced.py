"""PCED, parallel context-of-experts decoding (PCED §3): one expert per chunk, evidence joined at every token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ragkv.attention.context import Context, ContextGroup
from ragkv.attention.kv import PlacedKV
from ragkv.attention.settle import settle
from ragkv.config import one_of
from ragkv.engines.base import ContextChunk, Engine, Request, Stream
from ragkv.engines.evidence import Evidence, divergence, divergence_terms
from ragkv.errors import ConfigError
from ragkv.types import Encoding

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel

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

    A chunk without tokens has no evidence to give, so it is no expert.
    """

    name = "pced"
    encoding = Encoding.PREFIXED
    Config = PCEDConfig
    counts_winners = True

    def start(self, model: LanguageModel, request: Request) -> ExpertStream:
        return ExpertStream(model, request, self.config)


class ExpertStream(Stream):
    """The amateur and the experts as rows of one batch, or of several when `group_experts` says so.

    Experts are ordered by falling r, so that equal scores go to the higher r, then to the earlier expert.
    """

    def __init__(self, model: LanguageModel, request: Request, config: PCEDConfig) -> None:
        self._config = config
        chunks = request.chunks
        self._order = sorted(request.filled, key=lambda i: (-chunks[i].score, -i))
        experts = [chunks[i] for i in self._order]
        size = config.group_experts or max(len(experts), 1)
        cuts = range(0, max(len(experts), 1), size)
        # the amateur is the first group's first row
        self._batches = [_Batch(model, request, experts[at : at + size], amateur=at == 0) for at in cuts]
        self._relevance = torch.tensor([chunk.score for chunk in experts], device=model.device)
        self._beta: list[Tensor] = []
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

    @torch.inference_mode()
    def _read(self, ids: tuple[int, ...]) -> None:
        self.position = max(batch.end for batch in self._batches) + len(ids)
        evidence = Evidence(self._config.aggregation, self._relevance, self._config.gamma)
        first, waiting = not self._beta, []
        for index, batch in enumerate(self._batches):
            logits = batch.read(ids)  # (rows, vocab); gone before the next batch runs
            if index == 0:
                amateur, logits = logits[0].clone(), logits[1:]
            if not self._order:  # nothing was retrieved: the model's own prior answers
                self.scores = amateur
                return
            if first and self._config.beta == "shared":
                waiting.append(logits)  # their mean is not known before all have read the question
                continue
            if first:
                self._beta.append(self._strength(logits, amateur))
            evidence.add(logits, amateur, self._beta[index])
            del logits
        if waiting:
            mean = torch.cat([divergence(logits, amateur) for logits in waiting]).mean()
            self._beta = [mean.expand(len(logits), 1) for logits in waiting]
            for logits, beta in zip(waiting, self._beta, strict=True):
                evidence.add(logits, amateur, beta)
        self.scores, self._winners = evidence.scores, evidence.winners

    def _strength(self, logits: Tensor, amateur: Tensor) -> Tensor:
        """β of some experts from their first token's logits, `(n, 1)` or `(n, vocab)`; fixed thereafter (PCED §3)."""
        rule = self._config.beta
        if not isinstance(rule, str):
            return logits.new_full((len(logits), 1), rule)
        if rule == "per_expert":
            return divergence(logits, amateur)[:, None]
        return torch.stack([0.5 * divergence_terms(expert, amateur) for expert in logits]).clamp_(0.0, 1.0)


class _Batch:
    """Experts that run together, each a row over the shared prefix and its own chunk; `amateur` adds a row before."""

    def __init__(
        self, model: LanguageModel, request: Request, experts: Sequence[ContextChunk], *, amateur: bool
    ) -> None:
        at = request.prefix_tokens
        groups = []
        if request.prefix is not None:  # one KV for all rows, never a copy per expert
            groups.append(ContextGroup(chunks=(PlacedKV(kv=request.prefix, start=0),)))
        for row, chunk in enumerate(experts, start=int(amateur)):
            groups.append(ContextGroup(chunks=(PlacedKV(kv=chunk.stored(), start=at),), row=row))
        self._model = model
        self._context, self._settled = Context(groups=tuple(groups)), False
        self._own = model.own()
        # each stream's question continues from its own length
        ends = [at] * amateur + [at + chunk.stored().tokens for chunk in experts]
        self.end = max(ends)
        model.require_positions(self.end + len(request.suffix_ids))
        self._next = torch.tensor(ends, device=model.device)

    def read(self, ids: Sequence[int]) -> Tensor:
        """Every row reads `ids`; fp32 logits of the last, `(rows, vocab)`."""
        if not self._settled and self._own.length(0):
            self._context = settle(self._context, self._model.rotary, windowed=bool(self._model.windows))
            self._settled = True
        tokens = torch.tensor(ids, device=self._model.device).expand(len(self._next), -1)
        positions = self._next[:, None] + torch.arange(len(ids), device=self._model.device)
        self._next, self.end = self._next + len(ids), self.end + len(ids)
        return self._model.forward(tokens, positions, context=self._context, own=self._own)
