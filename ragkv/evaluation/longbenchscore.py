"""LongBench v1's scores of an answer, including their quirks, so that figures are comparable with published ones.

These are the functions of THUDM/LongBench `metrics.py`. Taking the best gold answer, and the first line for trec,
triviaqa, samsum and lsht, is from its `LongBench/eval.py`. fuzz.ratio is fuzzywuzzy's own, difflib's ratio in whole
percents (with python-Levenshtein a few values differ). `qa_f1_zh` and `rouge_zh` are missing, because they need jieba's
word lists.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from ragkv.errors import ConfigError
from ragkv.evaluation.example import Example, Metric
from ragkv.evaluation.loftscore import token_f1, word_normal
from ragkv.evaluation.rouge import rouge_l

__all__ = [
    "classification",
    "code_sim",
    "count",
    "paragraph_number",
    "qa_f1",
    "qa_f1_first_line",
    "retrieval",
    "rouge_best",
    "rouge_first_line",
]

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
