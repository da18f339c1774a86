"""The command run in this process, for test files of single commands."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ragkv import RagKV
from ragkv.cli.main import main


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """The last line on stderr: the error."""
        return self.err.strip().splitlines()[-1]


@pytest.fixture
def command(capsys, monkeypatch) -> Callable[..., Ran]:
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["ragkv", *map(str, arguments)])
        capsys.readouterr()
        handlers = logging.root.handlers[:]
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        finally:
            logging.root.handlers[:] = handlers
        found = capsys.readouterr()
        return Ran(code, found.out, found.err)

    return run


@pytest.fixture
def small_index(tmp_path: Path, model_folder: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "halden.md").write_text("Halden Works was founded by Mira Oskel in 1907, in the town of Tarn.")
    (folder / "bolt.txt").write_text("Bolt Ltd makes valves for ships. Bolt Ltd was founded by Ann Lee in Varn.")
    with RagKV.create(tmp_path / "index", model=str(model_folder), device="cpu", chunk_tokens=128) as rag:
        rag.ingest(folder)
    return tmp_path / "index"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    lines = [{"question": "Who founded Halden Works?", "answers": ["Mira"]}, {"question": "What does Bolt Ltd make?"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path
