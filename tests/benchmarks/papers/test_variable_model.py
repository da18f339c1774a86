"""examples/variable_model.py: what its rows teach, and the table that its model and heads fill."""

from __future__ import annotations

import json
import random
import runpy
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ragkv.benchmarks.papers.run import TABLES, RunOptions, run_table
from ragkv.model.checkpoint import HEADS
from ragkv.worlds.text import BEGIN, TERM, VariableLine, asked, referred, variable_list

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
        if begin == 2:  # no question before the list: every reference is named, whoever is asked for
            assert all((value == "") == line.content.isdigit() for line, value in lines)
        else:
            assert payload[0] == payload[-2]
            wanted = VariableLine(payload[0][1:], "", "")
            assert all((value == script.OTHER) == (line.family not in (wanted.family, TERM)) for line, value in lines)
            assert [value for line, value in lines if line.name == wanted.name] == [payload[-1]]
    assert both == {2, 3}


def test_rows_of_a_batch_are_filled_up(script):
    ids, labels = script.batch(random.Random(0), 12, 96)
    assert ids.shape == labels.shape
    assert ids.shape[0] == 12
    assert (labels[ids == script.IDS[script.PAD]] == script.SILENT).all()
    assert len({row.index(script.IDS[BEGIN[0]]) for row in ids.tolist()}) == 2  # with the question before, and without


def test_the_second_loss_is_about_lines_of_the_family_that_is_asked_first(script):
    """It is small for an output that says so at the contents of its lines, and large for one that says the opposite."""
    ids, labels = script.batch(random.Random(1), 12, 96)
    own = torch.zeros_like(ids, dtype=torch.bool)
    for at, row in enumerate(ids.tolist()):
        payload = [script.WORDS[number] for number in row]
        if payload[0].startswith("?"):
            family = VariableLine(payload[0][1:], "", "").family
            own[at, 1:] = torch.tensor([VariableLine(name, "", "").family == family for name in payload[:-1]])
    assert own.any()
    readout = torch.nn.Linear(2, 1)
    with torch.no_grad():
        readout.weight[0] = torch.tensor([8.0, -8.0])
        readout.bias.zero_()
    hidden = torch.stack([own.float(), (~own).float()], -1)
    right, wrong = (script.family_loss(readout, each, ids, labels).item() for each in (hidden, hidden.flip(-1)))
    assert right < 0.01 < 5 < wrong
    plain = torch.tensor([row[0] == script.IDS[BEGIN[0]] for row in ids.tolist()])
    assert script.family_loss(readout, hidden[plain], ids[plain], labels[plain]).item() == 0


def test_the_first_layer_flags_what_the_question_is_about_before_any_training(script):
    model = script.new_model().eval()
    readout = script.new_readout(model)
    own, others = [], []
    for seed in range(10):
        drawn = variable_list(random.Random(seed), 60)
        wanted = random.Random(seed).choice(drawn.known)
        payload = [asked(wanted.name), *" ".join(drawn.texts()).split()]
        with torch.inference_mode():
            ids = torch.tensor([[script.IDS[word] for word in payload]])
            says = readout(model(input_ids=ids, output_hidden_states=True).hidden_states[1])[0, :, 0]
        for at, line in zip(range(4, len(payload), 2), drawn.lines, strict=True):
            if line.family != TERM:
                (own if line.family == wanted.family else others).append(says[at].item())
    higher = sum(one > other for one in own for other in others) / (len(own) * len(others))
    assert higher > 0.6  # of pairs; a chance would be 0.5


def test_lessons_ask_about_one_family_or_go_on_with_references_of_all(script, tmp_path, monkeypatch):
    monkeypatch.setitem(script.write_lessons.__globals__, "HEAD_ROWS", 6)
    script.write_lessons(tmp_path / "lessons.jsonl")
    lessons = [json.loads(line) for line in (tmp_path / "lessons.jsonl").read_text().splitlines()]
    assert len(lessons) == 6
    for number, lesson in enumerate(lessons):
        [document], message = lesson["documents"], lesson["messages"][1]["content"].split()
        payload = dict(zip(message[::2], message[1::2], strict=True))
        families = {
            VariableLine(name.lstrip("?="), "", "").family for name in (payload if number % 2 else payload.values())
        }
        if number % 2:
            assert {VariableLine(document.split()[0].lstrip("?"), "", "").family} == families
            stands: dict[str, str] = {}
            words_of = document.split()[1 + len(BEGIN) :]
            for name, content in zip(words_of[::2], words_of[1::2], strict=True):
                stands.setdefault(name, stands.get(content.removeprefix("="), content))
            assert payload == {name: stands[name.removeprefix("?")] for name in payload}
        else:
            assert document.startswith(" ".join(BEGIN))
            assert len(families) > 5
            assert all(value == referred(value[1:]) for value in payload.values())


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
        one = options[label]
        assert one["question"] == (label in ("APB", "random", "no passing"))
        assert one["compressor"] == ("random" if "random" in label else "heads")
        assert (one["anchor"] == 0) == ("no anchor" in label)
        assert (one["passing"] == 0) == ("no passing" in label)


def test_the_model_of_the_repository_has_learned_its_lists(monkeypatch):
    monkeypatch.chdir(SCRIPT.parents[1])
    whole = TABLES["apb-3"]
    lines = tuple(line for line in whole.lines if line.label in ("full attention", "APB", "no anchor, no passing"))
    result = run_table(replace(whole, lines=lines, orders=()), RunOptions(limit=12))
    full, apb, alone = ([result.figure(line.label, column.label).value for column in whole.columns] for line in lines)
    assert full == [1, 1]
    assert min(apb) >= 0.75
    assert alone[1] <= 0.5


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
