"""What evaluations read and write: question files, saved results, tables, specs, and quality reports in an index.

Questions are the user's own from a JSONL file, or made from the index's chunks. Errors in a user's file name the file
and the line. Results are appended as JSON Lines, so that a stopped run continues where it was. A spec is a name with
options, such as `pced(gamma=0, beta=shared)`. An index keeps the newest quality report of each model. No function here
loads torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from ragkv.errors import ConfigError, RagkvError, RetrievalError, UsageError
from ragkv.index.conversation import QUALITY
from ragkv.util.display import one_line
from ragkv.util.files import is_folder, make_folder, open_plain, parse_json, read_plain, refusal, replace_plain

if TYPE_CHECKING:
    from ragkv.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileRow:
    """One object of a JSONL file; `where` is "FILE, line N"."""

    values: dict[str, Any]
    where: str

    def text(self, key: str, *, default: str | None = None) -> str:
        """The text under `key`; `default` also replaces null. Raises ConfigError if there is neither."""
        value = self.values.get(key, default)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise ConfigError(f'{self.where}: "{key}" must be a text.')
        return value

    def texts(self, key: str, *, blank: bool = False) -> tuple[str, ...]:
        """The list of texts (or numbers) under `key`, which must not be empty. With `blank`, a text may be blank."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(type(item) in (str, int, float) for item in value):
            raise ConfigError(f'{self.where}: "{key}" must be a list of texts that is not empty.')
        texts = tuple(str(item) for item in value)
        if not blank and not all(text.strip() for text in texts):
            raise ConfigError(f'{self.where}: a text of "{key}" is blank; leave it out.')
        return texts

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


def digest_of(value: Any) -> str:
    """A short hex digest of plain data; equal data have equal digests."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


class ResultCache:
    """Results by key, one JSON line each, written as soon as they are known.

    `keep=False` reads the file and writes nothing. If the folder cannot be written, the run still completes but cannot
    be resumed.
    """

    def __init__(self, path: Path, *, keep: bool = True) -> None:
        self._path = path
        self._keep = keep
        self._known = _read(path)

    def get(self, key: str) -> Mapping[str, Any] | None:
        """The result under `key`, or None if it is not known yet."""
        return self._known.get(key)

    def put(self, key: str, **facts: Any) -> None:
        """Write plain data under `key`. A later line replaces an earlier one."""
        row = {"key": key, **facts}
        self._known[key] = row
        if not self._keep:
            return
        line = json.dumps(row, ensure_ascii=False) + "\n"
        try:
            make_folder(self._path.parent)
            with os.fdopen(open_plain(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b") as file:
                if file.tell() and not _ends_line(file):
                    line = "\n" + line
                file.write(line.encode())
        except OSError as error:
            logger.warning("results cannot be kept, so a stopped run would start again: %s", error)
            self._keep = False


def _ends_line(file: Any) -> bool:
    """Whether the last line is complete; a killed run may leave half a line."""
    file.seek(-1, 2)
    return bool(file.read(1) == b"\n")


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    known: dict[str, Mapping[str, Any]] = {}
    try:
        if not is_folder(path.parent):
            return known
        lines = read_plain(path).split(b"\n")
    except OSError:  # nothing was kept yet, or it is not a plain file
        return known
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:  # half a line from a killed run
            continue
        if isinstance(row, dict) and isinstance(row.get("key"), str):
            known[row["key"]] = row
    return known


def write_whole(path: Path, content: str | bytes, *, instead: str) -> None:
    """Replace a file atomically; until then, readers see the old content.

    Raises RagkvError if it cannot be written. `instead` is the advice for that case, such as "give another --output".
    """
    try:
        replace_plain(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise RagkvError(f"{path} cannot be written ({refusal(error)}); {instead}.") from error


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table in Markdown with `left` columns of words, then columns of numbers."""
    rows = [head, ["---"] * left + ["---:"] * (len(head) - left), *body]
    return "".join(f"| {' | '.join(one_line(cell).replace('|', '&#124;') for cell in row)} |\n" for row in rows)


def percent(value: float, ci95: tuple[float, float]) -> str:
    """A share as "93.8 ±4.2": per cent and half the width of the interval."""
    return f"{100 * value:.1f} {_half(ci95)}"


def points(value: float, ci95: tuple[float, float]) -> str:
    """A difference of shares as "-1.7 ±3.3"."""
    return f"{100 * value:+.1f} {_half(ci95)}"


def _half(ci95: tuple[float, float]) -> str:
    low, high = ci95
    return f"±{50 * (high - low):.1f}"


Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what is done next)."""


_SPEC = re.compile(r"([\w./@-]+)\s*(?:\((.*)\))?", re.DOTALL)
_OPTION = re.compile(r"([A-Za-z_][\w.]*)\s*=\s*(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Spec:
    """A name with options. `str` returns the form in which a user writes it."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}({', '.join(f'{key}={_shown(value)}' for key, value in self.options.items())})"


def parse_specs(text: str) -> list[Spec]:
    """ "full, pced(gamma=0, beta=shared)" to specs, in order and without repetition.

    A value is a number, true, false, or a text, which needs double quotes unless it consists of letters, digits, dots
    and dashes. Raises UsageError, which quotes what cannot be read.
    """
    specs: list[Spec] = []
    for part in _split(text):
        spec = _parse(part)
        if spec not in specs:
            specs.append(spec)
    if not specs:
        raise UsageError(f"{text!r} names nothing; write a list such as full,pced(gamma=2.5).")
    return specs


