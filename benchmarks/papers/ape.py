"""The tables of APE (arXiv 2502.05431): Table 5, what each part of it adds, and Table 3, many-shot learning."""

from __future__ import annotations

from itertools import pairwise

from ragkv.benchmarks.papers.calibration import search_ape, with_searched_pair
from ragkv.benchmarks.papers.definition import Ask, Cell, Column, Line, Order, Paper, Table, across, along, printed

__all__ = ["APE_3", "APE_5"]

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
    found = search_ape(ask, chunks=16)
    engines = {
        "prefix, T": f"ape(temperature={found.temperature:g}, scale=1)",
        "prefix, T and S": f"ape(temperature={found.temperature:g}, scale={found.scale:g})",
    }
    return table.with_engines(engines, found.told)


APE_5 = Table(
    name="ape-5",
    title="APE Table 5: what prefix, temperature and scale bring",
    follows="APE Table 5",
    lines=(
        Line(label="no prefix", engine='ape(temperature=1, scale=1, prompt.system="", prompt.context="")'),
        Line(label="prefix", engine="ape(temperature=1, scale=1)"),
        Line(label="prefix, T", engine="ape(temperature=0.9, scale=1)"),
        Line(label="prefix, T and S", engine="ape(temperature=0.9, scale=0.9)"),
        Line(label="full", engine="full"),
        Line(label="full, no prefix", engine='full(prompt.system="", prompt.context="")'),
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


def _shots(count: int) -> Column:
    return Column(label=f"{count} shots", task="icl(shots=4)", chunks=count // 4, limit=_FEWER.get(count))


_SEARCHED = "APE, T and S searched"


def _searched(table: Table, ask: Ask) -> Table:
    """The table with T and S searched on other shots, which a seed draws that no table uses."""
    return with_searched_pair(table, ask, [_SEARCHED], chunks=4, task="icl(shots=4)")


_LAST = f"{_SHOTS[-1]} shots"
_MANY = "full-shot to {}: Date 46.67 to {}, Salient 46.67 to {}, Tracking7 8.89 to {}, Web 58.89 to {}"

APE_3 = Table(
    name="ape-3",
    title="APE Table 3: learning from more and more shots",
    follows="APE Table 3 (in-context learning)",
    lines=(
        Line(label="sequential (full)", engine="full"),
        Line(label="APE, T = S = 1", engine="ape(temperature=1, scale=1)"),
        Line(label=_SEARCHED, engine="ape"),
        Line(label="block", engine="block"),
        Line(label="PCED", engine="pced"),
    ),
    columns=tuple(_shots(count) for count in _SHOTS),
    prepare=_searched,
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
        Order(
            left=Cell(_SEARCHED, _LAST),
            relation=">",
            right=Cell(_SEARCHED, "0 shots"),
            source="APE full-shot to zero-shot: Date 43.33 to 20.00, Salient 45.55 to 8.89, Web 58.89 to 8.89",
        ),
    ),
    limit=60,
    remarks=(
        "Four shots are a chunk. Labels mean nothing by themselves, so that without a shot none can be named.",
        "PCED's experts are equally relevant here: no retriever has seen the shots.",
    ),
)
