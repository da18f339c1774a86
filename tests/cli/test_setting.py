"""The user file, and which of five sources a value comes from."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from ragkv.cli.options import FLAGS, VARIABLES, UserFile, in_force, user_file
from ragkv.config import IndexConfig
from ragkv.errors import ConfigError

NONE = UserFile(path=Path("/none"), table={}, settings={})


def written(tmp_path: Path, text: str) -> UserFile:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return UserFile.read(path)


def origins(**more: Any) -> dict[str, tuple[Any, str]]:
    given: dict[str, Any] = {"flags": {}, "variables": {}, "user": NONE, "config": IndexConfig(), "index": None}
    given |= {"used": {"index": "ragkv-index", "device": None}} | more
    return {one.name: (one.value, one.origin) for one in in_force(**given)}


def test_where_the_user_file_is(monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/mine")
    assert user_file() == Path("/etc/mine/ragkv/config.toml")
    monkeypatch.setenv("HOME", "/home/ann")
    for value in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        assert user_file() == Path("/home/ann/.config/ragkv/config.toml")


def test_what_it_may_say(tmp_path):
    assert UserFile.read(tmp_path / "none.toml").settings == {}
    read = written(
        tmp_path, 'device = "cpu"\nmodel = "Qwen/Qwen3-4B"\nengines = ["ape"]\n[prompt]\nsystem = "Be brief."\n'
    )
    assert read.used("device") == "cpu"
    assert read.used("index") is None
    assert read.settings.keys() == {"model", "engines", "prompt"}
    assert (read.settings["engines"], read.settings["prompt"].system) == (("ape",), "Be brief.")
    # an embedder may come from the flag, so a mode that needs one is no mistake yet
    assert written(tmp_path, 'retrieval = "dense"').settings == {"retrieval": "dense"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("modle = 'x'", "unknown key 'modle'; remove it, or use one of"),
        ("[prompt]\nsytem = 'x'", "unknown key 'sytem'"),
        ("model = [", "not valid TOML"),
        ("model = 3", "model = 3 has the wrong type"),
        ("device = 0", "device = 0 must be a string"),
        ("index = ''", "index = '' must be a string that is not empty"),
        ("chunk_tokens = 2", "chunk_tokens must lie between"),
        ("retrieval = 'psychic'", "retrieval must be one of"),
        ("prompt = 'x'", "prompt must be a table"),
    ],
)
def test_a_mistake_in_it_is_one_sentence_that_names_the_file(tmp_path, text, says):
    with pytest.raises(ConfigError, match=r"config\.toml") as error:
        written(tmp_path, text)
    assert says in str(error.value)


def test_each_source_gives_way_to_the_one_before(tmp_path):
    user = written(tmp_path, 'device = "cuda"\ntop_k = 3\n')
    table = 'top_k = 5\n[prompt]\nsystem = "Short."\n'
    config = IndexConfig.from_toml(table)
    index = (tmp_path / "ragkv.toml", tomllib.loads(table))
    new = IndexConfig(**user.settings)

    assert origins()["top_k"] == (8, "default")
    assert origins(user=user, config=new)["top_k"] == (3, "file")
    assert origins(user=user, config=config, index=index)["top_k"] == (5, "index")
    chosen = {"user": user, "config": config, "index": index, "variables": {"top_k": 6}}
    assert origins(**chosen)["top_k"] == (6, "environment")
    assert origins(**chosen, flags={"top_k": 7})["top_k"] == (7, "flag")

    found = origins(user=user, config=config, index=index)
    assert found["prompt.system"] == ("Short.", "index")
    assert found["prompt.separator"] == ("\n\n", "default")
    assert found["device"] == ("cuda", "file")
    assert found["index"] == ("ragkv-index", "default")


def test_a_variable_does_not_overrule_what_an_index_was_built_with(tmp_path):
    index = (tmp_path / "ragkv.toml", {"model": "mini"})
    config = IndexConfig(model="mini")
    assert origins(variables={"model": "other"}, config=config, index=index)["model"] == ("mini", "index")
    other = IndexConfig(model="other")
    assert origins(variables={"model": "other"}, config=other)["model"] == ("other", "environment")


def test_the_user_file_says_nothing_of_an_index_that_exists(tmp_path):
    user = written(tmp_path, 'codec = "zstd"\n')
    index = (tmp_path / "ragkv.toml", {"model": "mini"})
    assert origins(user=user, index=index)["codec"] == ("raw", "default")


def test_every_variable_is_a_setting_with_an_option():
    names = {*IndexConfig.__slots__, "index", "device"}
    assert VARIABLES.keys() <= FLAGS.keys() <= names
    assert FLAGS["chunk_tokens"] == "--chunk-tokens"
    assert FLAGS["default_engine"] == "--engine"
