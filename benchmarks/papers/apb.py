"""The table of APB (arXiv 2502.12085): Table 3, what each part of the design is worth."""

from __future__ import annotations

from ragkv.benchmarks.papers.table import Column, Paper, Table, TableRow, across, printed

_PROMPT = 'prompt.system="", prompt.context="", prompt.question="{question}", prompt.bos="none"'
_WORDS, _BLOCK, _ANCHOR, _PASSING = 512, 64, 16, 8
"""8 blocks; the paper's proportions: an anchor of a quarter of a block, and an eighth passed on."""


def _line(
    label: str, *, anchor: int = _ANCHOR, passing: int = _PASSING, question: bool, random: bool = False
) -> TableRow:
    compressor = "random" if random else "heads"
    lengths = f"block={_BLOCK}, anchor={anchor}, passing={passing}"
    asked = "true" if question else "false"
    return TableRow(label=label, engine=f"apb({lengths}, compressor={compressor}, question={asked}, {_PROMPT})")


_LINES = (
    _line("APB", question=True),
    _line("no query", question=False),
    _line("random", question=True, random=True),
    _line("random, no query", question=False, random=True),
    _line("no passing", passing=0, question=True),
    _line("no passing, no query", passing=0, question=False),
    _line("no anchor", anchor=0, question=False),
    _line("no anchor, random", anchor=0, question=False, random=True),
    _line("no anchor, no passing", anchor=0, passing=0, question=False),
)
_PRINTED = (72, 68, 66, 66, 64, 62, 28, 28, 22)
_PAPER = Paper(
    caption="Table 3",
    model="Llama-3.1-8B",
    columns=("E.MC",),
    values={line.label: (value,) for line, value in zip(_LINES, _PRINTED, strict=True)},
)
_STANDS_FOR = {"reference": ("E.MC",)}

APB_3 = Table(
    name="apb-3",
    title="APB Table 3: anchor, passing, retaining heads and the query in the anchor",
    follows="APB Table 3",
    lines=(
        TableRow(label="full attention", engine=f"full({_PROMPT})"),
        *_LINES,
        TableRow(label="StarAttn", engine=f"apb(block={_BLOCK}, preset=star, {_PROMPT})"),
    ),
    columns=tuple(
        Column(label=kind, task=f"variables(kind={kind}, words={_WORDS})", chunks=1) for kind in ("value", "reference")
    ),
    models={"": "examples/variables"},
    dtype="float32",
    paper=(_PAPER,),
    orders=(
        *printed((_PAPER,), "APB", ">", "no query", _STANDS_FOR),
        *printed((_PAPER,), "APB", ">", "random", _STANDS_FOR),
        *printed((_PAPER,), "no query", ">", "random, no query", _STANDS_FOR),
        *printed((_PAPER,), "random", ">", "no passing", _STANDS_FOR),
        *printed((_PAPER,), "APB", ">", "no passing", _STANDS_FOR),
        *printed((_PAPER,), "no passing", ">", "no anchor", _STANDS_FOR),
        *printed((_PAPER,), "no anchor", ">", "no anchor, no passing", _STANDS_FOR),
        *across(["value"], "APB", "~", "full attention", "§4.2: no performance degradation", within=3),
    ),
    limit=400,
    remarks=(
        "The model (examples/variable_model.py) is trained for these lists and has never seen a block. `value` is "
        "RULER's niah_multikey_3, where every line is read by itself; `reference` is its vt: a line stands for what an "
        "earlier one did, which has to be known when it is read; half of the references are to terms at the head.",
        f"Lists of {_WORDS} tokens, l_b = {_BLOCK}, l_a = {_ANCHOR}, l_p = {_PASSING}: 8 blocks in the paper's "
        "proportions. The paper's own table is of 128K tokens of real text, 50 questions.",
    ),
)
