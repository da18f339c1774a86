"""Pictures of what was measured: lines with bands, grouped bars, and who won the tokens of an answer."""

from ragkv.benchmarks.papers.plot.bar import Bar, Bars
from ragkv.benchmarks.papers.plot.curve import Curve, Curves
from ragkv.benchmarks.papers.plot.picture import OTHER_FOLDER, Picture, require_matplotlib, save
from ragkv.benchmarks.papers.plot.trace import Trace

__all__ = ["OTHER_FOLDER", "Bar", "Bars", "Curve", "Curves", "Picture", "Trace", "require_matplotlib", "save"]
