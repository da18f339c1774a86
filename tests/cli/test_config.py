"""`ragkv config`, and that what it says is what the other commands do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragkv import RagKV
from ragkv.cli.options import VARIABLES
from ragkv.config import load_config


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody's variables, and a user file that is not there yet; its path."""
    for name in VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home" / "ragkv").mkdir(parents=True)
    return tmp_path / "home" / "ragkv" / "config.toml"


@pytest.fixture
def empty(tmp_path: Path, model_folder: Path) -> Path:
    """An index of nothing."""
    RagKV.create(tmp_path / "empty", model=str(model_folder), codec="zstd").close()
    return tmp_path / "empty"


def result(ragkv: Callable[..., Any], *arguments: object) -> dict[str, tuple[Any, str]]:
    ran = ragkv("config", "show", "--json", *arguments)
    assert ran.code == 0, ran.err
    return {one["name"]: (one["value"], one["origin"]) for one in json.loads(ran.out)["settings"]}


def test_path(ragkv, own_file):
    found = ragkv("config", "path")
    assert (found.code, found.out) == (0, f"{own_file}\n")
    assert "does not exist yet" in found.err
    own_file.write_text("modle = 1")  # must be found even then
    assert json.loads(ragkv("config", "path", "--json").out) == {"path": str(own_file), "exists": True}


def test_what_it_says_of_a_new_index_is_what_ingest_makes(ragkv, own_file, monkeypatch, tmp_path, model_folder):
    own_file.write_text('codec = "zstd"\nchunk_tokens = 64\nengines = ["block"]\n[prompt]\nsystem = "Be brief."\n')
    monkeypatch.setenv("RAGKV_CHUNK_TOKENS", "96")
    monkeypatch.setenv("RAGKV_ENGINES", "ape,block")
    monkeypatch.setenv("RAGKV_INDEX", str(tmp_path / "new"))
    found = result(ragkv, "--model", model_folder, "--engines", "ape")
    assert found["model"] == (str(model_folder), "flag")
    assert found["engines"] == (["ape"], "flag")
    assert found["chunk_tokens"] == (96, "environment")
    assert found["index"] == (str(tmp_path / "new"), "environment")
    assert found["codec"] == ("zstd", "file")
    assert found["prompt.system"] == ("Be brief.", "file")
    assert found["prompt.separator"][1] == found["dtype"][1] == "default"
    (tmp_path / "a.txt").write_text("Halden Works was founded by Mira Oskel.")
    made = ragkv("ingest", tmp_path / "a.txt", "--model", model_folder, "--engines", "ape", "--quiet")
    assert made.code == 0, made.err
    config = load_config(tmp_path / "new")
    for name in ("model", "dtype", "chunk_tokens", "codec", "default_engine", "embedder", "reranker", "retrieval"):
        assert found[name][0] == getattr(config, name)
    assert (config.engines, config.prompt.system) == (("ape",), "Be brief.")


def test_an_index_says_what_it_was_built_with(ragkv, own_file, monkeypatch, empty):
    own_file.write_text(f'index = "{empty}"\ndevice = "cpu"\ncodec = "int8"\n')
    monkeypatch.setenv("RAGKV_MODEL", "other/model")
    monkeypatch.setenv("RAGKV_TOP_K", "3")
    found = result(ragkv)
    assert found["index"] == (str(empty), "file")
    assert found["device"] == ("cpu", "file")
    assert found["codec"] == ("zstd", "index")
    assert found["model"][1] == "index"
    assert found["top_k"] == (3, "environment")
    shown = ragkv("config", "show")
    assert "RAGKV_MODEL=other/model contradicts the index" in shown.err
    assert max(map(len, shown.out.splitlines())) <= 80
    changed = ragkv("config", "show", "--changed").out
    assert "candidates" in changed  # it is written in ragkv.toml
    assert "decoding.temperature" in shown.out
    assert "decoding.temperature" not in changed


def test_ingest_refuses_what_contradicts_the_index_and_says_how_to_go_on(ragkv, monkeypatch, empty, tmp_path):
    (tmp_path / "a.txt").write_text("Halden Works was founded by Mira Oskel.")
    assert ragkv("ingest", tmp_path / "a.txt", "--index", empty).code == 0
    monkeypatch.setenv("RAGKV_CODEC", "int8")
    refused = ragkv("ingest", tmp_path / "a.txt", "--index", empty)
    assert refused.code == 1
    assert "was made with codec = zstd, not int8; use another --index, or leave --codec out and RAGKV_CODEC unset" in (
        refused.sentence
    )
    shown = ragkv("config", "show", "--index", empty, "--codec", "raw")
    assert (shown.code, "leave --codec out" in shown.sentence) == (1, True)
    assert ragkv("ingest", tmp_path / "a.txt", "--index", empty, "--codec", "zstd").code == 0  # a flag goes first


def test_an_index_without_documents_is_shown_as_ingest_would_make_it_anew(ragkv, empty):
    found = result(ragkv, "--index", empty, "--codec", "raw")
    assert found["codec"] == ("raw", "flag")
    assert found["model"] == ("mini", "default")
    assert result(ragkv, "--index", empty)["codec"] == ("zstd", "index")


def test_a_mistake_in_the_user_file_stops_who_reads_it_and_nobody_else(ragkv, own_file, empty):
    own_file.write_text('modle = "mini"')
    for command in (("stats",), ("config", "show"), ("ingest", ".")):
        found = ragkv(*command)
        assert found.code == 2
        assert found.sentence.startswith(f"ragkv: {own_file}: unknown key 'modle'; remove it")
    assert ragkv("stats", "--index", empty, "--json").code == 0
    assert ragkv("stats", "--help").code == 0
