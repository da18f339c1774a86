"""The report of the papers' headline figures at a tiny size: a CPU, two layers, a few tokens."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from ragkv.benchmarks.papers.gpu_report import TINY, Sizes, make_report, measure
from ragkv.benchmarks.papers.speed import SHAPES, IPPDShape, by_cache, by_generate, by_ippd, context_caches, work_of
from ragkv.runtime import Runtime

SMALL = Sizes(
    block=(50, 512),
    ape=(300,),
    generated=3,
    document=40,
    experts=(1, 3),
    end_to_end=3,
    answer=4,
    ippd=(
        IPPDShape(
            number=3, name="s", instruction=4, context=9, question=4, answer=2, contexts=2, questions=(2,), batches=(2,)
        ),
    ),
    apb=(256,),
    rounds=1,
)


def test_every_paper_has_rows_and_the_first_line_says_that_no_gpu_was_used(tmp_path):
    written = make_report(tmp_path / "gpu", SMALL, TINY, 60.0, lambda _: None)
    page = (tmp_path / "gpu" / "gpu.md").read_text()
    assert page.startswith("No GPU was used")
    assert "26 against 50 ms" in page  # Table 2 at 512 tokens
    report = json.loads((tmp_path / "gpu" / "gpu.json").read_text())
    assert report["gpu"] is False
    assert not report["notes"]
    sections = [row["section"].partition(",")[0] for row in report["rows"]]
    assert {name: sections.count(name) for name in sections} == {
        "APB": 2,
        "APE": 2,
        "Block-Attention": 2,
        "IPPD": 4,
        "PCED": 3,
    }
    for row in (each["row"] for each in report["rows"]):
        better = row["value"] / row["baseline_value"] if "/s" in row["unit"] else row["baseline_value"] / row["value"]
        assert row["ratio"] == pytest.approx(better, rel=0.1, abs=0.01)
    assert all(path.exists() for path in written)


def test_what_has_no_time_left_is_named_and_what_fails_does_not_stop_the_rest():
    clock = itertools.count()  # each reading is a second later

    def fails():
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    todo = [("a", 10, list), ("a", 1000, list), ("b", 10, fails), ("b", 10, list)]
    rows, notes = measure(todo, 30.0, lambda _: None, clock=lambda: next(clock))
    assert rows == []
    assert notes == [
        "a: 1000 tokens were skipped, because the time was up.",
        "b: 10 tokens failed: OutOfMemoryError: CUDA out of memory",
    ]


def test_all_ways_to_answer_about_common_contexts_give_the_same_answers(make_model, monkeypatch):
    model = make_model("llama")
    monkeypatch.setattr(model.module.generation_config, "eos_token_id", None)
    monkeypatch.setattr(model, "eos_ids", frozenset())
    shape = replace(SMALL.ippd[0], questions=(2, 3), answer=3)
    work, runtime = work_of(shape, 300), Runtime(model)
    answers = by_ippd(work, runtime)
    assert [len(ids) for ids in answers] == [3] * 5
    assert by_ippd(work, runtime) == answers
    assert by_generate(model, work, 2) == answers
    caches = context_caches(model, work)
    assert by_cache(model, work, caches) == by_cache(model, work, caches) == answers
    assert all(one.shorter().context < one.context for one in SHAPES)
