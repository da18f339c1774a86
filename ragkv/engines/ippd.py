"""IPPD, intra-prompt parallel decoding (IPPD §4): all questions about a context at once, one pass per token."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.engines.base import Demand, Engine, ModelFacts, Request
from ragkv.engines.program import Program, Row, Shared, answer_from
from ragkv.types import Need

__all__ = ["IPPD", "IPPDConfig", "context_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IPPDConfig:
    """Nothing to set."""


class IPPD(Engine):
    """`full` for many questions about the same chunks: instruction and context are prefilled once, as one sequence.

    A row per question reads them where they lie. The paper writes all questions into one prompt, gives each its own
    virtual positions and hides them from each other; a row that sees the context and itself alone is the same
    computation, without the hidden scores.
    """

    name = "ippd"
    encoding = None
    Config = IPPDConfig

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset()

    def demand(self, request: Request, max_new_tokens: int) -> Demand:
        return Demand(rows=1, tokens=len(request.suffix_ids) + max_new_tokens, shared=_shared(request).sizes)

    def program(self, request: Request, model: ModelFacts) -> Program:
        segments = yield _shared(request)
        row = Row.over(segments, position=segments[-1].end if segments else 0)
        yield from answer_from(row, request.suffix_ids)


def context_of(request: Request) -> tuple[int, ...]:
    """All chunks in the order in which they stand in the prompt, as one sequence."""
    return tuple(i for chunk in request.chunks for i in chunk.token_ids)


def _shared(request: Request) -> Shared:
    """Instruction, then context: two parts, so that other contexts find the instruction done."""
    return Shared((request.prefix_ids, context_of(request)))
