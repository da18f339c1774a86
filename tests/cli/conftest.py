"""Fixtures of the commands' tests: an index of two documents, and a file of questions."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from indexed import write_texts
from outcome import Result, typed

from ragkv import RagKV
from ragkv.cli.main import main
from ragkv.cli.options import VARIABLES
from ragkv.index.index import Index
from ragkv.ingest.sandbox import SourceReader, read_source


@pytest.fixture(autouse=True)
def nobodys_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without environment variables or the user file of the person who runs the tests."""
    for name in VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def ragkv(capsys, monkeypatch) -> Callable[..., Result]:
    return typed(main, capsys, monkeypatch)


@pytest.fixture
def documents(tmp_path) -> Path:
    return write_texts(tmp_path / "documents")


@pytest.fixture
def index(tmp_path, documents, model_folder) -> Path:
    """An index of two chunks, each with KV in two encodings."""
    tuning = {"block": {"over": "standalone"}}
    with RagKV.create(
        tmp_path / "index", model=str(model_folder), device="cpu", chunk_tokens=128, tuning=tuning
    ) as rag:
        rag.ingest(documents)
    return tmp_path / "index"


@pytest.fixture
def questions(tmp_path) -> Path:
    path = tmp_path / "questions.jsonl"
    lines = [{"question": "Who founded Halden Works?", "answers": ["Mira"]}, {"question": "What does Bolt Ltd make?"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def read_here(monkeypatch) -> None:
    """Read files in this process: starting one per ingest takes a third of a second."""
    monkeypatch.setattr(SourceReader, "read", lambda reader, source: read_source(source, reader._limits))


@pytest.fixture
def no_model(monkeypatch) -> None:
    """Loading a model fails the test."""

    def load(_: Index) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(Index, "model", property(load))
