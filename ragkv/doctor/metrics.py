"""The metrics of answers and of rankings, and their means over questions with 95 % intervals.

Metrics of answers are chosen by name, have values in [0, 1] and need at least one gold answer.

They follow the benchmarks' own code, including its quirks, so that figures are comparable with published ones:
`string_match_all` is NVIDIA/RULER's (`scripts/eval/synthetic/constants.py`), `subspan_em` and `f1` are those of
google-deepmind/loft (`evaluation/utils.py`), `classification` that of THUDM/LongBench (`metrics.py`).

Rankings have recall, hit rate, reciprocal rank and nDCG per question. A ranking is a sequence of distinct ids, best
first. Relevance maps ids to grades; an id without a grade above 0 is not relevant. Without a relevant id no measure is
defined, so they raise ValueError instead of returning 0 or 1.

The intervals of verdicts stay honest when few questions were asked or all had the same result. The unit is the
question, not the token, because the tokens of one answer are right or wrong together. One entirely right and one
entirely wrong question are added to those that were asked, as Bonett and Price (2012) do for paired proportions. So
every interval has a width, and the interval of three right answers is still wide.
"""

from __future__ import annotations

import math
import random
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np

from ragkv.doctor.io import GoldenQuestion, Progress, contains_answer
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
    found = _ruler_normal(prediction)
    return sum(gold.lower() in found for gold in example.answers) / len(example.answers)


def _ruler_normal(prediction: str) -> str:
    return _CONTROL.sub("\n", prediction.strip()).strip().lower()


METRICS: Mapping[str, Metric] = {
    "contains": _contains,
    "subspan_em": subspan_em,
    "f1": f1,
    "classification": classification,
    "string_match_all": _string_match_all,
}


Interval = tuple[float, float]

_NORMAL = 1.959964  # the 97.5 % quantile of the normal distribution


def share_interval(parts: Sequence[float], sizes: Sequence[float] | None = None) -> Interval:
    """The interval of sum(parts) / sum(sizes) in [0, 1], with a part and its size per question (default size: 1).

    If all n questions are right, the lower end is 1 - 2.96 / (n + 2): 0.41 for three, 0.95 for sixty.
    """
    sizes = [1.0] * len(parts) if sizes is None else sizes
    mean = sum(sizes) / len(sizes)
    value, error = _ratio_and_error([*parts, mean, 0.0], [*sizes, mean, mean])
    return max(0.0, value - error), min(1.0, value + error)


def difference_interval(differences: Sequence[float]) -> Interval:
    """The interval of the mean of differences in [-1, 1], one per question that both were asked."""
    low, high = share_interval([(difference + 1) / 2 for difference in differences])
    return 2 * low - 1, 2 * high - 1


def mean_interval(sums: Sequence[float], sizes: Sequence[float]) -> Interval:
    """The interval of sum(sums) / sum(sizes), which is unbounded: the added question equals the worst one asked."""
    worst = max(range(len(sums)), key=lambda at: sums[at] / sizes[at])
    value, error = _ratio_and_error([*sums, sums[worst]], [*sizes, sizes[worst]])
    return max(0.0, value - error), value + error


def _ratio_and_error(parts: Sequence[float], sizes: Sequence[float]) -> tuple[float, float]:
    """The ratio of the sums, and 1.96 times its standard error over questions (Taylor linearisation)."""
    n, total = len(parts), math.fsum(sizes)
    value = math.fsum(parts) / total
    squares = math.fsum((part - value * size) ** 2 for part, size in zip(parts, sizes, strict=True))
    return value, _NORMAL * math.sqrt(squares * n / (n - 1)) / total


_RESAMPLES = 2000
_BLOCK = 1 << 20  # indices drawn at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean over `n` questions; `ci95` is (low, high)."""

    value: float
    n: int
    ci95: Interval


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


T = TypeVar("T")


