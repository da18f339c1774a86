"""Questions with their relevant passages, independent of the file format they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from ragkv.evaluation.draw import drawn

__all__ = ["Judgement", "Passage", "Task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A text that can be retrieved: a benchmark's document, which is in no index."""

    passage_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A question, and the ids of the passages or chunks that are relevant to it, with grades above 0.

    `excluded` is a passage that is removed from every ranking: the question itself, if the corpus contains it.
    """

    question_id: str
    question: str
    relevant: Mapping[str, float]
    excluded: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A set of judged questions.

    `unjudged` are the ids of questions without a relevant passage, for which no measure is defined. `passages` is the
    corpus, or None if it is the user's index. `notes` are sentences that a reader of the figures must know.
    """

    name: str
    judgements: Sequence[Judgement]
    unjudged: Sequence[str] = ()
    passages: Sequence[Passage] | None = None
    notes: Sequence[str] = ()

    def sample(self, limit: int | None, seed: int) -> Self:
        """A copy with at most `limit` judged questions, drawn by `seed`, in their order. The corpus stays complete."""
        if limit is None or len(self.judgements) <= limit:
            return self
        note = f"{limit} of {len(self.judgements)} judged questions, drawn by seed {seed}"
        return replace(self, judgements=drawn(self.judgements, limit, seed), notes=[*self.notes, note])
