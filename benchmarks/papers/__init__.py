"""The papers' tables."""

from importlib.metadata import EntryPoint

from ragkv.util.plugins import ENGINES

# a baseline of PCED's tables, which nobody would ask by: no engine of the installed package
ENGINES.added["mapreduce"] = EntryPoint("mapreduce", "ragkv.benchmarks.papers.mapreduce:MapReduce", "ragkv.engines")