def draw_sample(items: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """At most `limit` of `items` (None: all), drawn by `seed`, in their order."""
    if limit is None or len(items) <= limit:
        return list(items)
    return [items[at] for at in sorted(random.Random(seed).sample(range(len(items)), limit))]


Relevance = Mapping[str, float]


def recall_at(ranked: Sequence[str], relevance: Relevance, k: int) -> float:
    """The share of all relevant ids among the first `k`. If R > k ids are relevant, it is at most k / R (trec_eval)."""
    return _found(ranked, relevance, k) / len(_relevant(relevance))


def hit_at(ranked: Sequence[str], relevance: Relevance, k: int) -> float:
    """1.0 if a relevant id is among the first `k`, else 0.0."""
    return float(_found(ranked, relevance, k) > 0)


def reciprocal_rank(ranked: Sequence[str], relevance: Relevance, k: int | None = None) -> float:
    """1 / rank of the first relevant id, or 0.0 if none is among the first `k` (None: among all)."""
    relevant = _relevant(relevance)
    for rank, found in enumerate(_head(ranked, k), start=1):
        if found in relevant:
            return 1 / rank
    return 0.0


def ndcg_at(ranked: Sequence[str], relevance: Relevance, k: int) -> float:
    """The DCG of the first `k`, divided by the DCG of the best possible ranking.

    This is trec_eval's `ndcg_cut`, which BEIR reports: DCG = Σ grade / log2(rank + 1), with the grade itself and not
    2^grade - 1.
    """
    relevant = _relevant(relevance)
    gains = [relevant.get(found, 0.0) for found in _head(ranked, k)]
    return _dcg(gains) / _dcg(sorted(relevant.values(), reverse=True)[:k])


def _found(ranked: Sequence[str], relevance: Relevance, k: int) -> int:
    relevant = _relevant(relevance)
    return sum(found in relevant for found in _head(ranked, k))


def _head(ranked: Sequence[str], k: int | None) -> Sequence[str]:
    if k is not None and k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    head = ranked[:k]
    if len(set(head)) != len(head):  # it would be counted twice
        raise ValueError("a ranking holds an id twice")
    return head


def _relevant(relevance: Relevance) -> dict[str, float]:
    relevant = {name: grade for name, grade in relevance.items() if grade > 0}
    if not relevant:
        raise ValueError("no id is relevant")
    return relevant


def _dcg(gains: Sequence[float]) -> float:
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A text that can be retrieved: a benchmark's document, which is in no index."""

    passage_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalQuestion:
    """A question, and the ids of the passages or chunks that are relevant to it, with grades above 0.

    `excluded` is a passage that is removed from every ranking: the question itself, if the corpus contains it.
    """

    question_id: str
    question: str
    relevant: Mapping[str, float]
    excluded: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalTask:
    """A set of questions with known relevant ids.

    `unjudged` are the ids of questions without a relevant passage, for which no measure is defined. `passages` is the
    corpus, or None if it is the user's index. `notes` are sentences that a reader of the figures must know.
    """

    name: str
    judgements: Sequence[RetrievalQuestion]
    unjudged: Sequence[str] = ()
    passages: Sequence[Passage] | None = None
    notes: Sequence[str] = ()

    def sample(self, limit: int | None, seed: int) -> Self:
        """A copy with at most `limit` judged questions, drawn by `seed`, in their order. The corpus stays complete."""
        if limit is None or len(self.judgements) <= limit:
            return self
        note = f"{limit} of {len(self.judgements)} judged questions, drawn by seed {seed}"
        return replace(self, judgements=draw_sample(self.judgements, limit, seed), notes=[*self.notes, note])


Search = Callable[[str, int], Sequence[str]]
"""A function from (question, k) to at most `k` distinct ids, best first."""

MEASURES = {"recall": recall_at, "hit": hit_at, "mrr": reciprocal_rank, "ndcg": ndcg_at}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricValue:
    """One measured mean over the `n` judged questions, with its 95 % bootstrap interval (docs/design.md)."""

    task: str
    engine: str
    metric: str
    value: float
    n: int
    ci95: tuple[float, float]
    seed: int

    def to_json(self) -> dict[str, Any]:
        """A row in the form that `--json` prints."""
        return asdict(self)


def measure(
    task: RetrievalTask,
    searches: Mapping[str, Search],
    ks: Sequence[int],
    *,
    seed: int,
    on_progress: Progress | None = None,
) -> list[MetricValue]:
    """Ask every search every question and return, for each search, each measure at each of `ks`.

    Questions are the outer loop, so that searches that share an embedder embed each question once. A ranking may be
    shorter than k, if the search found nothing more.
    """
    depth = max(ks)
    values: dict[tuple[str, str], list[float]] = {
        (engine, f"{name}@{k}"): [] for engine in searches for name in MEASURES for k in ks
    }
    for done, judgement in enumerate(task.judgements):
        for engine, search in searches.items():
            if on_progress is not None:
                on_progress(done, len(task.judgements), engine)
            ranked = _ranking(search, judgement, depth)
            for name, at in MEASURES.items():
                for k in ks:
                    values[engine, f"{name}@{k}"].append(at(ranked, judgement.relevant, k))
    if on_progress is not None:
        on_progress(len(task.judgements), len(task.judgements), "")
    return [
        MetricValue(task=task.name, engine=engine, metric=metric, seed=seed, **asdict(bootstrap_mean([found], seed)))
        for (engine, metric), found in values.items()
    ]


def _ranking(search: Search, judgement: RetrievalQuestion, depth: int) -> list[str]:
    if judgement.excluded is None:
        return list(search(judgement.question, depth))
    ranked = search(judgement.question, depth + 1)
    return [found for found in ranked if found != judgement.excluded][:depth]
