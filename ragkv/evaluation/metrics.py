"""The metrics of answers, by name; all lie in [0, 1] and need at least one gold answer.

They follow the benchmarks' own code, including its quirks, so that figures are comparable with published ones:

- RULER: `string_match_all` and `string_match_part` of NVIDIA/RULER `scripts/eval/synthetic/constants.py`, and the
  cleaning of an answer in `scripts/eval/evaluate.py` (postprocess_pred).
- LOFT: google-deepmind/loft `evaluation/utils.py` and `evaluation/rag.py`. Two differences: an answer without a "Final
  Answer: […]" list is used as a whole (LOFT counts it as wrong, because its prompt asks for the list), and only a line
  with "final answer" is parsed as a list, because an answer may cite its sources as "[1]".
- LongBench v1: THUDM/LongBench `metrics.py`, and from its `LongBench/eval.py` the best gold answer, and the first line
  for trec, triviaqa, samsum and lsht. fuzz.ratio is difflib's ratio in whole percents, as in fuzzywuzzy
  (python-Levenshtein gives a few other values). `qa_f1_zh` and `rouge_zh` are missing: they need jieba's word lists.
- ROUGE-L: the PyPI package `rouge` 1.0.1, which LongBench uses (pltrdy/rouge, `rouge/rouge_score.py`:
  rouge_l_summary_level, _recon_lcs). It differs from Lin (2004) and from `rouge-score`: sentences are the texts between
  full stops, and a longest common subsequence is counted by its *distinct* words, as are both texts. Ties are broken as
  in the package, because only the words of one such subsequence count. One difference: the package recurses once per
  word and fails at about a thousand words without a full stop, which LongBench counts as 0.
"""

from __future__ import annotations

import ast
import re
import string
import unicodedata
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from types import MappingProxyType
from typing import Self, TypeAlias

from ragkv.errors import ConfigError
from ragkv.evaluation.questions import Question, contains_answer

_EPSILON = 1e-8  # the package's, so equal texts score 1 - 5e-9


def rouge_l(found: str, gold: str) -> float:
    """The F score of two texts, below 1; 0.0 if one of them has no sentence."""
    found_sentences, gold_sentences = _sentences(found), _sentences(gold)
    if not found_sentences or not gold_sentences:
        return 0.0
    common: set[str] = set()
    for sentence in gold_sentences:
        for other in found_sentences:
            common |= _common_words(sentence, other)
    precision = len(common) / len({word for sentence in found_sentences for word in sentence})
    recall = len(common) / len({word for sentence in gold_sentences for word in sentence})
    return 2 * precision * recall / (precision + recall + _EPSILON)


