"""Pictures of what was measured: lines with bands, grouped bars, and who won the tokens of an answer."""

from ragkv.evaluation.plot.bar import Bar, Bars
from ragkv.evaluation.plot.curve import Curve, Curves
from ragkv.evaluation.plot.picture import OTHER_FOLDER, Picture, require_matplotlib, save
from ragkv.evaluation.plot.trace import Trace

__all__ = ["OTHER_FOLDER", "Bar", "Bars", "Curve", "Curves", "Picture", "Trace", "require_matplotlib", "save"]
