"""Questions from a JSONL file of the user's, or made from an index's chunks. No function here loads torch.

Errors in a file name it and the line.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ragkv.errors import ConfigError, RetrievalError
from ragkv.util.files import refusal

if TYPE_CHECKING:
    from ragkv.store import Store

T = TypeVar("T")
Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what is done next)."""


@dataclass(frozen=True, slots=True)
class FileRow:
    """One object of a JSONL file; `where` is "FILE, line N"."""

    values: dict[str, Any]
    where: str

    def name(self, key: str) -> str:
        """The id under `key`: a string that is not empty, or a whole number."""
        value = self.values.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value:
            raise ConfigError(f'{self.where}: "{key}" must be an id that is not empty.')
        return value


def lines(path: Path, what: str) -> Iterator[tuple[str, str]]:
    """(where, line) of each line that is not blank. `what` says in errors what the file should be."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}, line {number}", line
    except FileNotFoundError:
        raise ConfigError(f"No such file: {path}; give {what}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({refusal(error)}); give {what} in UTF-8.") from error


def rows(path: Path, what: str) -> Iterator[FileRow]:
    """The objects of a JSONL file, one at a time, so that a file of any size can be read."""
    for where, line in lines(path, what):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not valid JSON ({error}).") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: a line is an object in braces.")
        yield FileRow(values, where)


def question_rows(path: Path) -> list[FileRow]:
    """The rows of a file of questions; ConfigError if it has none."""
    if not (asked := list(rows(path, "a JSONL file of questions"))):
        raise ConfigError(f'{path} holds no question; write one JSON object per line: {{"question": "…"}}.')
    return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenQuestion:
    """A question and its gold answers, any of which is right; without any, correctness is unknown."""

    text: str
    answers: tuple[str, ...] = ()

    def right(self, answer: str) -> bool | None:
        """Whether `answer` contains a gold answer; None without gold answers."""
        return contains_answer(answer, self.answers) if self.answers else None


def contains_answer(text: str, answers: Sequence[str]) -> bool:
    """Whether `text` contains a gold answer, ignoring case and white space: the papers' subspan match."""
    plain = normal(text)
    return any(normal(answer) in plain for answer in answers)


def normal(text: str) -> str:
    """The text as it is compared: case folded, with single spaces."""
    return " ".join(text.casefold().split())


def read_questions(path: Path) -> list[GoldenQuestion]:
    """The questions of a JSONL file: `{"question": …, "answer": …}` or `"answers": […]`; other keys are ignored."""
    return [question_of(row) for row in question_rows(path)]


def golden_questions(path: Path) -> tuple[list[GoldenQuestion], int]:
    """The questions of a file that have gold answers, and how many have none. ConfigError if all have none."""
    questions = read_questions(path)
    golden = [question for question in questions if question.answers]
    if not golden:
        raise ConfigError(f'{path} has no gold answers; add "answers": ["…"] to its lines.')
    return golden, len(questions) - len(golden)


def question_of(line: FileRow) -> GoldenQuestion:
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
    return GoldenQuestion(text=row["question"].strip(), answers=golds)


def draw_sample(items: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """At most `limit` of `items` (None: all), drawn by `seed`, in their order."""
    if limit is None or len(items) <= limit:
        return list(items)
    return [items[at] for at in sorted(random.Random(seed).sample(range(len(items)), limit))]


_SENTENCE = re.compile(r"[^.!?。！？]{24,400}[.!?。！？]")


def made_questions(store: Store, count: int, seed: int) -> list[GoldenQuestion]:
    """Make questions that the index's own chunks answer: they quote the beginning of a sentence and ask for the rest.

    They have no gold answers; they show whether an engine reads the chunks as full attention does. Documents are drawn
    in proportion to their chunks. Raises RetrievalError if no chunk contains a sentence.
    """
    documents = [(stored.document.document_id, stored.chunks) for stored in store.documents()]
    rng = random.Random(seed)
    texts: dict[str, None] = {}
    for _ in range(4 * count):  # some draws hit a chunk without a sentence, or a sentence twice
        if len(texts) == count or not any(chunks for _, chunks in documents):
            break
        [(document_id, _)] = rng.choices(documents, [chunks for _, chunks in documents])
        text = rng.choice([chunk.text for chunk in store.chunks(document_id)])
        if sentences := _SENTENCE.findall(" ".join(text.split())):
            texts[f'How does this sentence go on: "{_beginning(rng.choice(sentences).strip())}…"?'] = None
    if not texts:
        raise RetrievalError("The index holds no sentence to make a question of; give --questions FILE.jsonl.")
    return [GoldenQuestion(text=text) for text in texts]


def _beginning(sentence: str) -> str:
    """About the first half of the sentence, cut between words."""
    half = sentence[: len(sentence) // 2]
    return half.rsplit(" ", 1)[0] if " " in half else half
