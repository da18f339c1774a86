"""Two ingests into one index: the second names the holder and waits, or fails at once with `--no-wait`."""

import os
import re
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from clichild import CliChild

from ragkv import RagKV
from ragkv.store import Store
from ragkv.store.environment import WriterLock

HOLDER = """
import sys
from ragkv.store import Store
with Store.open(sys.argv[1]) as store, store.writing("ragkv ingest docs/"):
    print("holding", flush=True)
    sys.stdin.read()
"""
TIME = r"(\d{4}-\d\d-\d\d )?\d\d:\d\d"  # with the date if it was before midnight


@pytest.fixture
def index(tmp_path: Path, model_folder: Path) -> Path:
    (tmp_path / "halden.md").write_text("# Halden Works\n\nHalden Works was founded by Mira Oskel in 1907.\n")
    RagKV.create(tmp_path / "index", model=str(model_folder), device="cpu", chunk_tokens=128).close()
    return tmp_path / "index"


def test_no_wait_names_the_holder(ragkv, index, tmp_path):
    with Store.open(index) as store, store.writing("ragkv gc"):
        found = ragkv("ingest", tmp_path, "--index", index, "--no-wait")
        [sentence] = found.err.splitlines()
        assert found.code == 1
        assert re.search(rf"is being written by PID {os.getpid()} \(ragkv gc, since {TIME}\): wait", sentence)
        assert store.stats().documents == 0
        assert store.get_meta("x") is None


@pytest.mark.slow
def test_the_second_waits_and_a_killed_first_lets_it_go_on(index, tmp_path):
    holder = CliChild(index, program=HOLDER)
    with ExitStack() as stack:
        stack.callback(holder.process.kill)  # otherwise a failure here would wait forever
        assert holder.line() == "holding\n"
        waiting = rf"waiting for PID {holder.process.pid} \(ragkv ingest docs/, since {TIME}\) …\n"
        children = [CliChild("ingest", tmp_path / "halden.md", "--index", index) for _ in range(2)]
        for child in children:
            stack.callback(child.process.kill)
            assert re.fullmatch(waiting, child.stderr.readline())
        code, _, message = children[0].end(signal.SIGINT)
        assert code == 130
        assert message.splitlines()[-1].startswith("ragkv: interrupted")
        holder.end(signal.SIGKILL)
        code, shown, message = children[1].end()
        assert code == 0, message
        assert "1 added" in shown


def test_a_first_ingest_waits_without_a_line_of_the_log(ragkv, documents, tmp_path, model_folder, monkeypatch):
    held, waited, log = threading.Event(), threading.Event(), WriterLock._log

    def logged(*given):
        log(*given)
        waited.set()

    monkeypatch.setattr(WriterLock, "_log", logged)

    def hold():
        with Store.create(tmp_path / "index") as store, store.writing("another"):
            held.set()
            waited.wait(600)

    other = threading.Thread(target=hold)
    other.start()
    held.wait(600)
    try:
        found = ragkv("ingest", documents, "--index", tmp_path / "index", "--model", model_folder, "--quiet")
    finally:
        waited.set()
        other.join()
    assert (found.code, found.out, found.err) == (0, "", "")


@pytest.mark.slow
def test_two_first_ingests_make_one_index(tmp_path, model_folder):
    """Both find no index; one creates it, and the other uses it."""
    (tmp_path / "a.md").write_text("Halden Works was founded by Mira Oskel in 1907.")
    (tmp_path / "b.md").write_text("Corvo Mills was founded by Ida Brandt in Varn.")
    command = ("--index", tmp_path / "index", "--model", model_folder, "--quiet")
    for child in [CliChild("ingest", tmp_path / name, *command) for name in ("a.md", "b.md")]:
        code, _, message = child.end()
        assert code == 0, message
    with Store.open(tmp_path / "index") as store:
        assert [stored.document.source for stored in store.documents()] == ["a.md", "b.md"]
