"""The registry of plug-ins: names, duplicates, and packages that cannot be imported."""

import logging
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from ragkv.engines import engine_class, engine_names
from ragkv.engines.full import FullAttention
from ragkv.errors import ConfigError, MissingExtraError
from ragkv.util import plugins
from ragkv.util.plugins import PluginRegistry

Installed = Callable[..., PluginRegistry]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """A registry with packages that add `(name, value)`s; their modules are in `tmp_path`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(*added: tuple[str, str], **options: object) -> PluginRegistry:
        points = [EntryPoint(name, value, "ragkv.things") for name, value in added]
        monkeypatch.setattr(plugins, "entry_points", lambda group: [point for point in points if point.group == group])
        return PluginRegistry("ragkv.things", **options)  # type: ignore[arg-type]

    return make


def test_names_are_of_the_group_alone(installed, caplog):
    things = installed(("b", "math:sqrt"), ("a", "math:pi"), built_in={"c": "math:tau"})
    assert things.names() == ["a", "b", "c"]
    assert "a" in things
    assert "c" in things
    assert "d" not in things
    assert things.load("b")(9) == 3
    with pytest.raises(KeyError):
        things.load("d")
    assert PluginRegistry("ragkv.nothing").names() == []
    things = installed(("one", "math:pi"), built_in={"one": "math:tau"})
    assert things.names() == ["one"]
    assert things.load("one") > 6
    assert installed(("x", "ape:x"), ("x", "ape:x")).names() == ["x"]
    assert not caplog.records


def test_of_two_with_one_name_ours_is_used_and_a_warning_names_the_other(installed, caplog):
    things = installed(("x", "zebra:x"), ("x", "ape:x"), ("y", "ape:y"), ("y", "ragkv.errors:UsageError"))
    assert {name: entry.value for name, entry in things.added.items()} == {"x": "ape:x", "y": "ragkv.errors:UsageError"}
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "two things for x: ape:x is used, not zebra:x" in caplog.text
    assert "two things for y: ragkv.errors:UsageError is used, not ape:y" in caplog.text


def test_names_may_be_spelt_in_several_ways(installed, caplog):
    things = installed(("A", "math:pi"), ("a", "math:tau"), key=str.lower)
    assert things.names() == ["a"]
    assert things.added["a"].value == "math:pi"
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:x", "No module named 'no_such_module'"),
        ("math:no_such_name", "no_such_name"),
        ("broken_plugin:x", "SyntaxError"),
    ],
)
def test_whatever_is_wrong_in_loading_is_an_import_error(installed, tmp_path, value, message):
    (tmp_path / "broken_plugin.py").write_text("def\n")
    with pytest.raises(ImportError, match=message):
        installed(("x", value)).load("x")


def test_an_error_that_says_what_to_do_is_kept(installed, tmp_path):
    (tmp_path / "extra_plugin.py").write_text(
        "from ragkv.errors import MissingExtraError\nraise MissingExtraError('pip install boiler')\n"
    )
    with pytest.raises(MissingExtraError, match="boiler"):
        installed(("x", "extra_plugin:x")).load("x")


def test_an_engine_that_cannot_be_imported_is_one_sentence(tmp_path, monkeypatch, caplog):
    """In a package that declares it in its metadata, as pip installs one."""
    metadata = tmp_path / "theirs-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[ragkv.engines]\nbroken = no_such_module:Engine\nfull = theirs:Full\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("ragkv.engines.base", "ragkv.util.plugins"):
        monkeypatch.setattr(f"{module}.ENGINES", PluginRegistry("ragkv.engines"))
    assert "broken" in engine_names()
    assert engine_class("full") is FullAttention  # ragkv's own is used
    with pytest.raises(ConfigError, match=r"Engine 'broken' is installed but cannot be loaded \(No module named"):
        engine_class("broken")
    assert "two engines for full: ragkv.engines.full:FullAttention is used, not theirs:Full" in caplog.text
