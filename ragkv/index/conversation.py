"""A conversation over stored KV: what a follow-up question searches by, and what the model is told of before.

The chunks' KV was made before anybody asked anything, so the past of a conversation may not come before the documents:
every stored KV would be a miss. It stands after them, in the question's part of the prompt, which is prefilled anew
for every question anyway. Nothing is rewritten by a model: a follow-up ("And where is it based?") is searched for
together with the person's last turns, which name what it means.
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
    """The turns so far. `count` tells a text's tokens; `history_tokens` is how many of the past the prompt may hold.

    `searched_turns` earlier questions go into the search beside the new one. One thread may use it.
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
        """What to search by: the last questions, then this one. Answers are left out: a wrong one would be believed."""
        earlier = self.turns[len(self.turns) - min(self._searched_turns, len(self.turns)) :]
        return " ".join([*(turn.question for turn in earlier), question])

    def prompt_text(self, question: str) -> str:
        """The question as the prompt holds it: as many of the last turns as fit, whole ones, and then itself.

        The prompt's own words stand around the whole, so the first turn begins without and the question ends without.
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
