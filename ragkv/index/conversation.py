"""Search queries: those of a question in several steps, and those of a follow-up question in a conversation.

Chunks were prefilled before any question, so earlier turns cannot precede the documents: no stored KV would match. They
follow the documents, in the question's part of the prompt, which is prefilled for each question anyway. A follow-up
question ("And where is it based?") is searched together with the last questions, which name its subject; alone, since
it may have another; and together with the last answer, which may name it. The results are interleaved. With `rewrite`
of `[steps]`, the model rewrites it first.

A model that was never trained on conversations answers worse with earlier turns in its prompt: the bundled mini answers
20 of 20 questions alone, and 1 to 3 of 20 after others. So the prompt includes them only if the model can use them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ragkv.config import HISTORY, History, PromptConfig, StepsConfig, one_of
from ragkv.index.quality import QUALITY
from ragkv.question import Question

if TYPE_CHECKING:
    from ragkv.index.index import Index
    from ragkv.model.language_model import LanguageModel
    from ragkv.store import Store

T = TypeVar("T")


def interleaved(rankings: Sequence[Sequence[T]], most: int, key: Callable[[T], object]) -> list[T]:
    """The best `most` of several rankings, best first: in turn, each gives its best that no other has given yet."""
    merged: dict[object, T] = {}
    left = [iter(ranking) for ranking in rankings]
    while left and len(merged) < most:
        for ranking in list(left):
            best = next((each for each in ranking if key(each) not in merged), None)
            if best is None:
                left.remove(ranking)
            else:
                merged[key(best)] = best
    return list(merged.values())[:most]


def first_line(text: str) -> str:
    """The first line that is not blank, without marks around it: a query as a model has written it."""
    line = next(filter(None, map(str.strip, text.splitlines())), "")
    return " ".join(line.strip("\"'`*").split())


class WrittenQueries:
    """The queries of one question in several steps, and when they end. `searched` is the first query.

    `rankings` has the results of each search, best first; a search without new results is left out.
    """

    def __init__(self, config: StepsConfig, question: str, searched: str, count: int) -> None:
        self._config = config
        self._searched = searched
        self._asked = {_same(searched)}
        self._left = count - 1
        self._known: set[object] = set()
        self.prompt = _filled(config.prompt, question=question)
        """The prompt after the chunks that makes the model write a query."""
        self.rankings: list[Sequence[Any]] = []

    def found(self, ranking: Sequence[T], key: Callable[[T], object]) -> bool:
        """Add the results of a search; returns whether another search may follow."""
        ids = set(map(key, ranking))
        new = not ids <= self._known
        if new:
            self._known |= ids
            self.rankings.append(ranking)
        return new and self._left > 0

    def best(self, most: int, key: Callable[[T], object]) -> list[T]:
        """The best `most` results, `interleaved`; those of a single search in order."""
        return list(self.rankings[0]) if len(self.rankings) == 1 else interleaved(self.rankings, most, key)

    def next(self, text: str) -> str | None:
        """The next query, from the model's text; None if that is empty, "enough", or an earlier query."""
        written = first_line(text)
        query = _filled(self._config.query, question=self._searched, written=written)
        if not written or _same(written) == _same(self._config.enough) or _same(query) in self._asked:
            return None
        self._asked.add(_same(query))
        self._left -= 1
        return query


def _filled(template: str, **values: str) -> str:
    """The template with a value for each name in braces; braces within a value stay."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), template)


def _same(text: str) -> str:
    """The words of a query, which are the same for equal queries."""
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A question and its answer."""

    question: str
    answer: str


