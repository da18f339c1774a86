"""The figures of `blend-1` and `blend-2` equal the evaluation's own comparison with full attention."""

import json
from dataclasses import replace
from statistics import fmean

import pytest

from ragkv.benchmarks.evaluation.answers import TaskSource
from ragkv.benchmarks.papers import blend
from ragkv.benchmarks.papers.blend import BLEND_1, BLEND_2
from ragkv.benchmarks.papers.run import RunOptions, run_table, to_markdown
from ragkv.doctor.compare import Comparer

KEPT = ("full", "block over standalone", "block", "question, 0.30", "random, 0.30", "block, context")


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(blend, "FORCED", 4)


def few(table):
    return replace(
        table,
        lines=tuple(line for line in table.lines if line.label in KEPT),
        orders=tuple(order for order in table.orders if {order.left.line, order.right.line} <= set(KEPT)),
    )


def test_lines_that_are_led_together_are_those_that_are_led_alone(model_folder, tmp_path):
    columns = tuple(replace(column, task="icl(shots=1)", chunks=3) for column in BLEND_2.columns)
    table = replace(few(BLEND_2), columns=columns)
    options = RunOptions(models={"": str(model_folder)}, limit=3, seed=5, work=tmp_path)
    result = run_table(table, options)
    task = result.tasks["right"]
    candidates = [line.candidate(str(model_folder), None) for line in table.lines]
    source, kl = TaskSource(), {}

    def request_of(candidate, example):
        backend, asked = source.ask(candidate, example)
        chunks = backend.find(asked, lambda _: None)[::-1]
        return asked.engine, backend.request(asked, backend.plan(asked.engine, chunks), None, [])[0]

    model = source.model(str(model_folder)).model
    comparer = Comparer(model, max_new_tokens=blend.FORCED)
    references = [comparer.answer(*request_of(candidates[0], example)) for example in task.examples]
    for line, candidate in zip(table.lines[1:], candidates[1:], strict=True):
        asked = [request_of(candidate, example) for example in task.examples]
        own = [comparer.along(*one, reference)[0] for one, reference in zip(asked, references, strict=True)]
        kl[line.label] = fmean(fmean(comparison.kl) for comparison in own)
        agreed = fmean(fmean(comparison.agreed) for comparison in own)
        assert result.figure(line.label, "same choice").value == pytest.approx(agreed)
        charges = [engine.charge(request, model) for engine, request in asked]
        if charges[0] is not None:
            assert result.figure(line.label, "charge").value == pytest.approx(fmean(charges))
    for label, value in kl.items():
        assert result.figure(label, "gap recovered").value == pytest.approx(1 - value / kl["block"], abs=1e-3)
    assert result.figure("full", "gap recovered").value == pytest.approx(1.0)
    assert result.figure("full", "first token").value == pytest.approx(1.0)

    again = run_table(table, options)  # nothing is computed twice
    assert again.cells == result.cells
    text = to_markdown(result)
    assert "- gap recovered: 3 questions of `icl(shots=1)`, 3 chunks, share of the KL" in text
    assert "| random, 0.30 |" in text


def test_chunks_of_the_documentation_come_from_an_index(tmp_path, monkeypatch):
    folder = tmp_path / "documentation"
    (folder / "documents").mkdir(parents=True)
    for name in ("pumps", "valves"):
        text = " ".join(
            f"Sentence {number} of {name} says that part {number} is made of brass." for number in range(40)
        )
        (folder / "documents" / f"{name}.md").write_text(f"# {name}\n\n{text}\n", encoding="utf-8")
    rows = [
        {
            "question": f"What is part {number} of the {name} made of?",
            "answers": ["brass"],
            "chunks": ["-"],
            "kind": kind,
        }
        for number, name, kind in ((3, "pumps", "written"), (30, "valves", "written"), (99, "pumps", "unanswerable"))
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setattr(blend, "DOCUMENTATION", folder)
    result = run_table(few(BLEND_1), RunOptions(dtype="float32"))
    assert {figure.n for figure in result.cells.values()} == {2}
    assert result.figure("block, context", "gap recovered").value != 0
    assert result.origin.models[""].dtype == "float32"
