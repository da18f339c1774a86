"""The metrics of answers, by name.

All are in [0, 1] (RULER and LongBench print them times 100) and need at least one gold answer. RULER's two are
`string_match_all` and `string_match_part` of NVIDIA/RULER `scripts/eval/synthetic/constants.py`, the cleaning of an
answer that of `scripts/eval/evaluate.py` (postprocess_pred).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from ragkv.errors import ConfigError
from ragkv.evaluation import loftscore, longbenchscore
from ragkv.evaluation.example import Example, Metric
from ragkv.evaluation.question import contains_answer

__all__ = ["METRICS", "metric_of", "score"]

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
        "subspan_em": loftscore.subspan_em,
        "exact_match": loftscore.exact_match,
        "f1": loftscore.f1,
        "loft_multi": loftscore.loft_multi,
        "qa_f1": longbenchscore.qa_f1,
        "qa_f1_first_line": longbenchscore.qa_f1_first_line,
        "rouge_l": longbenchscore.rouge_best,
        "rouge_l_first_line": longbenchscore.rouge_first_line,
        "classification": longbenchscore.classification,
        "retrieval": longbenchscore.retrieval,
        "count": longbenchscore.count,
        "code_sim": longbenchscore.code_sim,
        "string_match_all": _string_match_all,
        "string_match_part": _string_match_part,
    }
)
