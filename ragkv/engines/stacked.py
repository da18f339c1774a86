"""IPPD as the paper writes it (IPPD §4.1, §4.2): contexts and questions in one prompt, all answers decoded in parallel.

Which questions stand in one prompt is settled here; what is in a prompt, in `ragkv.engines.stackedprompt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragkv.engines.base import Demand, Engine, ModelFacts, Request
from ragkv.engines.ippd import IPPD, context_of
from ragkv.engines.program import Program
from ragkv.engines.stackedprompt import StackedPrompt
from ragkv.errors import ConfigError
from ragkv.types import Need

__all__ = ["Stacked", "StackedConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedConfig:
    """How many contexts a prompt holds at most, and how many tokens before the first answer (or one question's)."""

    contexts: int = 4
    tokens: int = 4096

    def __post_init__(self) -> None:
        if self.contexts < 1 or self.tokens < 1:
            raise ConfigError("ippd-stacked: contexts and tokens must be at least 1.")


class Stacked(Engine):
    """The reference for `ippd`, which gives the same answers with fewer FLOPs."""

    name = "ippd-stacked"
    encoding = None
    Config = StackedConfig
    stacks = True

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.STACK})

    def demand(self, request: Request, max_new_tokens: int) -> Demand:
        return IPPD().demand(request, max_new_tokens)

    def program(self, request: Request, model: ModelFacts) -> Program:
        [program] = self.together((request,), model)
        return program

    def together(self, requests: Sequence[Request], model: ModelFacts) -> list[Program]:
        most: StackedConfig = self.config
        first: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        parts = [(request.prefix_ids, context_of(request), request.suffix_ids) for request in requests]
        order = [first.setdefault(part[:2], index) for index, part in enumerate(parts)]
        prompts: dict[tuple[int, ...], StackedPrompt] = {}
        programs: dict[int, Program] = {}
        for index in sorted(range(len(parts)), key=order.__getitem__):  # the questions of a context stand together
            instruction, context, question = parts[index]
            prompt = prompts.get(instruction)
            if prompt is None or not prompt.fits(context, question, contexts=most.contexts, tokens=most.tokens):
                prompt = prompts[instruction] = StackedPrompt(instruction)
            if model.max_positions is not None and sum(map(len, parts[index])) > model.max_positions:
                prompt = StackedPrompt(instruction)  # to be refused alone
            programs[index] = prompt.answer(prompt.ask(context, question))
        return [programs[index] for index in range(len(parts))]
