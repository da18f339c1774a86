"""A mistyped `ragkv ingest` leaves nothing that the corrected command stumbles over."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ragkv import RagKV
from ragkv.config import PromptConfig, load_config
from ragkv.errors import ConfigError, ModelLoadError
from ragkv.ingest.ingester import Ingester
from ragkv.model import self_check


@pytest.fixture
def place(tmp_path: Path, model_folder: Path, documents: Path) -> dict[str, Path]:
    """Models that do not load, and documents of which none can be read."""
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    (broken / "model.safetensors").write_bytes(b"\x07" * 100)
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    unreadable = tmp_path / "unreadable"
    unreadable.mkdir()
    (unreadable / "a.pdf").write_bytes(b"%PDF-1.4\nno")
    (unreadable / "b.txt").write_bytes(bytes(range(256)))
    return {
        "documents": documents,
        "model": model_folder,
        "broken": broken,
        "hollow": hollow,
        "unreadable": unreadable,
        "file": broken / "model.safetensors",
        "new": tmp_path / "new",
    }


WRONG = [
    ("{documents} --model {documents}/typo", 1, "No model folder at"),
    ("{documents} --model some/typo", 1, "There is no model folder 'some/typo' here, and HF_HUB_OFFLINE forbids"),
    ("{documents} --model {file}", 1, "is a file; give the model's folder"),
    ("{documents} --model {hollow}", 1, "config.json is missing"),
    ("{documents} --model {broken}", 1, "cannot be loaded"),
    ("{documents} --model {model} --embedder ./typo", 1, "No model folder at './typo'"),
    ("{documents} --model {model} --embedder some/typo", 1, "There is no model folder 'some/typo' here"),
    ("{documents} --model {model} --embedder {model}", 1, "lacks"),
    ("{documents} --model {model} --reranker some/typo", 1, "There is no model folder 'some/typo' here"),
    ("{documents} --model {model} --reranker {model}", 1, "has no classification head"),
    ("{documents} --model {model} --device abacus", 1, "Device 'abacus' is not available"),
    ("{documents} --model {model} --engines warp", 2, "Unknown engine 'warp'"),
    ("{documents} --model {model} --codec brotli", 2, "unknown codec 'brotli'"),
    ("{documents} --model {model} --chunk-tokens 1", 2, "chunk_tokens must lie between"),
    ("{unreadable} --model {model}", 1, "Nothing to ingest: "),
    ("{hollow} --model {model}", 1, "no supported files found"),
    ("{documents}/typo --model {model}", 2, "No such file or folder"),
]


@pytest.mark.parametrize(("line", "code", "says"), WRONG, ids=lambda value: value if isinstance(value, str) else None)
def test_nothing_is_left_and_the_corrected_command_works(ragkv: Any, place: dict[str, Path], line, code, says):
    failed = ragkv("ingest", *(word.format(**place) for word in line.split()), "--index", place["new"])
    assert (failed.code, failed.out) == (code, ""), failed.err
    assert says in failed.sentence
    assert not place["new"].exists()


@pytest.mark.parametrize("how", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_while_models_load_leaves_nothing(ragkv, place, monkeypatch, how):
    def load(*_: Any, **__: Any) -> None:
        raise how

    command = ("ingest", place["documents"], "--model", place["model"], "--index", place["new"])
    with monkeypatch.context() as patch:
        patch.setattr(self_check, "load_model", load)
        if how is KeyboardInterrupt:
            assert ragkv(*command).code == 130
        else:
            with pytest.raises(how):
                ragkv(*command)
    assert not place["new"].exists()
    assert ragkv(*command).code == 0


def test_an_ingest_that_was_stopped_before_its_first_document_binds_nobody(ragkv, place, monkeypatch):
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    command = ("ingest", place["documents"], "--model", place["model"], "--index", place["new"])
    with monkeypatch.context() as patch:
        patch.setattr(Ingester, "_add", stop)
        assert ragkv(*command).code == 130
    assert not place["new"].exists()
    again = ragkv(*command, "--chunk-tokens", 64, "--codec", "zstd", "--dry-run")
    assert (again.code, "2 to add" in again.out) == (0, True)
    again = ragkv(*command, "--chunk-tokens", 64, "--codec", "zstd")
    assert again.code == 0, again.err
    assert (load_config(place["new"]).chunk_tokens, load_config(place["new"]).codec) == (64, "zstd")
    assert ragkv("verify", "--index", place["new"]).code == 0
    refused = ragkv(*command, "--chunk-tokens", 128)
    assert (refused.code, "was made with chunk_tokens = 64, not 128" in refused.err) == (1, True)
    assert ragkv("query", "Who founded Halden Works?", "--index", place["new"], "--max-new-tokens", 1).code == 0


def test_an_emptied_index_takes_another_model(ragkv, place, tmp_path):
    command = ("ingest", place["documents"], "--index", place["new"])
    assert ragkv(*command, "--model", place["model"]).code == 0
    assert ragkv("query", "Who founded Halden Works?", "--index", place["new"], "--max-new-tokens", 1).code == 0
    assert ragkv("delete", "*", "--yes", "--index", place["new"]).code == 0
    failed = ragkv(*command, "--model", place["broken"])
    assert (failed.code, "cannot be loaded" in failed.sentence) == (1, True)
    assert load_config(place["new"]).model == str(place["model"])  # as it was
    shutil.copytree(place["model"], tmp_path / "other")
    assert ragkv(*command, "--model", tmp_path / "other", "--engines", "block").code == 0
    answered = ragkv("query", "Who founded Halden Works?", "--index", place["new"], "--max-new-tokens", 1)
    assert answered.code == 0, answered.err
    assert ragkv("verify", "--index", place["new"]).code == 0


def test_what_no_flag_can_say_survives(ragkv, place):
    prompt = PromptConfig(system="Be brief.")
    RagKV.create(place["new"], model=str(place["model"]), prompt=prompt, memory_budget=0).close()
    assert (
        ragkv("ingest", place["documents"], "--index", place["new"], "--model", "mini", "--embedder", "none").code == 0
    )
    found = load_config(place["new"])
    assert (found.model, found.prompt, found.memory_budget) == ("mini", prompt, 0)


def test_documents_beyond_the_limits_of_the_user_file_leave_nothing(ragkv, place, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "ragkv").mkdir(parents=True)
    (tmp_path / "home" / "ragkv" / "config.toml").write_text("[ingest]\nmax_characters = 1\n")
    found = ragkv("ingest", place["documents"], "--index", place["new"], "--model", place["model"])
    assert found.code == 1
    assert "ingest.max_characters" in found.err
    assert not place["new"].exists()


def test_from_python(tmp_path, model_folder, documents):
    for settings in ({"model": str(tmp_path / "typo")}, {"model": "some/typo"}, {"model": 3}, {"top_k": "many"}):
        with pytest.raises((ModelLoadError, ConfigError)):
            RagKV.create(tmp_path / "new", **settings)
        assert not (tmp_path / "new").exists()
    with RagKV.create(tmp_path / "new", model=model_folder) as first:  # a Path will do
        assert first.config.model == str(model_folder)
        with pytest.raises(ConfigError, match="already"):
            RagKV.create(tmp_path / "new", model=model_folder)
        with RagKV.create(tmp_path / "new", model=model_folder, codec="zstd", replace_empty=True) as second:
            with pytest.raises(ConfigError, match="has another codec in its"):
                first.ingest(documents)
            assert len(second.ingest(documents).added) == 2
        with pytest.raises(ConfigError, match="already"):
            RagKV.create(tmp_path / "new", model=model_folder, replace_empty=True)