class Conversation:
    """The turns so far, for one thread. `count` counts the tokens of a text.

    `history` says where earlier turns are used: "prompt" (and search), "search" only, or "none". At most
    `history_tokens` tokens of them are in the prompt. The search adds the last `searched_turns` questions to the new
    one.
    """

    def __init__(
        self,
        prompt: PromptConfig,
        count: Callable[[str], int],
        *,
        history: History = "prompt",
        history_tokens: int = 512,
        searched_turns: int = 2,
        steps: StepsConfig | None = None,
    ) -> None:
        self._steps = steps or StepsConfig()
        self._lead, _, self._trail = prompt.question.partition("{question}")
        self._count = count
        self._most_tokens = history_tokens
        self._history_tokens = history_tokens if history == "prompt" else 0
        self._searched_turns = 0 if history == "none" else searched_turns
        self.turns: list[Turn] = []

    @classmethod
    def of(
        cls,
        index: Index,
        *,
        history: History | None = None,
        history_tokens: int = 512,
        rewrite: bool | None = None,
    ) -> Conversation:
        """A conversation with an index. `history` and `rewrite` None: as in its `ragkv.toml`; "auto" depends on the
        model: as `ragkv doctor` measured it, else `usual_history`.
        """
        mode = index.config.history if history is None else history
        one_of("history", mode, HISTORY)
        if mode == "auto":
            mode = measured_history(index.store, index.fingerprint) or usual_history(index.model)
        tokens = index.model.tokens
        return cls(
            index.config.prompt,
            lambda text: len(tokens.encode(text)),
            history=mode,
            history_tokens=history_tokens,
            steps=index.config.steps if rewrite is None else replace(index.config.steps, rewrite=rewrite),
        )

    def ask(self, question: str, **options: Any) -> Question:
        """The question after these turns, for `RagKV.query`, with options of `Question`."""
        return Question(
            question=self.prompt_text(question),
            search_for=self.search_texts(question),
            rewrite=self.rewrite_text(question),
            message=question,
            **options,
        )

    def search_texts(self, question: str) -> Sequence[str]:
        """The search queries: this question after the last ones, alone, and after the last answer, which may be wrong
        and thus comes last."""
        earlier = self.turns[len(self.turns) - min(self._searched_turns, len(self.turns)) :]
        if not earlier:
            return (question,)
        return " ".join([*(turn.question for turn in earlier), question]), question, f"{earlier[-1].answer} {question}"

    def prompt_text(self, question: str) -> str:
        """The question for the prompt, preceded by as many of the last turns as fit.

        The prompt template surrounds the result, so the first turn has no lead and the question no trail.
        """
        return "".join([*self._earlier(self._history_tokens), question])

    def rewrite_text(self, question: str) -> str | None:
        """The prompt that makes the model rewrite the question for the search; None if that is off, or for a first
        question.
        """
        if not self._steps.rewrite or not self._searched_turns or not self.turns:
            return None
        # the last turn's end is the beginning of the question that would follow
        history = "".join(self._earlier(self._most_tokens)).removesuffix(self._lead).strip()
        return _filled(self._steps.rewrite_prompt, history=history, question=question)

    def _earlier(self, left: int) -> list[str]:
        """As many of the last turns as fit into `left` tokens."""
        earlier: list[str] = []
        for turn in reversed(self.turns):
            text = f"{turn.question}{self._trail}\nAnswer: {turn.answer}\n\n{self._lead}"
            left -= self._count(text)
            if left < 0:
                break
            earlier.append(text)
        return earlier[::-1]

    def add(self, question: str, answer: str) -> None:
        """Remember a finished turn."""
        self.turns.append(Turn(question=question, answer=answer))

    def clear(self) -> None:
        """Forget all turns: the next question begins a new conversation."""
        self.turns.clear()


def measured_history(store: Store, fingerprint: str) -> History | None:
    """The result of `ragkv doctor` for the model with this fingerprint; None if not measured or inconclusive."""
    kept = store.get_meta(QUALITY)
    for report in kept if isinstance(kept, list) else []:
        if isinstance(report, dict) and report.get("fingerprint") == fingerprint:
            row: Any = report.get("conversation")
            return proved_history(row.get("verdict"), row.get("by")) if isinstance(row, dict) else None
    return None


def proved_history(verdict: object, by: object) -> Literal["prompt", "search"] | None:
    """The use of earlier turns that this verdict of `ragkv doctor` proves; None if it proves neither.

    Agreement can show that they do harm, but not that they do none: mini, which copies names out of earlier turns,
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