def _parse(text: str) -> Spec:
    matched = _SPEC.fullmatch(text)
    if matched is None:
        raise UsageError(f"{text!r} is not a name with options; write it as pced(gamma=2.5, beta=0).")
    options: dict[str, Any] = {}
    for part in _split(matched[2] or ""):
        option = _OPTION.fullmatch(part)
        if option is None or option[1] in options:
            raise UsageError(f"{part!r} in {text!r} is not one option; write options as name=value, each once.")
        options[option[1]] = _value(option[2], text)
    return Spec(matched[1], options)


def _split(text: str) -> Iterator[str]:
    """The parts between commas outside parentheses and quotes."""
    depth, quoted, escaped, part = 0, False, False, ""
    for char in text:
        if escaped:
            escaped = False
        elif quoted and char == "\\":
            escaped = True
        elif char == '"':
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(char, 0)
            if depth < 0:
                break
            if char == "," and not depth:
                if part.strip():
                    yield part.strip()
                part = ""
                continue
        part += char
    if depth or quoted:
        raise UsageError(f"{text!r} has an unmatched parenthesis or quote; add or remove one.")
    if part.strip():
        yield part.strip()


def _value(text: str, spec: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text.startswith('"'):
        try:
            return json.loads(text, strict=False)
        except ValueError:
            raise UsageError(f'{text} in {spec!r} is not a text in quotes; write one as "\\n".') from None
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _shown(value: Any) -> str:
    if isinstance(value, str):
        bare = re.fullmatch(r"[A-Za-z_][\w.-]*", value) and _value(value, value) == value
        return value if bare else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


_SENTENCE = re.compile(r"[^.!?。！？]{24,400}[.!?。！？]")


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
    found = normal(text)
    return any(normal(answer) in found for answer in answers)


def read_questions(path: Path) -> list[GoldenQuestion]:
    """The questions of a JSONL file: `{"question": …, "answer": …}` or `"answers": […]`; other keys are ignored.

    Raises ConfigError that names the file and the line.
    """
    found = [question_of(row) for row in rows(path, "a JSONL file of questions")]
    if not found:
        raise ConfigError(f'{path} holds no question; write one JSON object per line: {{"question": "…"}}.')
    return found


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


def normal(text: str) -> str:
    """The text as it is compared: case folded, with single spaces."""
    return " ".join(text.casefold().split())


Verdict = Literal["good", "fair", "poor", "not enough to tell"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
UNKNOWN: Verdict = "not enough to tell"

_MOST = 8  # reports that an index keeps, one per model
_Check = Callable[[Any], bool]


def _text(found: Any) -> bool:
    return isinstance(found, str)


def _whole(found: Any) -> bool:
    return isinstance(found, int) and 0 <= found < 1 << 63


def _share(found: Any) -> bool:
    return isinstance(found, (int, float)) and -1 <= found <= 1


def _share_or_none(found: Any) -> bool:
    return found is None or _share(found)


def _interval(found: Any) -> bool:
    return isinstance(found, (list, tuple)) and len(found) == 2 and all(map(_share, found))


def _intervals(found: Any) -> bool:
    return _has(found, {"top1": _interval, "answers": _interval, "loss": lambda loss: loss is None or _interval(loss)})


_REPORT: dict[str, _Check] = {
    "date": _text,
    "model": _text,
    "fingerprint": _text,
    "generation": _whole,
    "questions": _whole,
    "gold": _whole,
    "full_accuracy": _share_or_none,
    "engines": lambda rows: isinstance(rows, list),
}
_ROW: dict[str, _Check] = {
    "engine": _text,
    "verdict": lambda found: found in VERDICTS,
    "top1": _share,
    "answers": _share,
    "accuracy": _share_or_none,
    "ci95": _intervals,
}
"""The fields that a reader needs, with their checks, because an index may contain anything."""


def keep_quality(store: Store, report: dict[str, Any]) -> None:
    """Put a report first and drop the same model's earlier one. Raises StoreError if the index cannot be written."""
    others = [kept for kept in kept_quality(store) if kept["fingerprint"] != report["fingerprint"]]
    store.put_meta(QUALITY, [report, *others][:_MOST])


def kept_quality(store: Store) -> list[dict[str, Any]]:
    """All kept reports that can be read, newest first."""
    reports = store.get_meta(QUALITY)
    return [report for report in reports if _readable(report)] if isinstance(reports, list) else []


def unread_quality(store: Store) -> bool:
    """Whether the index keeps something that is not a report of `keep_quality`."""
    found = store.get_meta(QUALITY)
    return found is not None and not (isinstance(found, list) and all(map(_readable, found)))


def _readable(report: Any) -> bool:
    return _has(report, _REPORT) and all(_has(row, _ROW) for row in report["engines"])


def _has(found: Any, fields: dict[str, _Check]) -> bool:
    return isinstance(found, dict) and all(name in found and check(found[name]) for name, check in fields.items())


def check_target(option: str, path: Path) -> None:
    """Refuse, before hours of work, a file that cannot be written: UsageError."""
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path} cannot be written: there is no folder {path.parent}; make it.")
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder; give a file.")


def outdated(store: Store, report: dict[str, Any]) -> str | None:
    """Why a report does not apply to the index as it is now, or None if it does.

    It is compared with the model that made the index, so that nothing has to be loaded or hashed.
    """
    made = store.get_meta("model")
    if isinstance(made, dict) and made.get("fingerprint") != report["fingerprint"]:
        return "another model than the index's"
    if report["generation"] != store.generation:
        return "the documents changed since"
    return None
