"""Questions with the passages that answer them, whatever file they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from ragkv.evaluation.draw import drawn

__all__ = ["Judgement", "Passage", "Task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A piece of text that can be found: a benchmark's document, which is not in any index."""

    passage_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A question and what is relevant to it: passage (or chunk) id to grade, above 0.

    `excluded` is a passage that is no answer whatever its score: the question itself, where it is in the corpus too.
    """

    question_id: str
    question: str
    relevant: Mapping[str, float]
    excluded: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A set of judged questions.

    `unjudged` are the ids of questions without a relevant passage, which no measure is defined for. `passages` is the
    corpus, None where it is the user's index. `notes` are facts that a reader of the figures must know.
    """

    name: str
    judgements: Sequence[Judgement]
    unjudged: Sequence[str] = ()
    passages: Sequence[Passage] | None = None
    notes: Sequence[str] = ()

    def sample(self, limit: int | None, seed: int) -> Self:
        """At most `limit` of the judged questions, drawn by `seed`, in their order; the corpus stays whole."""
        if limit is None or len(self.judgements) <= limit:
            return self
        note = f"{limit} of {len(self.judgements)} judged questions, drawn by seed {seed}"
        return replace(self, judgements=drawn(self.judgements, limit, seed), notes=[*self.notes, note])
