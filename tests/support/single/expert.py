"""PCED's amateur and experts as rows of one batch, or of several where `group_experts` says so (PCED §3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragkv.attention.kv import PlacedChunk
from ragkv.engines import Request
from ragkv.engines.pced import Evidence, PCEDConfig, divergence, divergence_terms
from ragkv.model.language_model import LanguageModel
from single.attention import Group, Rows
from single.causal import Stream

__all__ = ["ExpertStream"]


class ExpertStream(Stream):
    """Experts are ordered by falling r, so that equal scores go to the higher r, then to the earlier expert."""

    def __init__(self, model: LanguageModel, config: PCEDConfig, request: Request) -> None:
        self._config = config
        chunks, at = request.chunks, request.prefix_tokens
        self.order = tuple(sorted(request.filled, key=lambda i: (-chunks[i].score, -i)))
        size = config.group_experts or max(len(self.order), 1)
        self._batches: list[Rows] = []
        for cut in range(0, max(len(self.order), 1), size):
            amateur = not cut  # the first group's first row
            experts = [PlacedChunk(kv=chunks[i].stored(), start=at) for i in self.order[cut : cut + size]]
            own = [Group(segments=(segment,), row=row) for row, segment in enumerate(experts, start=int(amateur))]
            ends = [at] * amateur + [segment.end for segment in experts]
            self._batches.append(Rows(model, [Group(segments=request.before), *own], ends))
        self._relevance = torch.tensor([chunks[i].score for i in self.order]).to(model.device)
        self._beta: list[Tensor] = []
        self._read(request.suffix_ids)

    def advance(self, token_id: int) -> None:
        self._read((token_id,))

    @torch.inference_mode()
    def _read(self, ids: Sequence[int]) -> None:
        groups = [batch.read([ids] * len(batch.positions)) for batch in self._batches]  # (rows, vocab) each
        self.position = max(position for batch in self._batches for position in batch.positions)
        amateur, groups[0] = groups[0][0].clone(), groups[0][1:]
        if not self.order:
            self.scores = amateur
            return
        if not self._beta:
            self._beta = self._strengths(groups, amateur)
        evidence = Evidence(self._config.aggregation, self._relevance, self._config.gamma)
        for logits, beta in zip(groups, self._beta, strict=True):
            evidence.add(logits, amateur, beta)
        self.scores, self.winners = evidence.scores, evidence.winners

    def _strengths(self, groups: Sequence[Tensor], amateur: Tensor) -> list[Tensor]:
        """β of each group, `(n, 1)` or `(n, vocab)`."""
        rule = self._config.beta
        if not isinstance(rule, str):
            return [logits.new_full((len(logits), 1), rule) for logits in groups]
        if rule == "released":
            halves = [[0.5 * divergence_terms(expert, amateur) for expert in logits] for logits in groups]
            return [torch.stack(each).clamp_(0.0, 1.0) for each in halves]
        found = [divergence(logits, amateur)[:, None] for logits in groups]
        return [torch.cat(found).mean().expand_as(each) for each in found] if rule == "shared" else found
