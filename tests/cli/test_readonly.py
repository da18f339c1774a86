"""A read-only index answers, and says once that it keeps nothing."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from clichild import run_script
from namespace import namespace

from ragkv import RagKV

QUESTION = "Who founded Halden Works?"


@pytest.fixture
def index(model_folder: Path) -> Iterator[Path]:
    """An index in a folder that every user may enter, with all KV except for engine `block`."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    shutil.copytree(model_folder, folder / "model")
    (folder / "halden.md").write_text("# Halden Works\n\nHalden Works was founded by Mira Oskel in 1907.\n")
    settings = {"engines": ("ape",), "tuning": {"block": {"over": "standalone"}}}
    with RagKV.create(folder / "index", model=str(folder / "model"), device="cpu", **settings) as rag:
        rag.ingest(folder / "halden.md")
        rag.query(QUESTION, engine="ape", max_new_tokens=1)  # which keeps the prefix's KV
    yield folder / "index"
    subprocess.run(["chmod", "-R", "u+w", folder], check=True)
    shutil.rmtree(folder)


def answers_and_keeps_nothing(index: Path, way: str) -> None:
    data = (index / "store" / "data.mdb").read_bytes()
    query = ["query", QUESTION, "--index", str(index), "--max-new-tokens", "2", "--json"]
    commands = [
        [*query, "--engine", "ape"],
        [*query, "--engine", "block"],
        ["stats", "--index", str(index), "--json"],
        ["ingest", str(index.parent / "halden.md"), "--index", str(index)],
    ]
    ape, block, stats, ingest = json.loads(
        run_script("command", way, index, stdin=json.dumps([{"arguments": words} for words in commands]))
    )
    for answer, misses in ((ape, 0), (block, 1)):
        assert answer["code"] == 0, answer["err"]
        assert json.loads(answer["out"])["kv"]["misses"] == misses
        warnings = [line for line in answer["err"].splitlines() if "was not trained for" not in line]
        kept = f"warning: {index} is open read-only: what a question has to compute is not kept"
        assert warnings == [kept] * misses  # one line for the prefix's KV and the chunk's, none for nothing
    assert stats["code"] == 0
    assert stats["err"] == ""
    assert json.loads(stats["out"])["documents"] == 1
    assert ingest["code"] == 1
    assert ingest["err"].startswith("ragkv: ")
    assert "is on a read-only mount" in ingest["err"] or "Permission denied" in ingest["err"]
    assert len(ingest["err"].splitlines()) == 1
    assert (index / "store" / "data.mdb").read_bytes() == data


@pytest.mark.slow
@pytest.mark.parametrize("lock_file", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_read_only_mount(index: Path, lock_file: bool) -> None:
    if namespace() is None:
        pytest.skip("needs a mount namespace")
    if not lock_file:  # an index that was copied without it
        (index / "store" / "lock.mdb").unlink()
    answers_and_keeps_nothing(index, "read-only mount")


@pytest.mark.slow
@pytest.mark.parametrize("may_lock", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_no_permission_to_write(index: Path, may_lock: bool) -> None:
    subprocess.run(["chmod", "-R", "a-w", index], check=True)
    if may_lock:
        (index / "store" / "lock.mdb").chmod(0o666)
    answers_and_keeps_nothing(index, "no permission")
