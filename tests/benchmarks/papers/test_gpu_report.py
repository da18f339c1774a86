"""The report of the papers' headline figures at a tiny size: a CPU, two layers, a few tokens."""

import itertools
import json

import pytest
import torch

from ragkv.benchmarks.papers import gpu_report
from ragkv.benchmarks.papers.gpu_report import TINY, Sizes, gpu_tests, make_report, measure
from ragkv.benchmarks.speed.batch import IPPDShape

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
    pytest.importorskip("matplotlib")
    written = make_report(tmp_path / "gpu", SMALL, TINY, 60.0, lambda: "1 skipped", lambda _: None)
    page = (tmp_path / "gpu" / "gpu.md").read_text()
    assert page.startswith("No GPU was used")
    assert "`pytest -m gpu`: 1 skipped" in page
    assert "26 against 50 ms" in page  # Table 2 at 512 tokens
    report = json.loads((tmp_path / "gpu" / "gpu.json").read_text())
    assert report["gpu"] is False
    assert not report["notes"]
    sections = [row["section"].partition(",")[0] for row in report["rows"]]
    assert {name: sections.count(name) for name in sections} == {
        "APB": 2,
        "APE": 2,
        "Block-Attention": 4,
        "IPPD": 4,
        "PCED": 3,
    }
    for row in (each["row"] for each in report["rows"]):
        better = row["value"] / row["baseline_value"] if "/s" in row["unit"] else row["baseline_value"] / row["value"]
        assert row["ratio"] == pytest.approx(better, rel=0.1, abs=0.01)
    assert all(path.exists() for path in written)
    assert f"![{report['rows'][4]['section']}](gpu-2.svg)" in page


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


def test_the_tests_that_need_a_gpu_run_in_a_process_of_their_own(monkeypatch):
    class Done:
        stdout, stderr = "x\nFAILED tests/a.py\n1 failed in 2s\n", ""

    asked = []
    monkeypatch.setattr(gpu_report.subprocess, "run", lambda command, **_: asked.extend(command) or Done)
    assert gpu_tests() == "1 failed in 2s; FAILED tests/a.py"
    assert asked[asked.index("-q") + 1 :][:2] == ["-m", "gpu"]
    assert any(each.endswith("test_partial.py") for each in asked)
