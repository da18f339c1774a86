"""examples/variable_model.py: what its rows teach, and the table that its model and heads fill."""

from __future__ import annotations

import random
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragkv.benchmarks.papers import TABLES, RunOptions, run_table
from ragkv.model.checkpoint import HEADS
from ragkv.worlds.variable import ASK, BEGIN, family_of

SCRIPT = Path(__file__).parents[3] / "examples" / "variable_model.py"


@pytest.fixture(scope="module")
def script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def words(script: SimpleNamespace, ids: list[int]) -> list[str]:
    return ["" if number == script.SILENT else script.WORDS[number] for number in ids]


def test_rows_name_the_values_of_references_as_they_are_read(script):
    for seed in range(20):
        ids, labels = script.row(random.Random(seed), 256, 4)
        told, said = words(script, ids), words(script, labels)
        assert len(told) == len(said)
        assert (said[-2], said[-1]) == (told[-1], script.END)
        begin = told.index(BEGIN) + 3
        end = told.index(ASK, begin)
        lines = [(told[at], told[at + 1], said[at + 1]) for at in range(begin, end, 3)]
        assert said[begin:end:3] == said[begin + 2 : end : 3] == [""] * len(lines)
        if begin == 3:  # no question before the list: every reference is named, whoever is asked for
            assert all((value == "") == content.isdigit() for _, content, value in lines)
        else:
            assert told[:2] == told[-3:-1]
            asked = family_of(told[1])
            assert all((value == script.OTHER) == (family_of(name) != asked) for name, _, value in lines)
            assert told[-1] in {value for name, _, value in lines if name == told[1]}


def test_rows_of_a_batch_are_filled_up(script):
    ids, labels = script.batch(random.Random(0), 12, 96, 1)
    assert ids.shape == labels.shape
    assert ids.shape[0] == 12
    assert (labels[ids == script.IDS[script.PAD]] == script.SILENT).all()
    assert len({row.index(script.IDS[BEGIN]) for row in ids.tolist()}) == 2  # with the question before, and without


def test_the_table_has_blocks_of_the_papers_proportions():
    table = TABLES["apb-3"]
    [paper] = table.paper
    options = {line.label: line.contender("mini", None).options for line in table.lines}
    block, anchor, passing = (options["APB"][name] for name in ("block", "anchor", "passing"))
    assert (4 * anchor, 8 * passing) == (block, block)  # §4.1
    for column in table.columns:
        sizes = Counter(
            -(-len(" ".join(example.chunks).split()) // block) for example in column.make(seed=0, limit=20).examples
        )
        assert sizes == {8: 20}
    for label in paper.values:
        one = options[label]
        assert one["question"] == (label in ("APB", "random", "no passing"))
        assert one["compressor"] == ("random" if "random" in label else "heads")
        assert (one["anchor"] == 0) == ("no anchor" in label)
        assert (one["passing"] == 0) == ("no passing" in label)


@pytest.mark.slow
def test_a_short_training_is_a_model_that_fills_the_table(script, tmp_path, monkeypatch):
    folder = tmp_path / "variables"
    few = {"STAGES": ((64, 2, 1),), "HEAD_ROWS": 4, "HEAD_STEPS": 2, "HEAD_WORDS": 60}
    for name, value in few.items():
        monkeypatch.setitem(script.main.__globals__, name, value)
    monkeypatch.setattr(sys, "argv", ["variable_model.py", "--output", str(folder)])
    script.main()
    assert (folder / "model.safetensors").stat().st_size < 4 << 20
    assert (folder / HEADS).exists()
    table = TABLES["apb-3"]
    result = run_table(table, RunOptions(models={"": str(folder)}, limit=1))
    assert len(result.cells) == len(table.lines) * len(table.columns)
    assert all(figure.n == 1 for figure in result.cells.values())
