"""examples/variable_model.py: what its rows teach, and the table that its model and heads fill."""

from __future__ import annotations

import random
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ragkv.benchmarks.papers import TABLES, RunOptions, run_table
from ragkv.model.checkpoint import HEADS
from ragkv.worlds.variable import BEGIN, TERM, Line, asked, variable_list

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
        told, said = words(script, ids), words(script, labels)
        assert len(told) == len(said)
        assert (said[-2], said[-1]) == (told[-1], script.END)
        begin = told.index(BEGIN) + 1
        end = next(at for at in range(begin, len(told)) if told[at].startswith("?"))
        lines = [(Line(told[at], told[at + 1], ""), said[at + 1]) for at in range(begin, end, 3)]
        assert said[begin:end:3] == said[begin + 2 : end : 3] == [""] * len(lines)
        both.add(begin)
        if begin == 1:  # no question before the list: every reference is named, whoever is asked for
            assert all((value == "") == line.content.isdigit() for line, value in lines)
        else:
            assert told[0] == told[-2]
            wanted = Line(told[0][1:], "", "")
            assert all((value == script.OTHER) == (line.family not in (wanted.family, TERM)) for line, value in lines)
            assert [value for line, value in lines if line.name == wanted.name] == [told[-1]]
    assert both == {1, 2}


def test_rows_of_a_batch_are_filled_up(script):
    ids, labels = script.batch(random.Random(0), 12, 96)
    assert ids.shape == labels.shape
    assert ids.shape[0] == 12
    assert (labels[ids == script.IDS[script.PAD]] == script.SILENT).all()
    assert len({row.index(script.IDS[BEGIN]) for row in ids.tolist()}) == 2  # with the question before, and without


def test_layer_0_flags_what_the_question_is_about(script):
    """Before any training, what the flag says tells lines of the asked family from others, if the question is first."""
    model = script.new_model().eval()
    flag = model.model.layers[0].mlp.down_proj.weight[:, 0]
    heard = []
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: heard.append(out[0] @ flag / flag.norm() ** 2))
    own, others = [], []
    for seed in range(10):
        drawn = variable_list(random.Random(seed), 60)
        wanted = random.Random(seed).choice(drawn.known)
        told = [asked(wanted.name), *" ".join(drawn.texts()).split()]
        with torch.inference_mode():
            model(input_ids=torch.tensor([[script.IDS[word] for word in told]]))
        for at, line in zip(range(3, len(told), 3), drawn.lines, strict=True):
            (own if line.family == wanted.family else others).append(heard[-1][at].item())
    assert len(own) > 50
    assert sum(own) / len(own) > sum(others) / len(others) + 3 * torch.tensor(others).std() / len(own) ** 0.5


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
