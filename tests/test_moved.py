"""The public API's old import paths and names still work, and the warning names the new ones."""

import sys
from collections.abc import Iterator
from importlib import import_module

import pytest

from ragkv._moved import MOVED
from ragkv.decoding import Decoding


@pytest.fixture(autouse=True)
def no_old_module_stays() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in {old.rpartition(".")[0] for old in MOVED} & (sys.modules.keys() - before):
        if sys.modules[name].__spec__.origin is None:
            del sys.modules[name]


def test_a_moved_name_is_the_new_one_with_a_warning():
    for old, new in MOVED.items():
        (old_module, _, old_name), (module, _, name) = old.rpartition("."), new.rpartition(".")
        with pytest.warns(DeprecationWarning, match=f"{old} is {new} now"):
            found = getattr(import_module(old_module), old_name)
        assert found is getattr(import_module(module), name), old


def test_an_old_name_of_a_member_is_the_new_one_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"Decoding\.heat is effective_temperature now"):
        assert Decoding(temperature=0.5).heat == 0.5


@pytest.mark.parametrize(
    "module", ["ragkv.engines", "ragkv.engines.program", "ragkv.ingest", "ragkv.store.environment"]
)
def test_a_name_that_never_was_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = import_module(module).nothing_like_it
