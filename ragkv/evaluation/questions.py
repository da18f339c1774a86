"""Questions to measure with: the user's own from a JSONL file, or questions made from the index's chunks."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.errors import ConfigError, RetrievalError
from ragkv.evaluation.io import FileRow, rows

if TYPE_CHECKING:
    from ragkv.store import Store

_SENTENCE = re.compile(r"[^.!?。！？]{24,400}[.!?。！？]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question and its gold answers, any of which is right; without any, correctness is unknown."""

    text: str
    answers: tuple[str, ...] = ()

    def right(self, answer: str) -> bool | None:
        """Whether `answer` contains a gold answer; None without gold answers."""
        return contains_answer(answer, self.answers) if self.answers else None


def contains_answer(text: str, answers: Sequence[str]) -> bool:
    """Whether `text` contains a gold answer, ignoring case and white space: the papers' subspan match."""
    found = normal(text)
    return any(normal(answer) in found for answer in answers)


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSONL file: `{"question": …, "answer": …}` or `"answers": […]`; other keys are ignored.

    Raises ConfigError that names the file and the line.
    """
    found = [question_of(row) for row in rows(path, "a JSONL file of questions")]
    if not found:
        raise ConfigError(f'{path} holds no question; write one JSON object per line: {{"question": "…"}}.')
    return found


def golden_questions(path: Path) -> tuple[list[Question], int]:
    """The questions of a file that have gold answers, and how many have none. ConfigError if all have none."""
    found = read_questions(path)
    golden = [question for question in found if question.answers]
    if not golden:
        raise ConfigError(f'{path} has no gold answers; add "answers": ["…"] to its lines.')
    return golden, len(found) - len(golden)


def question_of(line: FileRow) -> Question:
    """The question of one line. Raises ConfigError that names the line."""
    row, where = line.values, line.where
    if not isinstance(row.get("question"), str) or not row["question"].strip():
        raise ConfigError(f'{where}: a line is an object with a "question" that is not empty.')
    if "answer" in row and "answers" in row:
        raise ConfigError(f'{where}: give "answer" or "answers", not both.')
    answers: Any = row.get("answers", [row["answer"]] if "answer" in row else [])
    if not isinstance(answers, list) or not all(isinstance(a, (str, int, float)) for a in answers):
        raise ConfigError(f'{where}: "answer" is a text, "answers" a list of texts.')
    golds = tuple(str(answer) for answer in answers)
    if any(not normal(gold) for gold in golds):  # every text contains an empty gold answer
        raise ConfigError(f"{where}: an answer is empty; leave it out, or write what is right.")
    return Question(text=row["question"].strip(), answers=golds)


def made_questions(store: Store, count: int, seed: int) -> list[Question]:
    """Make questions that the index's own chunks answer: they quote the beginning of a sentence and ask for the rest.

    They have no gold answers; they show whether an engine reads the chunks as full attention does. Documents are drawn
    in proportion to their chunks. Raises RetrievalError if no chunk contains a sentence.
    """
    documents = [(stored.document.document_id, stored.chunks) for stored in store.documents()]
    rng = random.Random(seed)
    found: dict[str, None] = {}
    for _ in range(4 * count):  # some draws hit a chunk without a sentence, or a sentence twice
        if len(found) == count or not any(chunks for _, chunks in documents):
            break
        [(document_id, _)] = rng.choices(documents, [chunks for _, chunks in documents])
        text = rng.choice([chunk.text for chunk in store.chunks(document_id)])
        if sentences := _SENTENCE.findall(" ".join(text.split())):
            found[f'How does this sentence go on: "{_beginning(rng.choice(sentences).strip())}…"?'] = None
    if not found:
        raise RetrievalError("The index holds no sentence to make a question of; give --questions FILE.jsonl.")
    return [Question(text=text) for text in found]


def _beginning(sentence: str) -> str:
    """About the first half of the sentence, cut between words."""
    half = sentence[: len(sentence) // 2]
    return half.rsplit(" ", 1)[0] if " " in half else half


def normal(text: str) -> str:
    """The text as it is compared: case folded, with single spaces."""
    return " ".join(text.casefold().split())
