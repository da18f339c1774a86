"""The metrics of answers and of rankings, and their means over questions with 95 % intervals.

Metrics of answers are chosen by name, have values in [0, 1] and need at least one gold answer.

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

Rankings have recall, hit rate, reciprocal rank and nDCG per question. A ranking is a sequence of distinct ids, best
first. Relevance maps ids to grades; an id without a grade above 0 is not relevant. Without a relevant id no measure is
defined, so they raise ValueError instead of returning 0 or 1.

The intervals of verdicts stay honest when few questions were asked or all had the same result. The unit is the
question, not the token, because the tokens of one answer are right or wrong together. One entirely right and one
entirely wrong question are added to those that were asked, as Bonett and Price (2012) do for paired proportions. So
every interval has a width, and the interval of three right answers is still wide.
"""

from __future__ import annotations

import ast
import math
import random
import re
import string
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np

from ragkv.doctor.io import GoldenQuestion, Progress, contains_answer
from ragkv.errors import ConfigError

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
    def of(cls, questions: Sequence[GoldenQuestion], *, name: str = "", metric: str = "contains") -> Self:
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
    """Whether each row can be assigned a different fitting column: LOFT's Hungarian assignment with costs 0 and 1."""
    owner: dict[int, int] = {}  # column -> row

    def place(row: int, tried: set[int]) -> bool:
        """Give the row a column, if need be by moving the rows that have them (an augmenting path)."""
        for column, fit in enumerate(fits[row]):
            if fit and column not in tried:
                tried.add(column)
                if column not in owner or place(owner[column], tried):
                    owner[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(fits)))


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


METRICS: Mapping[str, Metric] = {
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
