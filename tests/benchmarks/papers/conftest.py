import pytest

from ragkv.benchmarks.papers import BASELINES
from ragkv.util.plugins import ENGINES


@pytest.fixture(autouse=True)
def baselines(monkeypatch):
    """The engines of the tables, which other tests of this process must not see."""
    for name, entry in BASELINES.items():
        monkeypatch.setitem(ENGINES.added, name, entry)
