"""Conversations over stored KV: the search query of a follow-up question, and earlier turns in the prompt.

Chunks were prefilled before any question, so earlier turns cannot precede the documents: no stored KV would match. They
follow the documents, in the question's part of the prompt, which is prefilled for each question anyway. No model
rewrites a follow-up question ("And where is it based?"); it is searched together with the last questions, which name
its subject.

A model that was never trained on conversations answers worse with earlier turns in its prompt: the bundled mini answers
20 of 20 questions alone, and 1 to 3 of 20 after others. So the prompt only has them if the model can use them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ragkv.config import HISTORY, History, PromptConfig, one_of

if TYPE_CHECKING:
    from ragkv.index.index import Index
    from ragkv.model.language_model import LanguageModel
    from ragkv.store import Store

QUALITY = "quality"
"""The key in `meta` of the reports of `ragkv doctor`, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A question and its answer."""

    question: str
    answer: str


class Conversation:
    """The turns so far, for one thread. `count` counts the tokens of a text.

    `history` says what earlier turns are used for: "prompt" (and search), "search" only, or "none". The prompt has at
    most `history_tokens` tokens of them. The search adds the `searched_turns` last questions to the new one.
    """

    def __init__(
        self,
        prompt: PromptConfig,
        count: Callable[[str], int],
        *,
        history: History = "prompt",
        history_tokens: int = 512,
        searched_turns: int = 2,
    ) -> None:
        self._lead, _, self._trail = prompt.question.partition("{question}")
        self._count = count
        self._history_tokens = history_tokens if history == "prompt" else 0
        self._searched_turns = 0 if history == "none" else searched_turns
        self.turns: list[Turn] = []

    @classmethod
    def of(cls, index: Index, *, history: History | None = None, history_tokens: int = 512) -> Conversation:
        """A conversation with an index. `history` None: as in its `ragkv.toml`; "auto" depends on the model."""
        mode = index.config.history if history is None else history
        one_of("history", mode, HISTORY)
        tokens = index.model.tokens
        return cls(
            index.config.prompt,
            lambda text: len(tokens.encode(text)),
            history=history_for(index) if mode == "auto" else mode,
            history_tokens=history_tokens,
        )

    def search_text(self, question: str) -> str:
        """The search query: the last questions, then this one; no answers, because a wrong one would mislead the
        search."""
        earlier = self.turns[len(self.turns) - min(self._searched_turns, len(self.turns)) :]
        return " ".join([*(turn.question for turn in earlier), question])

    def prompt_text(self, question: str) -> str:
        """The question for the prompt, preceded by as many of the last turns as fit.

        The prompt template surrounds the result, so the first turn has no lead and the question no trail.
        """
        earlier: list[str] = []
        left = self._history_tokens
        for turn in reversed(self.turns):
            text = f"{turn.question}{self._trail}\nAnswer: {turn.answer}\n\n{self._lead}"
            left -= self._count(text)
            if left < 0:
                break
            earlier.append(text)
        return "".join([*reversed(earlier), question])

    def add(self, question: str, answer: str) -> None:
        """Remember a finished turn."""
        self.turns.append(Turn(question=question, answer=answer))

    def clear(self) -> None:
        """Forget all turns: the next question begins a new conversation."""
        self.turns.clear()


def history_for(index: Index) -> History:
    """The meaning of "auto" for the index's model: as `ragkv doctor` measured it, else `usual_history`."""
    return measured_history(index.store, index.fingerprint) or usual_history(index.model)


def measured_history(store: Store, fingerprint: str) -> History | None:
    """The result of `ragkv doctor` for the model with this fingerprint; None if not measured or inconclusive."""
    kept = store.get_meta(QUALITY)
    for report in kept if isinstance(kept, list) else []:
        if isinstance(report, dict) and report.get("fingerprint") == fingerprint:
            row: Any = report.get("conversation")
            return proved_history(row.get("verdict"), row.get("by")) if isinstance(row, dict) else None
    return None


def proved_history(verdict: object, by: object) -> Literal["prompt", "search"] | None:
    """What earlier turns are used for after this verdict of `ragkv doctor`; None if it proves neither.

    Agreement can show that they do harm, and not that they do none: mini, which copies names out of earlier turns,
    agrees with itself in 79 % of the questions that are made from chunks, and is right in 9 of 20 real ones.
    """
    if verdict == "poor":
        return "search"
    return "prompt" if verdict in ("good", "fair") and by == "accuracy" else None


def usual_history(model: LanguageModel) -> History:
    """The default for a model that was not measured: its `ragkv.json`, else "prompt" if it has a chat template."""
    history = model.checkpoint.recommended.get("history")
    if history in HISTORY and history != "auto":
        return history  # type: ignore[no-any-return]
    return "prompt" if model.tokens.has_chat_template else "search"
