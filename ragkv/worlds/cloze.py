"""Cloze questions about English text: a sentence with a few words left out, which the question asks for.

To answer, a model has to find the sentence in the retrieved text and to read the words. Texts of Python itself serve as
documents, because they exist on every machine: docstrings of the standard library for training, and the language
reference (`pydoc_data.topics`) for testing.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["BLANK", "Cloze", "clozes", "docstrings", "english_sentences", "module_docstrings", "reference_texts"]

BLANK = "____"
_SENTENCE = re.compile(r"(?<![\w.>])[A-Z][A-Za-z0-9 ,;:'\"()\-_]*[A-Za-z0-9)'\"][.](?= |$)")
_WORDINGS = (
    'Fill in the blank: "{s}"',
    'What is left out of "{s}"?',
    'Complete the sentence: "{s}"',
)
_COMMON = frozenset(
    """a an and are as at be by can for from has have if in is it its may must not of on or so that the then they this
    to was were when which will with""".split()  # noqa: SIM905
)
LEAST_WORDS, MOST_WORDS = 7, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloze:
    """A question that shows `sentence` without the words `gold`, which begin at character `start`.

    The answer is the whole sentence.
    """

    question: str
    sentence: str
    gold: str
    start: int


def english_sentences(text: str) -> list[str]:
    """The plain sentences of `text`, with single spaces: 7 to 20 words without code or special characters."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        for match in _SENTENCE.finditer(" ".join(paragraph.split())):
            sentence = match.group()
            letters = sum(char.isalpha() or char == " " for char in sentence)
            if LEAST_WORDS <= sentence.count(" ") + 1 <= MOST_WORDS and letters >= 0.9 * len(sentence):
                found.append(sentence)
    return found


def clozes(rng: random.Random, sentence: str, count: int = 1) -> list[Cloze]:
    """Up to `count` questions about `sentence`, each without one to three words that are not among its first three.

    The words left out begin and end with a content word, and do not occur elsewhere in the sentence.
    """
    words = sentence.split(" ")
    spans = [
        (first, last)
        for first in range(3, len(words))
        for last in range(first + 1, min(first + 3, len(words)) + 1)
        if _telling(words[first]) and _telling(words[last - 1])
    ]
    found = []
    for first, last in rng.sample(spans, min(count, len(spans))):
        gold = " ".join(words[first:last]).rstrip(".,;:")
        blank = " ".join([*words[:first], BLANK + " ".join(words[first:last])[len(gold) :], *words[last:]])
        if gold.casefold() not in blank.casefold():
            question = rng.choice(_WORDINGS).format(s=blank)
            found.append(Cloze(question=question, sentence=sentence, gold=gold, start=blank.index(BLANK)))
    return found


def _telling(word: str) -> bool:
    bare = word.strip(".,;:()'\"").casefold()
    return len(bare) > 1 and bare not in _COMMON and bare.isalnum()


@cache
def docstrings(least: int = 3) -> tuple[str, ...]:
    """Docstrings of the standard library with at least `least` plain sentences, without those of its tests."""
    found = dict.fromkeys(
        text for path in _modules() for text in module_docstrings(path) if text.count(". ") + 1 >= least
    )
    return tuple(text for text in found if len(english_sentences(text)) >= least)


def _modules() -> Iterator[Path]:
    """Every file except tests, the language reference, and the debugger, whose text the reference repeats."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"test", "tests", "site-packages", "pydoc_data", "pdb.py"}.intersection(parts):
            yield path


def module_docstrings(path: Path) -> Iterator[str]:
    """Every docstring of a Python file; none if the file cannot be parsed, such as a template."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


@cache
def reference_texts() -> tuple[str, ...]:
    """The chapters of Python's language reference, as shown by `help()`. They are used for tests only."""
    from pydoc_data.topics import topics

    return tuple(topics[name] for name in sorted(topics))
