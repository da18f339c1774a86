"""The tables of APE (arXiv 2502.05431): Table 5, what each part of it adds, and Table 3, many-shot learning.

APE's T and S, and PCED's γ, are searched on questions that no table asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean

from ragkv.benchmarks.evaluation.metrics import Task
from ragkv.benchmarks.papers.table import Ask, Column, Paper, Table, TableRow, across, along, printed
from ragkv.doctor.tune import STEPS, APESetting, SettingScore, search_stage

_ASKED = 30  # questions per kind
_SEED = 7_001  # no table uses it, so the contexts differ even where names coincide
_KINDS = ("one hop", "two hops")
_PORTION = 10  # questions per kind, after each of which settings that cannot win any more are dropped
_GAMMAS = (2.5, 2.0, 3.0, 1.5, 4.0, 1.0, 0.5)
"""The values of PCED Table 5, ordered by their distance from the paper's own, 2.5."""


def search_ape(ask: Ask, *, chunks: int = 16, task: str = "") -> tuple[APESetting, str]:
    """The best setting, and a sentence that says how it was found: T at S = 1 first, then S at that T, in the steps of
    `ragkv tune`; on a tie, the smaller change wins.

    The questions are of one hop and two hops over `chunks` passages of training worlds. A table that asks something
    else passes its `task`, of which other questions are drawn by a separate seed.
    """
    plain = APESetting(temperature=1.0, scale=1.0)
    trials: dict[APESetting, SettingScore] = {}
    tasks = [Column(label="", task=task, chunks=chunks).make(_SEED, 2 * _ASKED)] if task else _tasks(chunks)
    asked = sum(len(own.examples) for own in tasks)
    over = f"`{task}`" if task else "training worlds"

    def right(portion: list[Task], settings: Sequence[APESetting]) -> list[float]:
        results = ask(portion, [TableRow(label="", engine=_ape(one.temperature, one.scale)) for one in settings])
        return [sum(result.score or 0.0 for result in found) for found in results]

    portions = [(sum(len(each.examples) for each in one), partial(right, one)) for one in _portions(tasks)]
    at_t = search_stage("temperature", [replace(plain, temperature=t) for t in STEPS], portions, trials, keep=plain)
    found = search_stage("scale", [replace(at_t, scale=value) for value in STEPS], portions, trials)
    shares = [f"{100 * trials[setting].right / asked:.1f} %" for setting in (plain, at_t, found)]
    return found, (
        f"T = {found.temperature:g} and S = {found.scale:g} were searched greedily (APE §4.4) on "
        f"{asked} questions over {over}, seed {_SEED}, {chunks} chunks each: "
        f"{shares[0]} right at T = S = 1, {shares[1]} with T, {shares[2]} with both."
    )


def with_searched_pair(table: Table, ask: Ask, lines: Sequence[str], *, chunks: int, task: str = "") -> Table:
    """A copy whose `lines` (labels) use the T and S that `search_ape` finds, with a remark that says so."""
    found, explanation = search_ape(ask, chunks=chunks, task=task)
    return table.with_engines(dict.fromkeys(lines, _ape(found.temperature, found.scale)), explanation)


def search_gamma(ask: Ask, line: TableRow, *, chunks: int) -> tuple[float, str]:
    """The γ with which PCED answers most questions of one and two hops, and a sentence on how it was found.

    Chunks are ranked as for `line`. On a tie, the γ nearest to the paper's 2.5 wins (PCED §3, sweep in Table 5).
    """
    tasks = _tasks(chunks)
    lines = [replace(line, engine=f"pced(gamma={gamma:g})") for gamma in _GAMMAS]
    shares = [fmean(result.score or 0.0 for result in found) for found in ask(tasks, lines)]
    right = dict(zip(_GAMMAS, shares, strict=True))
    best = max(_GAMMAS, key=lambda gamma: right[gamma])
    asked = sum(len(task.examples) for task in tasks)
    swept = ", ".join(f"{100 * right[gamma]:.1f} at {gamma:g}" for gamma in sorted(right))
    return best, (
        f"γ = {best:g} was chosen on {asked} questions over training worlds, seed {_SEED}, {chunks} chunks, half of "
        f"one hop and half of two: {swept} % right."
    )


def _tasks(chunks: int) -> list[Task]:
    columns = [Column(label=kind, task=f'passages(kind="{kind}", split=train)', chunks=chunks) for kind in _KINDS]
    return [column.make(_SEED, _ASKED) for column in columns]


def _ape(temperature: float, scale: float) -> str:
    """Spelled as in the tables, so that a line with the same pair reuses its answers."""
    return f"ape(temperature={temperature:g}, scale={scale:g})"


def _portions(tasks: Sequence[Task]) -> list[list[Task]]:
    """The tasks split into portions of `_PORTION` questions each."""
    most = max(len(task.examples) for task in tasks)
    return [
        [
            replace(task, examples=part)
            for task in tasks
            if (part := task.examples[start : start + _PORTION])  # one may have fewer than another
        ]
        for start in range(0, most, _PORTION)
    ]


