"""The tables of Block-Attention (arXiv 2409.15355): Table 1, and Figure 4, accuracy over fine-tuning steps; and that of
APB (arXiv 2502.12085): Table 3, what each part of the design is worth.

The figure's accuracies are read from the file that examples/block_steps.py writes while it trains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ragkv.benchmarks.papers.ape import with_searched_pair
from ragkv.benchmarks.papers.table import (
    Cell,
    Column,
    KnownFigures,
    Model,
    Paper,
    RunOptions,
    Table,
    TableRow,
    across,
    printed,
)
from ragkv.doctor.questions import Progress
from ragkv.errors import ConfigError

STEPS_FILE = "steps.json"
_LINES = {
    ("block", "full"): "tuned, full",
    ("block", "block"): "tuned, block",
    ("no-positions", "block"): "tuned without positions",
}
"""The table's label for each (variant, engine)."""


def read_steps(table: Table, options: RunOptions, _: Progress | None) -> KnownFigures:
    """The table with the steps.json in the folder that the options name in place of a model, or in the table's own.

    Raises ConfigError if the file is missing or damaged.
    """
    path = Path(options.models.get("", table.models[""])).expanduser() / STEPS_FILE
    try:
        trained = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"There is no {path}; run python examples/block_steps.py, which trains and writes it."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); run python examples/block_steps.py, which writes it again."
        ) from error
    try:
        return _known(table, trained)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not what examples/block_steps.py writes ({error!r}); delete it and run that."
        ) from error


def _known(table: Table, trained: Mapping[str, Any]) -> KnownFigures:
    settings = trained["settings"]
    columns: dict[str, Column] = {}
    scores: dict[Cell, dict[str, list[tuple[str, float]]]] = {}
    points = sorted(trained["points"], key=lambda point: (point["kind"], point["step"]))
    for point in points:
        line = _LINES.get((point["variant"], point["engine"]))
        if line is None:
            continue
        kind, step = str(point["kind"]), int(point["step"])
        label = f"{kind}, step {step}"
        columns[label] = Column(
            label=label, task=str(settings["tasks"][kind]), chunks=int(settings["chunks"]), limit=int(point["n"])
        )
        found = [(str(name), float(score)) for name, score in point["scores"].items()]
        scores[Cell(line, label)] = {label: found}
    return KnownFigures(
        table=replace(
            table,
            lines=tuple(line for line in table.lines if any(cell.line == line.label for cell in scores)),
            columns=tuple(columns.values()),
            orders=tuple(order for order in table.orders if {order.left, order.right} <= scores.keys()),
            remarks=(*table.remarks, _trained(trained)),
        ),
        scores=scores,
        models={"": Model(name=str(settings["model"]), dtype="float32", fingerprint=str(trained["fingerprint"]))},
        seed=int(settings["seed"]),
    )


def _trained(trained: Mapping[str, Any]) -> str:
    settings = trained["settings"]
    return (
        f"Trained at commit {trained['commit']} from `{settings['model']}`: {settings['steps']} steps of "
        f"{settings['batch']} rows, learning rate {settings['learning_rate']:g} falling to 0, {settings['samples']} "
        f"lines of training worlds, full layout for {100 * settings['full_share']:.0f} % of rows, seed "
        f"{settings['seed']}; all weights learn, in float32."
    )


_ABLATION = "examples/ablation"
_PAPER_1 = tuple(
    Paper(
        caption=f"Table 1, {model}",
        model=model,
        columns=("TQA", "2wiki", "NQ", "HQA", "mix"),
        values=dict(
            zip(
                ("vanilla, full", "tuned, block", "tuned without positions", "untuned, block (Prompt Cache)"),
                values,
                strict=True,
            )
        ),
    )
    for model, values in {
        "Llama 3 8B": (
            (72.8, 73.4, 55.7, 69.5, 67.9),
            (73.0, 73.3, 56.2, 68.5, 68.4),
            (70.8, 66.8, 52.9, 61.4, 63.9),
            (62.7, 48.1, 43.3, 39.6, 48.0),
        ),
        "Mistral 7B": (
            (66.6, 69.5, 46.0, 56.4, 59.6),
            (69.9, 70.5, 50.8, 57.9, 62.3),
            (67.8, 67.4, 47.5, 52.4, 58.8),
            (51.9, 44.6, 32.1, 27.8, 38.7),
        ),
    }.items()
)
_STAND_FOR = {"one hop": ("NQ",), "two hops": ("HQA", "2wiki")}
_SEARCHED = "untuned, APE, T and S searched"


