"""The papers' tables."""

from importlib.metadata import EntryPoint

from ragkv.util.plugins import ENGINES

BASELINES = {"mapreduce": EntryPoint("mapreduce", "ragkv.benchmarks.papers.mapreduce:MapReduce", "ragkv.engines")}
"""Engines of PCED's tables, which nobody would ask by: the installed package has none of them."""


def add_baselines() -> None:
    """Make the baselines known by name in this process."""
    ENGINES.added.update(BASELINES)
