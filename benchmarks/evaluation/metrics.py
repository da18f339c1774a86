"""The metrics of answers and of rankings, and their means over questions with bootstrap intervals.

Metrics of answers are chosen by name, have values in [0, 1] and need at least one gold answer. They follow the
benchmarks' own code, including its quirks, so that figures are comparable with published ones: `string_match_all` is
NVIDIA/RULER's (`scripts/eval/synthetic/constants.py`), `subspan_em` and `f1` are those of google-deepmind/loft
(`evaluation/utils.py`), `classification` that of THUDM/LongBench (`metrics.py`).
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np

from ragkv.doctor.questions import GoldenQuestion, contains_answer
from ragkv.errors import ConfigError

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
    def of(cls, questions: Sequence[GoldenQuestion], *, name: str = "", metric: str = "contains") -> Self:
        """A task whose chunks an index finds; the examples' ids are the positions of the questions."""
        examples = [
            Example(example_id=str(at), question=question.text, chunks=(), answers=question.answers)
            for at, question in enumerate(questions)
        ]
        return cls(name=name, metric=metric, examples=examples)


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def subspan_em(prediction: str, example: Example) -> float:
    """1.0 if the answer contains a gold answer, both normalised, else 0.0."""
    answer = loft_normal(prediction)
    return float(any(loft_normal(gold) in answer for gold in example.answers))


def f1(prediction: str, example: Example) -> float:
    """The best token F1 over the gold answers, all normalised: of two multisets of tokens, 0.0 if they share none."""
    words = Counter(loft_normal(prediction).split())

    def of(gold: str) -> float:
        tokens = Counter(loft_normal(gold).split())
        same = (words & tokens).total()
        return 2 * same / (words.total() + tokens.total()) if same else 0.0

    return max(of(gold) for gold in example.answers)


def word_normal(text: str) -> str:
    """SQuAD's normalisation: lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def loft_normal(text: str) -> str:
    """SQuAD's normalisation after Unicode's NFD, which separates accents from letters."""
    return word_normal(unicodedata.normalize("NFD", text))


def classification(prediction: str, example: Example) -> float:
    """1 / the number of labels on the first line if the gold one is among them, else 0.0."""
    if not example.classes:
        raise ConfigError(f'Example {example.example_id}: the metric "classification" needs "classes", all labels.')
    line = _first_line(prediction)
    return max(_named(line, gold, example.classes) for gold in example.answers)


def _first_line(prediction: str) -> str:
    return prediction.lstrip("\n").split("\n")[0]


def _named(line: str, gold: str, classes: tuple[str, ...]) -> float:
    named = [label for label in classes if label in line]
    place = 0
    while place < len(named):  # LongBench removes items while it iterates, so it skips the label after a removed one
        if named[place] in gold and named[place] != gold:
            named.remove(named[place])
        place += 1
    return 1 / len(named) if gold in named else 0.0


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
    plain = _ruler_normal(prediction)
    return sum(gold.lower() in plain for gold in example.answers) / len(example.answers)


def _ruler_normal(prediction: str) -> str:
    return _CONTROL.sub("\n", prediction.strip()).strip().lower()


METRICS: Mapping[str, Metric] = {
    "contains": _contains,
    "subspan_em": subspan_em,
    "f1": f1,
    "classification": classification,
    "string_match_all": _string_match_all,
}


_RESAMPLES = 2000
_BLOCK = 1 << 20  # indices drawn at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean over `n` questions; `ci95` is (low, high)."""

    value: float
    n: int
    ci95: tuple[float, float]


def bootstrap_mean(strata: Sequence[Sequence[float]], seed: int) -> Mean:
    """The mean of the strata's means, with a percentile bootstrap interval over each stratum's questions.

    It is reproducible by `seed`. If all questions of each stratum have the same value, the interval has no width,
    however many there are.
    """
    if not strata or not all(strata):
        raise ValueError("a mean needs at least one value")
    rng = np.random.default_rng(seed)
    value = math.fsum(math.fsum(stratum) / len(stratum) for stratum in strata) / len(strata)
    n = sum(map(len, strata))
    if all(min(stratum) == max(stratum) for stratum in strata):
        return Mean(value=value, n=n, ci95=(value, value))
    drawn = np.zeros(_RESAMPLES)
    for stratum in strata:
        sample = np.asarray(stratum, dtype=np.float64)
        rows = max(1, _BLOCK // len(sample))
        for start in range(0, _RESAMPLES, rows):
            size = min(rows, _RESAMPLES - start), len(sample)
            drawn[start : start + rows] += sample[rng.integers(len(sample), size=size)].mean(axis=1)
    low, high = np.quantile(drawn / len(strata), (0.025, 0.975))
    return Mean(value=value, n=n, ci95=(float(low), float(high)))


def hit_at(k: int, ranked: Sequence[str], relevant: Mapping[str, float]) -> float:
    """1.0 if a relevant id is among the first `k`, else 0.0."""
    return float(any(each in relevant for each in ranked[:k]))


def ndcg_at(k: int, ranked: Sequence[str], relevant: Mapping[str, float]) -> float:
    """The DCG of the first `k`, divided by the DCG of the best possible ranking.

    This is trec_eval's `ndcg_cut`, which BEIR reports: DCG = Σ grade / log2(rank + 1), with the grade itself and not
    2^grade - 1.
    """
    best = sorted(relevant.values(), reverse=True)[:k]
    return _dcg(relevant.get(each, 0.0) for each in ranked[:k]) / _dcg(best)


def _dcg(gains: Iterable[float]) -> float:
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))
