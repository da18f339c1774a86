"""Searches for T and S (greedy, over the steps of `ragkv tune`) and for γ, on questions that no table uses."""

from collections.abc import Callable, Sequence

import pytest

from ragkv.benchmarks.evaluation.answers import ExampleResult
from ragkv.benchmarks.evaluation.metrics import Example, Task
from ragkv.benchmarks.papers import ape
from ragkv.benchmarks.papers.ape import search_ape, search_gamma
from ragkv.benchmarks.papers.run import TABLES
from ragkv.benchmarks.papers.table import TableRow


@pytest.fixture(autouse=True)
def few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ape, "_ASKED", 1)


def answered(line: TableRow, score: float) -> ExampleResult:
    example = Example(example_id="0", question="?", chunks=(), answers=("a",))
    return ExampleResult(
        task="t", example=example, candidate=line.candidate("mini", None), text="", score=score, chunks=0
    )


class Answers:
    """Replaces a model: the score is a function of T and S, or of other options. Records the calls."""

    def __init__(self, score: Callable[..., float], options: Sequence[str] = ("temperature", "scale")) -> None:
        self.score = score
        self.options = options
        self.asked: list[tuple[float, ...]] = []
        self.lines: list[TableRow] = []
        self.tasks: list[str] = []

    def __call__(self, tasks: Sequence[Task], lines: Sequence[TableRow]) -> list[list[ExampleResult]]:
        self.tasks = [task.name for task in tasks]
        self.lines += lines
        results = []
        for line in lines:
            given = line.candidate("mini", None).options
            self.asked.append(tuple(given[name] for name in self.options))
            results.append([answered(line, self.score(*self.asked[-1])) for task in tasks for _ in task.examples])
        return results


def test_the_best_t_then_the_best_s_at_it():
    answers = Answers(lambda t, s: 1 - abs(t - 0.7) - abs(s - 0.4) / 2)
    found, explanation = search_ape(answers)
    assert (found.temperature, found.scale) == (0.7, 0.4)
    assert answers.asked[:10] == [(t / 10, 1.0) for t in range(10, 0, -1)]
    assert answers.asked[10:] == [(0.7, s / 10) for s in range(9, 0, -1)]  # (0.7, 1) was tested before
    assert "T = 0.7 and S = 0.4" in explanation
    assert "100.0 % with both" in explanation


def test_the_table_is_filled_with_what_was_found():
    table = TABLES["ape-5"]
    assert table.prepare is not None
    prepared = table.prepare(table, Answers(lambda t, s: 1 - abs(t - 0.6) - abs(s - 0.5)))
    assert {line.label: line.engine for line in prepared.lines} == {
        **{line.label: line.engine for line in table.lines},
        "prefix, T": "ape(temperature=0.6, scale=1)",
        "prefix, T and S": "ape(temperature=0.6, scale=0.5)",
    }
    assert "T = 0.6 and S = 0.5" in prepared.remarks[-1]


def test_gamma_is_the_best_of_the_papers_sweep_and_the_nearest_to_its_own_among_equals():
    line = TableRow(label="x", engine="pced", retrieval="sparse", rerank=True)
    answers = Answers(lambda gamma: 1 - abs(gamma - 1) / 10, ["gamma"])
    assert search_gamma(answers, line, chunks=5)[0] == 1
    assert all(asked.retrieval == "sparse" and asked.rerank for asked in answers.lines)
    assert len(answers.lines) == 7
    assert answers.tasks
    assert all("split=train" in name for name in answers.tasks)
    assert search_gamma(Answers(lambda gamma: float(gamma > 1.7), ["gamma"]), line, chunks=5)[0] == 2.5
    assert search_gamma(Answers(lambda gamma: float(gamma in (2, 4)), ["gamma"]), line, chunks=5)[0] == 2
