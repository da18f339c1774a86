"""An index that may not be written answers all the same; one on a network file system is refused with the reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from namespace import namespace

from ragkv import RagKV

COMMAND = Path(__file__).parents[1] / "support" / "command.py"
QUESTION = "Who founded Halden Works?"
POWERLESS = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]  # for root, to whom all is permitted


@pytest.fixture
def index(model_folder: Path) -> Iterator[Path]:
    """An index in a folder that every user may enter, with all KV but for engine `block`."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    shutil.copytree(model_folder, folder / "model")
    (folder / "halden.md").write_text("# Halden Works\n\nHalden Works was founded by Mira Oskel in 1907.\n")
    settings = {"engines": ("ape",), "tuning": {"block": {"over": "standalone"}}}
    with RagKV.create(folder / "index", model=str(folder / "model"), device="cpu", **settings) as rag:
        rag.ingest(folder / "halden.md")
    yield folder / "index"
    subprocess.run(["chmod", "-R", "u+w", folder], check=True)
    shutil.rmtree(folder)


def run(index: Path, *commands: tuple[object, ...], before: Sequence[str] = ()) -> list[Any]:
    """Each command in a process of its own, after `before`; they share the models of the index."""
    arguments = json.dumps([[str(part) for part in command] for command in commands])
    command = [*before, sys.executable, str(COMMAND), arguments, str(index)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    results: list[Any] = json.loads(done.stdout)
    return results


def answers_and_keeps_nothing(index: Path, *, before: Sequence[str]) -> None:
    data = (index / "store" / "data.mdb").read_bytes()
    query = ("query", QUESTION, "--index", index, "--max-new-tokens", 2, "--json")
    ape, block, stats, ingest = run(
        index,
        (*query, "--engine", "ape"),
        (*query, "--engine", "block"),
        ("stats", "--index", index, "--json"),
        ("ingest", index.parent / "halden.md", "--index", index),
        before=before,
    )
    for answer, misses in ((ape, 0), (block, 1)):
        assert answer["code"] == 0, answer["err"]
        assert json.loads(answer["out"])["kv"]["misses"] == misses
        assert answer["err"].count("is not kept") == 1  # the retrieval index, the prefix's KV, the chunk's: one line
        assert "Traceback" not in answer["err"]
    assert stats["code"] == 0
    assert stats["err"] == ""
    assert json.loads(stats["out"])["documents"] == 1
    assert ingest["code"] == 1
    assert ingest["err"].startswith("ragkv: ")
    assert "may not be written by you" in ingest["err"]
    assert len(ingest["err"].splitlines()) == 1
    assert (index / "store" / "data.mdb").read_bytes() == data


@pytest.mark.slow
@pytest.mark.parametrize("lock_file", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_read_only_mount(index: Path, lock_file: bool) -> None:
    prefix = namespace()
    if prefix is None:
        pytest.skip("needs a mount namespace")
    if not lock_file:  # an index that was copied without it
        (index / "store" / "lock.mdb").unlink()
    mount = f'mount --bind "{index}" "{index}" && mount -o remount,ro,bind "{index}" && exec "$@"'
    answers_and_keeps_nothing(index, before=[*prefix, "sh", "-c", mount, "sh"])


@pytest.mark.slow
@pytest.mark.parametrize("may_lock", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_no_permission_to_write(index: Path, may_lock: bool) -> None:
    root = not os.getuid()
    if root and (shutil.which("setpriv") is None or subprocess.run([*POWERLESS, "true"], check=False).returncode):
        pytest.skip("needs setpriv, or another user than root")
    subprocess.run(["chmod", "-R", "a-w", index], check=True)
    if may_lock:
        (index / "store" / "lock.mdb").chmod(0o666)
    answers_and_keeps_nothing(index, before=POWERLESS if root else ())


def test_a_network_file_system_is_refused(index: Path, tmp_path: Path) -> None:
    prefix = namespace()
    if prefix is None:
        pytest.skip("needs a mount namespace")
    (tmp_path / "mountinfo").write_text("21 1 254:0 / / rw,relatime shared:1 - nfs4 nas:/home rw\n")
    mount = f'mount --bind "{tmp_path}/mountinfo" /proc/$$/mountinfo && exec "$@"'
    command = [*prefix, "sh", "-c", mount, "sh", Path(sys.executable).parent / "ragkv", "stats", "--index", index]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"ragkv: {index}/store is on a network file system (nfs4): put the index on a local disk.\n"