BLOCK_1 = Table(
    name="block-1",
    title="Block-Attention Table 1: tuned for blocks, without position re-encoding, and untuned",
    follows="Block-Attention Table 1",
    lines=(
        TableRow(label="vanilla, full", engine="full"),
        TableRow(label="tuned, block", engine="block", role="block"),
        TableRow(label="tuned, full", engine="full", role="block"),
        TableRow(label="tuned without positions", engine="block(preset=no-positions)", role="no_positions"),
        TableRow(label="untuned, block (Prompt Cache)", engine="block(preset=prompt-cache)"),
        TableRow(label="untuned, APE, T = S = 1", engine="ape(temperature=1, scale=1)"),
        TableRow(label="untuned, APE, T = S = 0.9", engine="ape(temperature=0.9, scale=0.9)"),
        TableRow(label=_SEARCHED, engine="ape"),
        TableRow(
            label="untuned, PCW",
            engine='ape(temperature=1, scale=1, prompt.system="", prompt.context="")',
        ),
    ),
    columns=(
        Column(label="one hop", task='passages(kind="one hop")'),
        Column(label="two hops", task='passages(kind="two hops")'),
        Column(label="mean", mean_of=("one hop", "two hops")),
    ),
    models={
        "": f"{_ABLATION}/vanilla",
        "block": f"{_ABLATION}/block",
        "no_positions": f"{_ABLATION}/no-positions",
    },
    dtype="float32",
    prepare=partial(with_searched_pair, lines=[_SEARCHED], chunks=8),
    paper=_PAPER_1,
    orders=(
        *across(
            ("one hop", "two hops"),
            "tuned, block",
            "~",
            "vanilla, full",
            "mix 68.4 to 67.9 (Llama 3 8B); 62.3 to 59.6 (Mistral 7B)",
            within=3,
        ),
        *printed(_PAPER_1, "tuned, block", ">", "tuned without positions", _STAND_FOR),
        *printed(_PAPER_1, "tuned, block", ">", "untuned, block (Prompt Cache)", _STAND_FOR),
        *printed(_PAPER_1, "tuned without positions", ">", "untuned, block (Prompt Cache)", _STAND_FOR),
        *printed(_PAPER_1, "vanilla, full", ">", "untuned, block (Prompt Cache)", _STAND_FOR),
        *across(
            ("one hop", "two hops"),
            "tuned, block",
            ">",
            "untuned, PCW",
            "§3.3: PCW's accuracy was even lower than that of the untuned models",
        ),
    ),
    limit=60,
    remarks=(
        "One hop stands for NQ, two hops for HotpotQA and 2WikiMultiHopQA: passages of held-out fictional worlds.",
        "All three checkpoints come from one model that never saw a block (vanilla), tuned by examples/block_steps.py.",
        "PCW is APE with T = S = 1 and no shared words before the passages; the paper tried it and left it out. "
        "T = S = 0.9 is the pair of the APE authors' demonstration.",
    ),
)

_TUNED, _KEPT, _FULL = "tuned, block", "tuned without positions", "tuned, full"
_STEPS = (0, 10, 25, 50, 100, 150, 200)
_KINDS = ("one hop", "two hops")
_MIX = "Table 1, mix 68.4 to 63.9 (Llama 3 8B); 62.3 to 58.8 (Mistral 7B)"


BLOCK_4 = Table(
    name="block-4",
    title="Block-Attention Figure 4: accuracy over fine-tuning steps",
    follows="Block-Attention Figure 4",
    lines=(
        TableRow(label=_FULL, engine="full"),
        TableRow(label=_TUNED, engine="block"),
        TableRow(label=_KEPT, engine="block(preset=no-positions)"),
    ),
    columns=tuple(
        Column(label=f"{kind}, step {step}", task=f'passages(kind="{kind}")') for kind in _KINDS for step in _STEPS
    ),
    models={"": _ABLATION},
    measure=read_steps,
    orders=tuple(
        order
        for kind in _KINDS
        for order in (
            *across([f"{kind}, step {_STEPS[0]}"], _FULL, ">", _TUNED, "§3.5: a huge difference at the beginning"),
            *across(
                [f"{kind}, step {_STEPS[-1]}"], _TUNED, "~", _FULL, "§3.5: comparable after about 400 steps", within=2
            ),
            *across([f"{kind}, step {_STEPS[-1]}"], _TUNED, ">", _KEPT, _MIX),
        )
    ),
    remarks=(
        "Measured while `python examples/block_steps.py` trained; its steps.json holds every score.",
        "Rows are drawn in the full and in the block layout, so that the tuned model keeps its ordinary attention.",
    ),
)

