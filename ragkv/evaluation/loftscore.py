"""LOFT's scores of an answer: subspan match, exact match and token F1, and the set match of its multi-value data sets.

These are the functions of google-deepmind/loft `evaluation/utils.py` and `evaluation/rag.py`, and its parser of "Final
Answer: […]" (`utils.py`, extract_prediction). There are two differences. An answer without such a list is used as a
whole; LOFT counts it as wrong, because its prompt asks for the list. And only a line that says "final answer" is parsed
as a list, because an answer may cite its sources as "[1]".
"""

from __future__ import annotations

import ast
import re
import string
import unicodedata
import warnings
from collections import Counter, deque
from collections.abc import Sequence

from ragkv.evaluation.example import Example

__all__ = ["exact_match", "f1", "loft_multi", "loft_normal", "subspan_em", "token_f1", "word_normal"]

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_APOSTROPHE = re.compile(r"([a-zA-Z0-9])'([a-zA-Z0-9])")
_BETWEEN_VALUES = re.compile(r"[\n,;]|\band\b")


def subspan_em(prediction: str, example: Example) -> float:
    """1.0 if the answer contains a gold answer, both normalised, else 0.0."""
    found = _single(prediction)
    return float(found is not None and any(loft_normal(gold) in found for gold in example.answers))


def exact_match(prediction: str, example: Example) -> float:
    """1.0 if the answer equals a gold answer, both normalised, else 0.0."""
    found = _single(prediction)
    return float(found is not None and any(loft_normal(gold) == found for gold in example.answers))


def f1(prediction: str, example: Example) -> float:
    """The best token F1 over the gold answers, all normalised."""
    found = (_single(prediction) or "").split()
    return max(token_f1(found, loft_normal(gold).split()) for gold in example.answers)


def loft_multi(prediction: str, example: Example) -> float:
    """1.0 if each gold answer can be assigned a different value that contains it or is contained in it, else 0.0.

    The values are the items of "Final Answer: […]", or else the parts between commas, semicolons, line ends and "and".
    As in LOFT, additional values do not matter.
    """
    values = _final_list(prediction)
    if values is None:
        values = [value for value in map(loft_normal, _BETWEEN_VALUES.split(prediction)) if value]
    golds = [loft_normal(gold) for gold in example.answers]
    return float(_all_matched([[gold in value or value in gold for value in values] for gold in golds]))


def word_normal(text: str) -> str:
    """SQuAD's normalisation: lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def loft_normal(text: str) -> str:
    """SQuAD's normalisation after Unicode's NFD, which separates accents from letters."""
    return word_normal(unicodedata.normalize("NFD", text))


def token_f1(found: Sequence[str], gold: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of two multisets of tokens; 0.0 if they share none."""
    same = sum((Counter(found) & Counter(gold)).values())
    if not same:
        return 0.0
    precision, recall = same / len(found), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def _single(prediction: str) -> str | None:
    """The normalised answer, or the first item of a list; None for an empty list."""
    values = _final_list(prediction)
    if values is None:
        return loft_normal(prediction)
    return values[0] if values else None


def _final_list(prediction: str) -> list[str] | None:
    """The normalised items of the first "Final Answer: […]"; None if there is none, empty if it cannot be parsed."""
    for line in prediction.translate({ord("*"): None, ord("`"): None}).split("\n"):
        if "final answer" in line.lower() and "[" in line and "]" in line:
            literal = line[line.find("[") : line.rfind("]") + 1]
            try:
                with warnings.catch_warnings():  # about backslashes in the model's text
                    warnings.simplefilter("ignore")
                    values = ast.literal_eval(_APOSTROPHE.sub(r"\1\'\2", literal))
            except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                return []
            return [loft_normal(str(value)) for value in values]
    return None


def _all_matched(fits: Sequence[Sequence[bool]]) -> bool:
    """Whether each row can be assigned a different fitting column: LOFT's Hungarian assignment with costs 0 and 1.

    Each row in turn takes a free column, moving other rows along an augmenting path if needed.
    """
    owner: dict[int, int] = {}  # column -> row
    for row in range(len(fits)):
        came_from: dict[int, int] = {}  # column -> row that reached it
        queue = deque([row])
        free = None
        while queue and free is None:
            current = queue.popleft()
            for column, fit in enumerate(fits[current]):
                if fit and column not in came_from:
                    came_from[column] = current
                    if column not in owner:
                        free = column
                        break
                    queue.append(owner[column])
        if free is None:
            return False
        while free is not None:
            taker = came_from[free]
            given_up = next((column for column, holder in owner.items() if holder == taker), None)
            owner[free] = taker
            if given_up is not None:
                del owner[given_up]
            free = given_up
    return True