_PARTS = ("no prefix", "prefix", "prefix, T", "prefix, T and S")
_PAPER_5 = (
    Paper(
        caption="Table 5, means over four models",
        columns=("GSM8K", "TriviaQA", "MMLU"),
        values=dict(
            zip(
                _PARTS,
                ((38.25, 67.99, 63.09), (50.42, 70.76, 63.70), (51.15, 71.03, 64.49), (53.62, 72.64, 66.62)),
                strict=True,
            )
        ),
    ),
)
_ALL_5 = {"one hop": ("TriviaQA",), "two hops": ("TriviaQA",), "many-shot": ("GSM8K", "MMLU")}


def _tuned(table: Table, ask: Ask) -> Table:
    """The table with T and S searched on worlds that no column asks about."""
    found, explanation = search_ape(ask)
    engines = {"prefix, T": _ape(found.temperature, 1), "prefix, T and S": _ape(found.temperature, found.scale)}
    return table.with_engines(engines, explanation)


APE_5 = Table(
    name="ape-5",
    title="APE Table 5: what prefix, temperature and scale bring",
    follows="APE Table 5",
    lines=(
        TableRow(label="no prefix", engine='ape(temperature=1, scale=1, prompt.system="", prompt.context="")'),
        TableRow(label="prefix", engine="ape(temperature=1, scale=1)"),
        TableRow(label="prefix, T", engine="ape(temperature=0.9, scale=1)"),
        TableRow(label="prefix, T and S", engine="ape(temperature=0.9, scale=0.9)"),
        TableRow(label="full", engine="full"),
        TableRow(label="full, no prefix", engine='full(prompt.system="", prompt.context="")'),
    ),
    columns=(
        Column(label="one hop", task='passages(kind="one hop")', chunks=16),
        Column(label="two hops", task='passages(kind="two hops")', chunks=16),
        Column(label="many-shot", task="icl", chunks=16),
    ),
    prepare=_tuned,
    paper=_PAPER_5,
    orders=tuple(
        order for before, after in pairwise(_PARTS) for order in printed(_PAPER_5, after, ">", before, _ALL_5)
    ),
    limit=60,
    remarks=(
        "Questions over passages of held-out worlds stand for TriviaQA, labels learnt from shots for GSM8K and MMLU.",
        "With a prefix alone APE is at T = S = 1, ragkv's default; the line with T and S has the searched pair.",
        "Without prefix, the words before the passages are left out; the chat template's own tokens stay. PCW is this "
        "first line.",
    ),
)

_SHOTS = (0, 4, 16, 64, 256)
"""Four shots per chunk."""
_FEWER = {64: 40, 256: 24}  # questions, because a prompt of 6,000 tokens takes long


_SEARCHED = "APE, T and S searched"


_LAST = f"{_SHOTS[-1]} shots"
_MANY = "full-shot to {}: Date 46.67 to {}, Salient 46.67 to {}, Tracking7 8.89 to {}, Web 58.89 to {}"

APE_3 = Table(
    name="ape-3",
    title="APE Table 3: learning from more and more shots",
    follows="APE Table 3 (in-context learning)",
    lines=(
        TableRow(label="sequential (full)", engine="full"),
        TableRow(label="APE, T = S = 1", engine="ape(temperature=1, scale=1)"),
        TableRow(label=_SEARCHED, engine="ape"),
        TableRow(label="block", engine="block"),
        TableRow(label="PCED", engine="pced"),
    ),
    columns=tuple(
        Column(label=f"{count} shots", task="icl(shots=4)", chunks=count // 4, limit=_FEWER.get(count))
        for count in _SHOTS
    ),
    prepare=partial(with_searched_pair, lines=[_SEARCHED], chunks=4, task="icl(shots=4)"),
    paper=tuple(
        Paper(
            caption=f"Table 3, {name}, Llama-3.1-8B-Instruct",
            columns=("zero-shot", "few-shot", "half-shot", "full-shot"),
            values={"sequential (full)": sequential, "APE": (None, None, None, ape)},
        )
        for name, sequential, ape in (
            ("Date", (20.00, 36.64, 45.55, 46.67), 43.33),
            ("Salient", (8.89, 38.89, 42.22, 46.67), 45.55),
            ("Tracking7", (1.12, 6.67, 8.89, 8.89), 8.89),
            ("Web", (8.89, 38.89, 55.56, 58.89), 58.89),
        )
    ),
    orders=(
        *along(
            ["sequential (full)"], _LAST, ">", "0 shots", _MANY.format("zero-shot", "20.00", "8.89", "1.12", "8.89")
        ),
        *along(
            ["sequential (full)"], _LAST, ">", "4 shots", _MANY.format("few-shot", "36.64", "38.89", "6.67", "38.89")
        ),
        *along(
            ["sequential (full)"], _LAST, ">=", "64 shots", _MANY.format("half-shot", "45.55", "42.22", "8.89", "55.56")
        ),
        *across(
            [_LAST],
            _SEARCHED,
            "~",
            "sequential (full)",
            "full-shot, APE to sequential: Date 43.33 to 46.67, Salient 45.55 to 46.67, Tracking7 8.89, Web 58.89",
            within=4,
        ),
        *along(
            [_SEARCHED],
            _LAST,
            ">",
            "0 shots",
            "APE full-shot to zero-shot: Date 43.33 to 20.00, Salient 45.55 to 8.89, Web 58.89 to 8.89",
        ),
    ),
    limit=60,
    remarks=(
        "Four shots are a chunk. Labels mean nothing by themselves, so that without a shot none can be named.",
        "PCED's experts are equally relevant here: no retriever has seen the shots.",
    ),
)
