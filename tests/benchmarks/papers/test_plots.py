"""Plots show the figures, and the same figures give the same bytes."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ragkv.benchmarks.papers import plots
from ragkv.benchmarks.papers.plots import Bar, Bars, Curve, Curves, TokenTracePicture, require_matplotlib, save
from ragkv.errors import MissingExtraError

CURVES = Curves(
    title="Accuracy over steps",
    x_label="fine-tuning steps",
    curves=[
        Curve(label="full", x=(0, 10, 200), y=(0.9, 0.95, 0.96), low=(0.8, 0.9, 0.9), high=(1.0, 1.0, 1.0)),
        Curve(label="block", x=(0, 200), y=(0.4, 0.9), low=(0.3, 0.8), high=(0.5, 1.0)),
    ],
)
BARS = Bars(
    title="Bars",
    groups=["one hop", "two hops"],
    bars=[
        Bar(label="full", values=[0.9, None], intervals=[(0.8, 1.0), None]),
        Bar(label="ape", values=[0.5, 0.25], intervals=[(0.4, 0.6), None]),
    ],
)
TRACE = TokenTracePicture(
    title="Trace",
    question="Where was Mira Oskel born?",
    experts=["Mira Oskel", "Veldran"],
    gold={0},
    tokens=[("Mira", 0), (" was", 1), ("\n", None)] * 16,  # two lines
)


@pytest.mark.parametrize(
    ("drawn", "labels"),
    [
        (CURVES, {"fine-tuning steps", "right answers", "full", "block", "100%"}),
        (BARS, {"one hop", "two hops", "ape", "90.0", "50.0", "25.0"}),
        (TRACE, {"Mira Oskel", "Veldran", "Mira", "␣was", "⏎", "Question: Where was Mira Oskel born?"}),
    ],
    ids=lambda one: type(one).__name__,
)
def test_labels_and_the_command_below(drawn, labels, tmp_path):
    command = "python -m ragkv.benchmarks.papers block-4 --limit 3"
    files = save(drawn, tmp_path / "one.two", command=command, notes=["3 questions"])
    assert [path.name for path in files] == ["one.two.svg", "one.two.png"]
    assert files[1].read_bytes().startswith(b"\x89PNG")
    written = files[0].read_text(encoding="utf-8")
    ElementTree.fromstring(written)
    assert "<dc:date>" not in written
    assert {drawn.title, "3 questions", f"made by: {command}", *labels} <= said_in(written)
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


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="2 values of high for 1 of x"):
        Curve(label="c", x=[1], y=[0.5], low=[0.4], high=[0.6, 0.7])
    with pytest.raises(ValueError, match="0 intervals for 1 values"):
        Bar(label="b", values=[0.1], intervals=[])
    with pytest.raises(ValueError, match="winner 2 is none of 2 experts"):
        TokenTracePicture(title="", question="", experts=["a", "b"], gold=(), tokens=[("x", 2)])


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[plots\]'"):
        require_matplotlib()
    with pytest.raises(MissingExtraError):
        save(CURVES, tmp_path / "one", command="c")
