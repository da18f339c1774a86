"""RULER's JSONL files (`niah_single_1/validation.jsonl`): a prompt whose haystack is cut out of its template.

A file does not name its task, so the family is recognised by its template; and `index` is not an id (niah writes the
place of its answer there), so examples are numbered. The templates are those of NVIDIA/RULER
`scripts/data/synthetic/constants.py` with `--model_template_type base`, the metrics those of
`scripts/eval/synthetic/constants.py`. The head of the template, which announces the question, is left out. A worked
example before it (vt, cwe) and the beginning of the answer become part of the question.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ragkv.errors import ConfigError
from ragkv.evaluation.example import Example
from ragkv.evaluation.filerow import Row
from ragkv.evaluation.taskfile import Reading, TaskFile

__all__ = ["RULER", "Family", "ruler_file"]

_DOCUMENT = re.compile(r"^Document \d+:", re.MULTILINE)
_SPLITS = ("validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The tasks of one template: `head` precedes the haystack, `tail` follows it. `found`: it contains the answers."""

    metric: str
    tokens: int
    head: re.Pattern[str]
    tail: re.Pattern[str]
    found: bool = False


def _family(metric: str, tokens: int, head: str, tail: str, *, found: bool = False) -> Family:
    return Family(metric=metric, tokens=tokens, head=re.compile(head), tail=re.compile(tail), found=found)


RULER = {
    "niah": _family(
        "string_match_all",
        128,
        r"(?:A|Some) special magic \w+ (?:is|are) hidden within the following text\.[^\n]{,120}? afterwards\.",
        r"What (?:is|are)(?: all)? the special magic \w+ for ",
        found=True,
    ),
    "vt": _family(
        "string_match_all",
        30,
        r"Memorize and track the chain\(s\) of variable assignment hidden in the following text\.",
        r"Question: Find all variables that are assigned the value",
        found=True,
    ),
    "cwe": _family(
        "string_match_all",
        120,
        r"Below is a numbered list of words\.[^\n]{,120}? that appear most often\.",
        r"Question: What are the \d+ most common words in the above list\?",
    ),
    "fwe": _family(
        "string_match_all",
        50,
        r"Read the following coded text[^\n]{,60}? each coded word\.[^\n]{,60}? coded words\.",
        r"Question: Do not provide any explanation\. Please ignore the dots",
    ),
    "qa": _family(
        "string_match_part",
        32,
        r"Answer the question based on the given documents\.[^\n]{,80}\s+The following are given documents\.",
        r"Answer the question based on the given documents\.(?![^\n]{,80}\s+The following are given documents\.)",
    ),
}


def ruler_file(path: Path, found: Iterator[Row], reading: Reading) -> TaskFile:
    """Read a file. Its family is that of its first prompt."""
    first = next(found)
    family_name, family = _family_of(first)

    def example(ordinal: int, row: Row) -> Example:
        text = row.text("input")
        tail = _last(family.tail, text)
        if tail is None:
            raise ConfigError(f'{row.where}: "input" does not end with the question of a {family_name} prompt.')
        head = _last(family.head, text[: tail.start()])
        shot = text[: head.start()].strip() if head else ""
        haystack = text[head.end() if head else 0 : tail.start()]
        outputs = row.texts("outputs")
        cutter = reading.cutter
        chunks = cutter.passages(haystack, _DOCUMENT) if family_name == "qa" else cutter.prose(haystack)
        ending = f"{text[tail.start() :].strip()} {row.text('answer_prefix', default='').strip()}".strip()
        return Example(
            example_id=str(ordinal),
            question=f"{shot}\n\n{ending}".strip(),
            chunks=chunks,
            answers=outputs,
            needed=tuple(i for i, chunk in enumerate(chunks) if any(output in chunk for output in outputs))
            if family.found
            else (),
        )

    name = path.parent.resolve().name if path.stem in _SPLITS else path.stem
    return TaskFile(
        name=f"ruler/{name}",
        metric=family.metric,
        rows=chain([first], found),
        example=example,
        max_new_tokens=family.tokens,
    )


def _family_of(row: Row) -> tuple[str, Family]:
    """The family whose question comes last in the prompt, because a haystack may contain the words of others."""
    text = row.text("input")
    ends = [(found.start(), name) for name, family in RULER.items() if (found := _last(family.tail, text))]
    if not ends:
        raise ConfigError(
            f'{row.where}: "input" has no question of a RULER template ({", ".join(RULER)}); '
            "write other prompts as --format ragkv."
        )
    name = max(ends)[1]
    return name, RULER[name]


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for last in pattern.finditer(text):  # noqa: B007 - the last one is what is wanted
        pass
    return last
