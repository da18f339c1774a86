"""IPPD, intra-prompt parallel decoding (IPPD §4): all questions about a context at once, one forward pass per token.

`IPPD` prefills instruction and context once and gives every question a sequence that reads them. `Stacked` is the
reference: the paper's single prompt [p, c_1, x_1,1, x_1,2, …, c_2, x_2,1, …] (Eq. 1), to which answers are appended
token by token; marks and masks (`ragkv.attention.sequence`) determine which token sees which. In both, each question is
a program of its own, with its own sampling, end, length and errors.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ragkv.attention.sequence import StackedSequence, TokenMark, TokenSequence
from ragkv.engines.base import (
    Demand,
    Engine,
    Forward,
    ModelFacts,
    Operation,
    Program,
    Request,
    Sample,
    Shared,
    WaitFor,
    answer_from,
)
from ragkv.engines.full import FullConfig
from ragkv.errors import ConfigError
from ragkv.types import Capability


class IPPD(Engine):
    """`full` for many questions about the same chunks: instruction and context are prefilled once, as one sequence.

    Each question is a sequence that reads them in place. The paper writes all questions into one prompt, gives each its
    own virtual positions and hides them from each other; a sequence that sees only the context and itself computes the
    same without the hidden scores.
    """

    name = "ippd"
    encoding = None
    Config = FullConfig
    needs = frozenset()

    def demand(self, request: Request, max_new_tokens: int) -> Demand:
        return Demand(rows=1, tokens=len(request.suffix_ids) + max_new_tokens, shared=_shared(request).sizes)

    def program(self, request: Request, model: ModelFacts) -> Program:
        chunks = yield _shared(request)
        row = TokenSequence.over(chunks, position=chunks[-1].end if chunks else 0)
        yield from answer_from(row, request.suffix_ids)


def context_of(request: Request) -> tuple[int, ...]:
    """All chunks in the order in which they are in the prompt, as one sequence."""
    return tuple(i for chunk in request.chunks for i in chunk.token_ids)


def _shared(request: Request) -> Shared:
    """Instruction, then context: two parts, so that prompts with other contexts share the instruction."""
    return Shared((request.prefix_ids, context_of(request)))


class StackedPrompt:
    """One prompt that starts with the instruction; `ask` appends contexts and questions."""

    def __init__(self, instruction: tuple[int, ...]) -> None:
        self._row = StackedSequence((), 0)
        self._unread: list[int] = []
        self._start = len(instruction)
        self._contexts: dict[tuple[int, ...], int] = {}
        self._home: dict[int, int] = {}  # question -> its context, while its answer grows
        self._asked = 0
        self._ends: dict[int, int] = {}  # question -> virtual position of the next token of its answer (Eq. 2)
        self._scores: dict[int, Tensor] = {}
        self._begun: set[int] = set()
        self._choosing: set[int] = set()
        self._reading = False
        self._append(instruction, 0)

    def fits(self, context: tuple[int, ...], question: tuple[int, ...], *, contexts: int, tokens: int) -> bool:
        """Whether the question fits into this prompt; the first one always does."""
        fresh = context not in self._contexts
        size = len(self._unread) + len(question) + len(context) * fresh
        return not self._asked or (len(self._contexts) + fresh <= contexts and size <= tokens)

    def ask(self, context: tuple[int, ...], question: tuple[int, ...]) -> int:
        """Append a question after its context; returns its number."""
        if context not in self._contexts:
            self._contexts[context] = len(self._contexts) + 1
            self._append(context, self._start, self._contexts[context])
        self._asked += 1
        self._home[self._asked] = self._contexts[context]
        self._ends[self._asked] = self._start + len(context)
        self._extend(self._asked, question)
        return self._asked

    def answer(self, number: int) -> Program:
        """The program of one question."""
        self._begun.add(number)
        try:
            while True:
                while number not in self._scores:
                    if self._due():
                        yield from self._read()
                    else:
                        yield WaitFor(lambda: self._due() or number in self._scores)
                token = yield Sample(self._scores.pop(number), at=self._ends[number])
                self._choosing.discard(number)
                self._extend(number, (token,))
        finally:
            self._leave(number)

    def _due(self) -> bool:
        """Whether the next pass is complete: a token of every answer or, at the start, all questions."""
        return bool(self._unread) and not self._reading and not self._choosing

    def _read(self) -> Generator[Operation, Any, None]:
        row = self._row
        row.compact(lambda mark: not self._seen(mark))
        held = row.cache.length
        self._reading = True
        try:
            logits = yield Forward((row,), (tuple(self._unread),))
            wanted = [mark.question for mark in row.marks[held:] if mark.wanted]
            self._unread = []
            self._scores |= {
                number: scores for number, scores in zip(wanted, logits, strict=True) if number in self._home
            }
            self._choosing = self._scores.keys() & self._begun
        finally:
            if self._unread:  # cancelled in the middle: another program starts over
                row.cache.length = held
            self._reading = False

    def _seen(self, mark: TokenMark) -> bool:
        """Whether a token that is still to come sees this one."""
        if mark.question:
            return mark.question in self._home
        return not mark.context or mark.context in self._home.values()

    def _leave(self, number: int) -> None:
        """End a question's answer."""
        del self._home[number]
        self._begun.discard(number)
        self._choosing.discard(number)
        self._scores.pop(number, None)

    def _extend(self, number: int, ids: Sequence[int]) -> None:
        """Append tokens of a question or its answer; the logits after the last one are wanted."""
        self._append(ids, self._ends[number], self._home[number], number)
        self._row.marks[-1] = self._row.marks[-1]._replace(wanted=True)
        self._ends[number] += len(ids)

    def _append(self, ids: Sequence[int], start: int, context: int = 0, question: int = 0) -> None:
        self._unread += ids
        self._row.marks += [TokenMark(start + i, context, question) for i in range(len(ids))]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedConfig:
    """The most contexts per prompt, and the most tokens before the first answer (or of one question)."""

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
    needs = frozenset({Capability.STACK})

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
        for index in sorted(range(len(parts)), key=order.__getitem__):  # the questions of a context are adjacent
            instruction, context, question = parts[index]
            prompt = prompts.get(instruction)
            if prompt is None or not prompt.fits(context, question, contexts=most.contexts, tokens=most.tokens):
                prompt = prompts[instruction] = StackedPrompt(instruction)
            if model.max_positions is not None and sum(map(len, parts[index])) > model.max_positions:
                prompt = StackedPrompt(instruction)  # it alone is refused
            programs[index] = prompt.answer(prompt.ask(context, question))
        return [programs[index] for index in range(len(parts))]