_DOCUMENTATION, _WORLDS = "documentation", "two hops"
_ASKED = (_DOCUMENTATION, _WORLDS)
_PLAIN_FULL, _PLAIN_BLOCK, _TUNED_FULL, _TUNED_BLOCK = (
    f"{model}, {engine}" for model in ("untuned", "tuned") for engine in ("full", "block")
)
_PLAIN_SEARCHED = "untuned, APE, T and S searched"
_SINK = "the prefix is a sink for every chunk"
_SAME = {column: f"{column}, as full" for column in _ASKED}

REAL_1 = Table(
    name="real-1",
    title="The papers on a real model: SmolLM2-135M-Instruct, as published and tuned for blocks",
    follows="Block-Attention Table 1, APE Table 5, PCED Table 1, IPPD's losslessness",
    lines=(
        TableRow(label=_PLAIN_FULL, engine="full"),
        TableRow(label=_PLAIN_BLOCK, engine="block(over=prefixed)"),
        TableRow(label="untuned, block over standalone", engine="block(over=standalone)"),
        TableRow(label="untuned, block, no sink", engine="block(over=standalone, sink=none)"),
        TableRow(label="untuned, block, positions kept", engine="block(preset=no-positions)"),
        TableRow(label="untuned, APE, T = S = 1", engine="ape(temperature=1, scale=1)"),
        TableRow(label=_PLAIN_SEARCHED, engine="ape"),
        TableRow(label="untuned, PCED", engine="pced"),
        TableRow(label="untuned, IPPD", engine="ippd", same_as=_PLAIN_FULL),
        TableRow(label=_TUNED_FULL, engine="full", role="tuned"),
        TableRow(label=_TUNED_BLOCK, engine="block(over=prefixed)", role="tuned"),
        TableRow(label="tuned, APE, T = S = 1", engine="ape(temperature=1, scale=1)", role="tuned"),
        TableRow(label="tuned, PCED", engine="pced", role="tuned"),
        TableRow(label="tuned, IPPD", engine="ippd", role="tuned", same_as=_TUNED_FULL),
    ),
    columns=(
        Column(label=_DOCUMENTATION, task="benchmarks/training/debian/questions.jsonl", chunks=4),
        Column(label=_WORLDS, task='passages(kind="two hops")'),
        Column(
            label=_SAME[_DOCUMENTATION], task="benchmarks/training/debian/questions.jsonl", chunks=4, measure="same"
        ),
        Column(label=_SAME[_WORLDS], task='passages(kind="two hops")', measure="same"),
    ),
    models={"": "smollm2-plain", "tuned": "smollm2"},
    prepare=partial(with_searched_pair, lines=[_PLAIN_SEARCHED], chunks=8),
    orders=(
        *across(_ASKED, _PLAIN_FULL, ">", _PLAIN_BLOCK, "Block-Attention Table 1: 67.9 to 48.0 (Llama 3 8B)"),
        *across(_ASKED, _PLAIN_BLOCK, ">", "untuned, block over standalone", _SINK),
        *across(_ASKED, _PLAIN_BLOCK, ">", "untuned, block, no sink", _SINK),
        *across(
            _ASKED, "untuned, block over standalone", ">", "untuned, block, positions kept", "Table 1: 68.4 to 63.9"
        ),
        *across(_ASKED, _TUNED_BLOCK, "~", _TUNED_FULL, "Block-Attention Table 1: 68.4 to 67.9", within=2),
        *across(_ASKED, _TUNED_BLOCK, ">", _PLAIN_BLOCK, "Block-Attention Table 1: 68.4 to 48.0"),
        *across(_ASKED, _PLAIN_SEARCHED, ">=", "untuned, APE, T = S = 1", "APE Table 5"),
        *across([_WORLDS], "untuned, PCED", ">", "untuned, APE, T = S = 1", "PCED Table 1: 64 to 16 on HotpotQA"),
    ),
    limit=300,
    remarks=(
        "documentation: questions over Debian's manuals, 65 of 521 unanswerable, with the passage that answers among "
        "four; two hops: passages of fictional worlds. Neither was in the tuning data.",
        "as full: answers that are those of full attention letter by letter, which IPPD's should be.",
    ),
)


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


_APB_LINES = (
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
    values={line.label: (value,) for line, value in zip(_APB_LINES, _PRINTED, strict=True)},
)
_STANDS_FOR = {"reference": ("E.MC",)}

APB_3 = Table(
    name="apb-3",
    title="APB Table 3: anchor, passing, retaining heads and the query in the anchor",
    follows="APB Table 3",
    lines=(
        TableRow(label="full attention", engine=f"full({_PROMPT})"),
        *_APB_LINES,
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
