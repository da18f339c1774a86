"""A stacked prompt and the programs of its questions (IPPD §4.1, §4.2).

The prompt is [p, c_1, x_1,1, x_1,2, …, c_2, x_2,1, …] (Eq. 1), and answers are appended as they come. What a token sees
is said by marks and masks (`ragkv.attention.stack`). Every question has a program of its own, so that its sampling,
end, stop, length and errors are its own; the programs take turns in reading the prompt, once all chose their token.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from torch import Tensor

from ragkv.attention.stack import Mark, Stack
from ragkv.engines.program import Ask, Choose, Program, Read, Until

__all__ = ["StackedPrompt"]


class StackedPrompt:
    """One prompt, begun with its instruction; contexts and questions follow by `ask`."""

    def __init__(self, instruction: tuple[int, ...]) -> None:
        self._row = Stack((), 0)
        self._unread: list[int] = []
        self._start = len(instruction)
        self._contexts: dict[tuple[int, ...], int] = {}
        self._home: dict[int, int] = {}  # question -> its context, as long as its answer grows
        self._asked = 0
        self._ends: dict[int, int] = {}  # question -> virtual position of the next token of its answer (Eq. 2)
        self._scores: dict[int, Tensor] = {}
        self._begun: set[int] = set()
        self._choosing: set[int] = set()
        self._reading = False
        self._append(instruction, 0)

    def fits(self, context: tuple[int, ...], question: tuple[int, ...], *, contexts: int, tokens: int) -> bool:
        """Whether the question may stand here too; the first one may whatever its length."""
        fresh = context not in self._contexts
        size = len(self._unread) + len(question) + len(context) * fresh
        return not self._asked or (len(self._contexts) + fresh <= contexts and size <= tokens)

    def ask(self, context: tuple[int, ...], question: tuple[int, ...]) -> int:
        """Write a question into the prompt, after its context; its number."""
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
                        yield Until(lambda: self._due() or number in self._scores)
                token = yield Choose(self._scores.pop(number), at=self._ends[number])
                self._choosing.discard(number)
                self._extend(number, (token,))
        finally:
            self._leave(number)

    def _due(self) -> bool:
        """Whether all that are to come have come: every answer's token, or, at first, the questions."""
        return bool(self._unread) and not self._reading and not self._choosing

    def _read(self) -> Generator[Ask, Any, None]:
        row = self._row
        row.compact(lambda mark: not self._seen(mark))
        held = row.own.length
        self._reading = True
        try:
            logits = yield Read((row,), (tuple(self._unread),))
            wanted = [mark.question for mark in row.marks[held:] if mark.wanted]
            self._unread = []
            self._scores |= {
                number: scores for number, scores in zip(wanted, logits, strict=True) if number in self._home
            }
            self._choosing = self._scores.keys() & self._begun
        finally:
            if self._unread:  # cancelled half-way: another begins anew
                row.own.length = held
            self._reading = False

    def _seen(self, mark: Mark) -> bool:
        """Whether a token that is still to come sees this one."""
        if mark.question:
            return mark.question in self._home
        return not mark.context or mark.context in self._home.values()

    def _leave(self, number: int) -> None:
        """Its answer is over."""
        del self._home[number]
        self._begun.discard(number)
        self._choosing.discard(number)
        self._scores.pop(number, None)

    def _extend(self, number: int, ids: Sequence[int]) -> None:
        """Tokens of a question or its answer; the logits after the last of them are wanted."""
        self._append(ids, self._ends[number], self._home[number], number)
        self._row.marks[-1] = self._row.marks[-1]._replace(wanted=True)
        self._ends[number] += len(ids)

    def _append(self, ids: Sequence[int], start: int, context: int = 0, question: int = 0) -> None:
        self._unread += ids
        self._row.marks += [Mark(start + i, context, question) for i in range(len(ids))]
