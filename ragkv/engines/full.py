"""Full attention, the baseline of all engines: prefix, chunks and question are prefilled as one causal sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragkv.attention.sequence import TokenSequence
from ragkv.engines.base import ContextChunk, Demand, Engine, ModelFacts, Program, Request, answer_from

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class FullConfig:
    """No settings."""


class FullAttention(Engine):
    """One causal sequence; no stored KV is read."""

    name = "full"
    encoding = None
    Config = FullConfig
    needs = frozenset()

    def read(self, request: Request) -> tuple[ContextChunk, ...]:
        """The chunks that are in the prompt, in ascending relevance."""
        return request.chunks if self.most_chunks is None else request.chunks[-self.most_chunks :]

    def demand(self, request: Request, max_new_tokens: int) -> Demand:
        return Demand(sequences=1, tokens=len(self._ids(request)) + max_new_tokens)

    def program(self, request: Request, model: ModelFacts) -> Program:
        return answer_from(TokenSequence((), 0), self._ids(request))

    def cache(self, model: LanguageModel, request: Request) -> dict[str, Any]:
        """Arguments for transformers' own `generate`: `input_ids` and `attention_mask`, `(1, tokens)`."""
        import torch

        ids = torch.tensor([self._ids(request)], device=model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _ids(self, request: Request) -> list[int]:
        chunks = (i for chunk in self.read(request) for i in chunk.token_ids)
        return [*request.prefix_ids, *chunks, *request.suffix_ids]


class Single(FullAttention):
    """The best of the retrieved chunks alone (PCED Table 1, "Single")."""

    name = "single"
    most_chunks = 1
