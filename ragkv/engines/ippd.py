"""IPPD, intra-prompt parallel decoding (IPPD §4): all questions about a context at once, one forward pass per token.

The paper writes all questions into one prompt [p, c_1, x_1,1, x_1,2, …, c_2, x_2,1, …] (Eq. 1), and hides them from
each other. A sequence for each question, which reads instruction and context in place, computes the same without the
hidden scores (`tests/engines/test_ippd.py` compares).
"""

from __future__ import annotations

from ragkv.attention.sequence import TokenSequence
from ragkv.engines.base import Demand, Engine, ModelFacts, Program, Request, Shared, answer_from
from ragkv.engines.full import FullConfig


class IPPD(Engine):
    """`full` for many questions about the same chunks: instruction and context are prefilled once, as one sequence."""

    name = "ippd"
    encoding = None
    Config = FullConfig
    needs = frozenset()

    def demand(self, request: Request, max_new_tokens: int) -> Demand:
        return Demand(sequences=1, tokens=len(request.suffix_ids) + max_new_tokens, shared=_shared(request).sizes)

    def program(self, request: Request, model: ModelFacts) -> Program:
        chunks = yield _shared(request)
        sequence = TokenSequence.over(chunks, position=chunks[-1].end if chunks else 0)
        yield from answer_from(sequence, request.suffix_ids)


def _shared(request: Request) -> Shared:
    """Instruction, then context: two parts, so that prompts with other contexts share the instruction."""
    return Shared((request.prefix_ids, tuple(i for chunk in request.chunks for i in chunk.token_ids)))
