"""The content of a world: facts, the documents that state them, and questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ragkv.worlds.name import Kind

__all__ = ["Fact", "QuestionKind", "WorldDocument", "WorldQuestion"]

QuestionKind = Literal["one hop", "two hops", "comparison", "list", "unanswerable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A relation of an entity, and the only sentence that states it, in the document with the title `document`.

    `rephrased` is the sentence in another wording, which no document contains.
    """

    relation: str
    subject: str
    value: str
    sentence: str
    rephrased: str
    document: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldDocument:
    """The document about one entity. `text` is `sentences` joined by spaces."""

    title: str
    text: str
    kind: Kind
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldQuestion:
    """A question with its answer in full sentences. `support` are the sentences that the answer restates, bridge first.

    `rephrased` is the answer in words that the documents do not use (comparisons and lists are not rephrased). A right
    answer contains `gold`, or for a list all of `golds`.
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
        """Whether `answer` contains every gold value, ignoring differences in white space."""
        found = " ".join(answer.split())
        return all(gold in found for gold in (self.golds or (self.gold,)))