def _sentences(text: str) -> list[list[str]]:
    """The words of each sentence. As in the package, a blank sentence has one empty word."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _common_words(x: Sequence[str], y: Sequence[str]) -> set[str]:
    """The distinct words of the longest common subsequence whose trace prefers to step back in `y`."""
    lengths = [[0] * (len(y) + 1)]  # (len(x) + 1, len(y) + 1): of the first i and j words
    for word in x:
        above, row = lengths[-1], [0]
        for j, other in enumerate(y):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        lengths.append(row)
    words: set[str] = set()
    i, j = len(x), len(y)
    while i and j:
        if x[i - 1] == y[j - 1]:
            words.add(x[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


Metric: TypeAlias = Callable[[str, "Example"], float]
"""A function from (the engine's answer, the example) to a score in [0, 1]; higher is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question of a task, and the chunks that may be read to answer it.

    `chunks` are texts in the task's order; the pieces of a long text are in order. `answers` are the gold answers; the
    metric decides whether one of them or all must be given. `kind` is a slice that is reported separately ("one hop").
    `needed` are the indices of the chunks with the evidence, if the task knows them, and `classes` the labels of a
    classification (LongBench's `all_classes`).
    """

    example_id: str
    question: str
    chunks: tuple[str, ...]
    answers: tuple[str, ...]
    kind: str = ""
    needed: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Examples with one metric. `seed` made or drew them; it is None for the complete examples of a file."""

    name: str
    metric: str
    examples: Sequence[Example]
    max_new_tokens: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        if len({example.example_id for example in self.examples}) != len(self.examples):
            raise ValueError(f"task {self.name!r}: two examples have the same example_id")
        if self.max_new_tokens < 1:
            raise ValueError(f"task {self.name!r}: max_new_tokens must be at least 1")

    @classmethod
    def of(cls, questions: Sequence[Question], *, name: str = "", metric: str = "contains") -> Self:
        """A task whose chunks an index finds; the examples' ids are the positions of the questions."""
        examples = [
            Example(example_id=str(at), question=question.text, chunks=(), answers=question.answers)
            for at, question in enumerate(questions)
        ]
        return cls(name=name, metric=metric, examples=examples)


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


_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"(?:Paragraph |段落)(\d+)")
_NO_CODE = ("`", "#", "//")


def qa_f1(prediction: str, example: Example) -> float:
    """The best token F1 with SQuAD's normalisation, which, unlike LOFT's, keeps accents."""
    found = word_normal(prediction).split()
    return max(token_f1(found, word_normal(gold).split()) for gold in example.answers)


def rouge_best(prediction: str, example: Example) -> float:
    """The best ROUGE-L of the `rouge` package."""
    return max(rouge_l(prediction, gold) for gold in example.answers)


def classification(prediction: str, example: Example) -> float:
    """1 / the number of labels on the first line if the gold one is among them, else 0.0."""
    if not example.classes:
        raise ConfigError(f'Example {example.example_id}: the metric "classification" needs "classes", all labels.')
    line = _first_line(prediction)
    return max(_named(line, gold, example.classes) for gold in example.answers)


def retrieval(prediction: str, example: Example) -> float:
    """The share of numbers in the answer that equal the gold paragraph's ("Paragraph 7" or 段落7)."""
    return max(_share(prediction, _paragraph(gold, example)) for gold in example.answers)


def count(prediction: str, example: Example) -> float:
    """The share of numbers in the answer that equal the gold number, compared as text."""
    return max(_share(prediction, gold) for gold in example.answers)


def code_sim(prediction: str, example: Example) -> float:
    """fuzz.ratio of the first line without a backtick, # or //."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _NO_CODE)), "")
    return max(_ratio(line, gold) for gold in example.answers)


def _on_first_line(metric: Metric) -> Metric:
    """`metric` applied to the first line, because after few-shot prompts a model may continue with another example."""

    def scored(prediction: str, example: Example) -> float:
        return metric(_first_line(prediction), example)

    return scored


qa_f1_first_line: Metric = _on_first_line(qa_f1)
rouge_first_line: Metric = _on_first_line(rouge_best)


def paragraph_number(gold: str) -> str | None:
    """The 7 of "Paragraph 7", or None for any other gold answer."""
    return found[1] if (found := _PARAGRAPH.search(gold)) else None


def _first_line(prediction: str) -> str:
    return prediction.lstrip("\n").split("\n")[0]


def _named(line: str, gold: str, classes: tuple[str, ...]) -> float:
    named = [label for label in classes if label in line]
    at = 0
    while at < len(named):  # LongBench removes items while it iterates, so it skips the label after a removed one
        if named[at] in gold and named[at] != gold:
            named.remove(named[at])
        at += 1
    return 1 / len(named) if gold in named else 0.0


def _share(prediction: str, gold: str) -> float:
    numbers: list[str] = _NUMBER.findall(prediction)
    return numbers.count(gold) / len(numbers) if numbers else 0.0


def _paragraph(gold: str, example: Example) -> str:
    if (number := paragraph_number(gold)) is None:
        raise ConfigError(
            f'Example {example.example_id}: the metric "retrieval" needs an answer such as "Paragraph 7", not {gold!r}.'
        )
    return number


def _ratio(found: str, gold: str) -> float:
    if found == gold:
        return 1.0
    if not found or not gold:
        return 0.0
    return round(100 * SequenceMatcher(None, found, gold).ratio()) / 100


_CONTROL = re.compile(r"[\x00-\x1f]")


def score(name: str, prediction: str, example: Example) -> float:
    """Score one answer with the metric `name`. Raises ConfigError for an unknown name, or without a gold answer."""
    metric = metric_of(name)
    if not example.answers:
        raise ConfigError(f"Example {example.example_id} has no gold answer; {name} cannot judge it.")
    return metric(prediction, example)


def metric_of(name: str) -> Metric:
    """The metric `name`. Raises ConfigError, which lists the names, if there is none."""
    if name not in METRICS:
        raise ConfigError(f"There is no metric {name!r}; choose one of {', '.join(METRICS)}.")
    return METRICS[name]


def _contains(prediction: str, example: Example) -> float:
    """1.0 if the answer contains a gold answer, ignoring case and white space, else 0.0."""
    return float(contains_answer(prediction, example.answers))


def _string_match_all(prediction: str, example: Example) -> float:
    """The share of gold answers that the answer contains, ignoring case."""
    found = _ruler_normal(prediction)
    return sum(gold.lower() in found for gold in example.answers) / len(example.answers)


def _string_match_part(prediction: str, example: Example) -> float:
    """1.0 if the answer contains a gold answer, ignoring case, else 0.0."""
    found = _ruler_normal(prediction)
    return float(any(gold.lower() in found for gold in example.answers))


def _ruler_normal(prediction: str) -> str:
    return _CONTROL.sub("\n", prediction.strip()).strip().lower()


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "contains": _contains,
        "subspan_em": subspan_em,
        "exact_match": exact_match,
        "f1": f1,
        "loft_multi": loft_multi,
        "qa_f1": qa_f1,
        "qa_f1_first_line": qa_f1_first_line,
        "rouge_l": rouge_best,
        "rouge_l_first_line": rouge_first_line,
        "classification": classification,
        "retrieval": retrieval,
        "count": count,
        "code_sim": code_sim,
        "string_match_all": _string_match_all,
        "string_match_part": _string_match_part,
    }
)
