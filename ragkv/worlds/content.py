"""What a world consists of: facts, the documents that state them, and questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ragkv.worlds.name import Kind

__all__ = ["Fact", "QuestionKind", "WorldDocument", "WorldQuestion"]

QuestionKind = Literal["one hop", "two hops", "comparison", "list", "unanswerable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One relation of one entity and the one sentence that states it; `document` is the title where it stands.

    `rephrased` is the sentence in the other wording, which stands nowhere in the world.
    """

    relation: str
    subject: str
    value: str
    sentence: str
    rephrased: str
    document: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldDocument:
    """All that the world's documents say of one entity: `text` is `sentences` joined by spaces."""

    title: str
    text: str
    kind: Kind
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldQuestion:
    """A question with its full-sentence answer; `support` are the sentences that it restates, bridge first.

    `rephrased` is the answer in words that the documents do not use (of comparisons and lists: as they stand there).
    `gold` must stand in a right answer, and so must all of `golds`, which a list has.
    """

    question: str
    answer: str
    rephrased: str
    gold: str
    hops: int
    relation: str
    titles: tuple[str, ...]
    support: tuple[str, ...]
    kind: QuestionKind = "one hop"
    golds: tuple[str, ...] = ()

    def right(self, answer: str) -> bool:
        """Whether every gold value stands in `answer`, whatever its white space."""
        found = " ".join(answer.split())
        return all(gold in found for gold in (self.golds or (self.gold,)))
