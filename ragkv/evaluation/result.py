"""Turn answers into figures: one result per question and contender, one row per task, slice and contender."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ragkv.errors import UsageError
from ragkv.evaluation.answerer import RAW, Contender
from ragkv.evaluation.example import Example, Task
from ragkv.evaluation.ranking import mean

__all__ = ["Result", "Row", "baseline_of", "require_baseline", "rows_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One answer and its score.

    If the prompt was too long for the model, `score` is None and `text` is empty. `chunks` is the number of chunks that
    were read. `trace` has the text of every token and the position of the chunk whose expert proposed it, for an engine
    with experts (PCED Figure 2).
    """

    task: str
    example: Example
    contender: Contender
    text: str
    score: float | None
    chunks: int
    trace: tuple[tuple[str, int | None], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A mean in [0, 1] over `n` questions with its 95 % bootstrap interval, and the settings that it was made with.

    `kind` is a slice of the task; "" is the whole task. `chunks` is the mean number of chunks read. `difference` is the
    mean of (this - baseline) over the questions that both answered. The prompts of `too_long` questions did not fit the
    model; they are not counted, and if none fitted, `value` is None.
    """

    task: str
    kind: str
    engine: str
    metric: str
    value: float | None
    n: int
    ci95: tuple[float, float] | None
    seed: int
    model: str
    options: Mapping[str, Any]
    codec: str
    retrieval: str
    rerank: bool
    top_k: int | None
    chunks: float
    too_long: int = 0
    baseline: str | None = None
    difference: float | None = None
    difference_ci95: tuple[float, float] | None = None
    contender: Contender = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """A row in the form that `ragkv eval … --json` prints."""
        return {key: value for key, value in asdict(self).items() if key != "contender"}


def rows_of(
    tasks: Iterable[Task],
    contenders: Sequence[Contender],
    results: Iterable[Result],
    *,
    seed: int = 0,
    baseline: str | None = None,
) -> list[Row]:
    """For each task, rows of the whole task and then of every slice, with the contenders in order."""
    by: dict[tuple[str, int], list[Result]] = {}
    places = {id(contender): number for number, contender in enumerate(contenders)}
    for result in results:
        by.setdefault((result.task, places[id(result.contender)]), []).append(result)
    rows = []
    for task in tasks:
        kinds = list(dict.fromkeys(example.kind for example in task.examples))
        for kind in ["", *(kinds if len(kinds) > 1 else ())]:
            for number, contender in enumerate(contenders):
                other = None if baseline is None else baseline_of(contender, contenders, baseline)
                own, others = (
                    _of_kind(by.get((task.name, at), ()), kind) for at in (number, places.get(id(other), -1))
                )
                rows.append(_row(task, kind, contender, own, others, other, seed))
    return rows


def baseline_of(contender: Contender, among: Sequence[Contender], name: str) -> Contender | None:
    """The contender that `contender` is compared with: the one labelled `name` that is most similar to it.

    Similarity is judged by the model first, then by the ranking of chunks, then a raw codec is preferred. A lossy
    version of the baseline itself is compared with its raw version. None for the baseline itself, and if no contender
    has the name.
    """
    closeness: list[Callable[[Contender], Any]] = [
        lambda one: one.model == contender.model,
        lambda one: (one.retrieval, one.rerank, one.top_k) == (contender.retrieval, contender.rerank, contender.top_k),
        lambda one: one.codec == RAW,
    ]
    named = [one for one in among if one.label == name]
    if contender in named:
        raw = [one for one in named if one.codec == RAW and one != contender and one.model == contender.model]
        named = raw if contender.codec != RAW else []
    if not named:
        return None
    return max(named, key=lambda one: [near(one) for near in closeness])


def require_baseline(contenders: Sequence[Contender], name: str) -> None:
    """Raise UsageError if no contender is labelled `name`."""
    labels = list(dict.fromkeys(one.label for one in contenders))
    if name not in labels:
        raise UsageError(f"--baseline {name} is not among the engines; choose one of {', '.join(labels)}.")


def _of_kind(results: Iterable[Result], kind: str) -> list[Result]:
    return [result for result in results if kind in ("", result.example.kind)]


def _row(
    task: Task,
    kind: str,
    contender: Contender,
    own: Sequence[Result],
    others: Sequence[Result],
    other: Contender | None,
    seed: int,
) -> Row:
    scores = {result.example.example_id: result.score for result in own if result.score is not None}
    theirs = {result.example.example_id: result.score for result in others if result.score is not None}
    drawn = seed if task.seed is None else task.seed
    value = mean(list(scores.values()), drawn) if scores else None
    both = [score - theirs[name] for name, score in scores.items() if name in theirs]
    apart = mean(both, drawn) if both else None
    return Row(
        task=task.name,
        kind=kind,
        engine=contender.label,
        metric=task.metric,
        value=None if value is None else value.value,
        n=len(scores),
        ci95=None if value is None else value.ci95,
        seed=drawn,
        model=contender.model,
        options=contender.options,
        codec=contender.codec,
        retrieval=contender.retrieval,
        rerank=contender.rerank,
        top_k=contender.top_k,
        chunks=sum(result.chunks for result in own) / len(own) if own else 0.0,
        too_long=len(own) - len(scores),
        baseline=None if other is None or apart is None else other.label,
        difference=None if apart is None else apart.value,
        difference_ci95=None if apart is None else apart.ci95,
        contender=contender,
    )
