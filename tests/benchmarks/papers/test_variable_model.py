"""examples/variable_model.py: what its training rows teach, and the table of its model and heads."""

import random
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragkv.benchmarks.evaluation.worlds.text import BEGIN, TERM, VariableLine
from ragkv.benchmarks.papers.run import TABLES, RunOptions, run_table
from ragkv.model.checkpoint import HEADS

SCRIPT = Path(__file__).parents[3] / "examples" / "variable_model.py"


@pytest.fixture(scope="module")
def script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def words(script: SimpleNamespace, ids: list[int]) -> list[str]:
    return ["" if number == script.SILENT else script.WORDS[number] for number in ids]


def test_rows_name_the_values_of_references_as_they_are_read(script):
    both = set()
    for seed in range(20):
        ids, labels = script.row(random.Random(seed), 192)
        payload, message = words(script, ids), words(script, labels)
        assert len(payload) == len(message)
        assert (message[-2], message[-1]) == (payload[-1], script.END)
        begin = payload.index(BEGIN[-1]) + 1
        end = next(at for at in range(begin, len(payload)) if payload[at].startswith("?"))
        lines = [(VariableLine(payload[at], payload[at + 1], ""), message[at + 1]) for at in range(begin, end, 2)]
        assert message[begin:end:2] == [""] * len(lines)
        both.add(begin)
        if begin == 2:  # without a question before the list, all references are labelled
            assert all((value == "") == line.content.isdigit() for line, value in lines)
        else:
            assert payload[0] == payload[-2]
            wanted = VariableLine(payload[0][1:], "", "")
            assert all((value == script.OTHER) == (line.family not in (wanted.family, TERM)) for line, value in lines)
            assert [value for line, value in lines if line.name == wanted.name] == [payload[-1]]
    assert both == {2, 3}


def test_the_table_has_blocks_of_the_papers_proportions():
    table = TABLES["apb-3"]
    [paper] = table.paper
    options = {line.label: line.candidate("mini", None).options for line in table.lines}
    block, anchor, passing = (options["APB"][name] for name in ("block", "anchor", "passing"))
    assert (4 * anchor, 8 * passing) == (block, block)  # §4.1
    for column in table.columns:
        sizes = Counter(
            -(-len(" ".join(example.chunks).split()) // block) for example in column.make(seed=0, limit=20).examples
        )
        assert sizes == {8: 20}
    for label in paper.values:
        option = options[label]
        assert option["question"] == (label in ("APB", "random", "no passing"))
        assert option["compressor"] == ("random" if "random" in label else "heads")
        assert (option["anchor"] == 0) == ("no anchor" in label)
        assert (option["passing"] == 0) == ("no passing" in label)


@pytest.mark.nightly
def test_a_short_training_is_a_model_that_fills_the_table(script, tmp_path, monkeypatch):
    folder = tmp_path / "variables"
    few = {"STAGES": ((64, 2),), "HEAD_ROWS": 4, "HEAD_STEPS": 2, "HEAD_WORDS": 60}
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
