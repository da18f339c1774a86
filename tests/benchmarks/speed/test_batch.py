"""`ragkv bench ippd` compares equal work."""

import pytest

from ragkv.benchmarks.speed import batch
from ragkv.benchmarks.speed.batch import (
    SHAPES,
    IPPDShape,
    by_cache,
    by_generate,
    by_ippd,
    context_caches,
    measure_ippd,
    work_of,
)
from ragkv.runtime import Runtime

SMALL = IPPDShape(
    number=2, name="small", instruction=5, context=9, question=4, answer=3, contexts=2, questions=(2, 3), batches=(2, 4)
)


@pytest.fixture
def model(make_model, monkeypatch):
    """A model whose answers all have the same length."""
    made = make_model("llama")
    monkeypatch.setattr(made.module.generation_config, "eos_token_id", None)
    monkeypatch.setattr(made, "eos_ids", frozenset())
    return made


def test_all_candidates_give_the_same_answers(model):
    work, runtime = work_of(SMALL, 300), Runtime(model)
    found = by_ippd(work, runtime)
    assert [len(ids) for ids in found] == [3] * 5
    assert by_ippd(work, runtime) == found
    assert by_generate(model, work, 2) == found
    assert by_generate(model, work, 5) == found
    caches = context_caches(model, work)
    assert by_cache(model, work, caches) == found
    assert by_cache(model, work, caches) == found


def test_every_figure_stands_beside_its_baseline(model, monkeypatch):
    monkeypatch.setattr(batch, "random_llama", lambda *_: model)
    message = []
    report = measure_ippd(shapes=(SMALL,), rounds=1, device="cpu", on_step=message.append).to_json()
    assert report["bench"] == "ippd"
    assert [row["name"] for row in report["rows"]] == [
        "shape 2 vs generate",
        "shape 2 vs prefix cache",
        "shape 2, contexts ready, against generate",
        "shape 2, contexts ready, against prefix cache",
    ]
    for row in report["rows"]:
        assert row["ratio"] == pytest.approx(row["value"] / row["baseline_value"], rel=0.05, abs=0.01)
    assert any("2 or 3 questions" in line for line in message)


def test_a_quick_run_is_smaller_and_says_its_scale():
    for shape in SHAPES:
        short = shape.shorter()
        assert (short.number, short.question, short.questions) == (shape.number, shape.question, shape.questions)
        assert len(short.batches) == 1
        assert short.context * short.divisor == pytest.approx(shape.context * shape.divisor, rel=0.01)
    assert "1/8 of the paper's" in str(SHAPES[3].shorter())
