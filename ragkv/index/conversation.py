"""A conversation over stored KV: what a follow-up question searches for, and how the prompt holds earlier turns.

The chunks were prefilled before anybody asked anything, so earlier turns cannot stand before the documents: every
stored KV would be a miss. They stand after the documents, in the question's part of the prompt, which is prefilled for
every question anyway. No model rewrites a follow-up question ("And where is it based?"). The search uses it together
with the last questions, which name what it is about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ragkv.config import PromptConfig

__all__ = ["Conversation", "Turn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A question as it was asked, and what was answered."""

    question: str
    answer: str


class Conversation:
    """The turns so far, for one thread. `count` counts the tokens of a text.

    The prompt holds at most `history_tokens` tokens of earlier turns. The search uses the `searched_turns` last
    questions besides the new one.
    """

    def __init__(
        self,
        prompt: PromptConfig,
        count: Callable[[str], int],
        *,
        history_tokens: int = 512,
        searched_turns: int = 2,
    ) -> None:
        self._lead, _, self._trail = prompt.question.partition("{question}")
        self._count = count
        self._history_tokens = history_tokens
        self._searched_turns = searched_turns
        self.turns: list[Turn] = []

    def search_text(self, question: str) -> str:
        """What to search for: the last questions, then this one. A wrong answer would mislead the search, so none."""
        earlier = self.turns[len(self.turns) - min(self._searched_turns, len(self.turns)) :]
        return " ".join([*(turn.question for turn in earlier), question])

    def prompt_text(self, question: str) -> str:
        """The question as the prompt holds it: as many of the last turns as fit, then the question.

        The prompt puts its own words around the result. So the first turn has none before it, and the question has
        none after it.
        """
        told: list[str] = []
        left = self._history_tokens
        for turn in reversed(self.turns):
            text = f"{turn.question}{self._trail}\nAnswer: {turn.answer}\n\n{self._lead}"
            left -= self._count(text)
            if left < 0:
                break
            told.append(text)
        return "".join([*reversed(told), question])

    def add(self, question: str, answer: str) -> None:
        """Remember a finished turn."""
        self.turns.append(Turn(question=question, answer=answer))

    def clear(self) -> None:
        """Forget everything: the next question begins a new conversation."""
        self.turns.clear()
