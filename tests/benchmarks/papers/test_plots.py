"""Plots show the figures, and the same figures give the same bytes."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ragkv.benchmarks.papers import plots
from ragkv.benchmarks.papers.plots import bar_picture, curve_picture, require_matplotlib, save, trace_picture
from ragkv.errors import MissingExtraError

CURVES = curve_picture(
    "Accuracy over steps",
    "fine-tuning steps",
    {
        "full": {0: (0.9, 0.8, 1.0), 10: (0.95, 0.9, 1.0), 200: (0.96, 0.9, 1.0)},
        "block": {0: (0.4, 0.3, 0.5), 200: (0.9, 0.8, 1.0)},
    },
    even=False,
)
BARS = bar_picture(
    "Bars", ["one hop", "two hops"], {"full": [(0.9, 0.8, 1.0), None], "ape": [(0.5, 0.4, 0.6), (0.25, 0.2, 0.3)]}
)
TRACE = trace_picture(
    "Trace",
    "Where was Mira Oskel born?",
    ["Mira Oskel", "Veldran"],
    {0},
    [("Mira", 0), (" was", 1), ("\n", None)] * 16,  # two lines
)


@pytest.mark.parametrize(
    ("drawn", "labels"),
    [
        (CURVES, {"Accuracy over steps", "fine-tuning steps", "right answers", "full", "block", "100%"}),
        (BARS, {"Bars", "one hop", "two hops", "ape", "90.0", "50.0", "25.0"}),
        (TRACE, {"Trace", "Mira Oskel", "Veldran", "Mira", "␣was", "⏎", "Question: Where was Mira Oskel born?"}),
    ],
    ids=["curves", "bars", "trace"],
)
def test_labels_and_the_command_below(drawn, labels, tmp_path):
    command = "python -m ragkv.benchmarks.papers block-4 --limit 3"
    files = save(drawn, tmp_path / "one.two", command=command, notes=["3 questions"])
    assert [path.name for path in files] == ["one.two.svg", "one.two.png"]
    assert files[1].read_bytes().startswith(b"\x89PNG")
    written = files[0].read_text(encoding="utf-8")
    ElementTree.fromstring(written)
    assert "<dc:date>" not in written
    assert {"3 questions", f"made by: {command}", *labels} <= said_in(written)
    assert len(list(tmp_path.iterdir())) == 2  # no partial files


def test_the_same_bytes_each_time(tmp_path):
    files, again = (save(CURVES, tmp_path / name, command="c") for name in ("one", "again"))
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in again]


def said_in(svg: str) -> set[str]:
    """The plot's texts: letters are drawn as paths, and a comment before each text contains it, with -- as - -."""
    return {
        line.strip().replace("- -", "--")
        for found in re.findall(r"<!--(.*?)-->", svg, re.DOTALL)
        for line in found.split("\n")
    }


def test_a_winner_that_is_no_expert_is_refused():
    with pytest.raises(ValueError, match="winner 2 is none of 2 experts"):
        trace_picture("", "", ["a", "b"], (), [("x", 2)])


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[plots\]'"):
        require_matplotlib()
    with pytest.raises(MissingExtraError):
        save(CURVES, tmp_path / "one", command="c")
