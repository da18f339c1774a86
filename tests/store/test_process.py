"""Many readers and one writer in processes of their own; what killed readers leave; reads without a lock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from openfolder import open_folder

SUPPORT = Path(__file__).parents[1] / "support"

COMMON = """
import os, signal, sys
import torch
from ragkv.errors import *
from ragkv.attention.kv import ChunkKV
from ragkv.store import KVIdentity, Store
from ragkv.types import Encoding
path = sys.argv[1]

def put(store, n):
    "Replaces 1 MB."
    tensor = torch.full((4, 500, 128), n, dtype=torch.bfloat16)
    identity = KVIdentity(model="m", encoding=Encoding.STANDALONE, chunk_ids=tuple(range(500)))
    store.keep_kv(identity, ChunkKV(keys=(tensor,), values=(tensor,)))

def churn(store, times=10):
    "Pages of the file after so many replacements."
    for n in range(times):
        put(store, n)
    return store._live()._live().info()["last_pgno"]

def child(work):
    "A process that says a line when it is ready, and the pipe that it said it through."
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        with Store.open(path, readonly=True) as own:
            work(own, lambda line: os.write(writing, line.encode()))
        os._exit(0)
    os.close(writing)
    return pid, reading

def pinning(own, say):
    with own._live().read() as txn:
        txn.count("kv")
        say("ready")
        signal.pause()
"""


def python(script: str, *arguments: object, before: tuple[str, ...] = ()) -> str:
    """What a fresh interpreter prints."""
    command = [*before, sys.executable, "-c", COMMON + script, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_readers_in_many_processes_follow_a_writer(tmp_path: Path) -> None:
    command = [sys.executable, str(SUPPORT / "reader.py"), str(tmp_path / "index")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["codes"] == [0, 0, 0, 0], done.stderr
    assert json.loads(done.stdout)["grown"] > 128 << 10  # how far depends on which readers hold old pages


def test_a_killed_reader_holds_back_no_pages(tmp_path: Path) -> None:
    """One that lives does, which shows that the measure measures; the next open frees the slot of a dead one."""
    script = """
store = Store.create(path, map_size=256 << 20)
calm = churn(store)
assert churn(store) == calm
pid, pipe = child(pinning)
os.read(pipe, 5)
pinned = churn(store)
assert pinned > calm + 8 * 256, (calm, pinned)
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
assert churn(store) > pinned
pid, pipe = child(lambda own, say: say("opened"))
os.waitpid(pid, 0)
after = churn(store)
assert churn(store, 30) <= after + 256
print("freed")
"""
    assert python(script, tmp_path) == "freed\n"


def test_a_writer_frees_a_killed_readers_slot_before_the_map_grows(tmp_path: Path) -> None:
    script = """
store = Store.create(path, map_size=16 << 20)
churn(store)
pid, pipe = child(pinning)
os.read(pipe, 5)
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
churn(store, 60)
print(store.stats().map_bytes >> 20)
"""
    assert python(script, tmp_path) == "16\n"


def test_a_full_table_of_readers_is_said_and_dead_ones_make_room(tmp_path: Path) -> None:
    script = """
store = Store.create(path)
put(store, 1)
def many(own, say):
    held = [own._live()._live().begin() for _ in range(512)]
    say("ready")
    signal.pause()
pid, pipe = child(many)
os.read(pipe, 5)
for attempt in (store.stats, lambda: put(store, 2) or store.get_meta("x")):
    try:
        attempt()
    except StoreError as error:
        print(str(error).replace(path, ""))
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
print(store.stats().kv_records)
"""
    said = python(script, tmp_path).splitlines()
    assert said == [*["/store is being read 512 times at once, which is the limit: "
                      "end some of the processes or threads that read it, and try again"] * 2, "1"]  # fmt: skip


def test_reads_without_a_lock_notice_a_writer_that_overtakes_them() -> None:
    script = """
store = Store.create(path)
put(store, 1)
def permit(write):
    "To the owner, who is the reader too where nobody is root."
    os.chmod(store.directory, 0o755 if write else 0o555)
    for name in ("data.mdb", "lock.mdb"):
        os.chmod(store.directory / name, 0o644 if write else 0o444)
permit(False)
inside, outside = os.pipe(), os.pipe()
if os.fork() == 0:
    os.close(inside[1])  # so that the end of one is heard by the other
    os.close(outside[0])
    if os.getuid() == 0:  # to whom everything is permitted
        os.setuid(65534)
    def step():
        os.write(outside[1], b"x")
        os.read(inside[0], 1)
    own = Store.open(path, readonly=None)
    assert own.readonly
    for expected in ("whole", "whole", "overtaken"):  # no commit meanwhile, one, two
        try:
            with own._live().read() as txn:
                step()
                txn.count("kv")
            print("whole", flush=True)
        except StoreError as error:
            print("overtaken:", "try again" in str(error), flush=True)
    assert own.stats().kv_records == 1  # of a later snapshot, in peace
    try:
        own.put_meta("x", 1)
    except StoreAccessError:
        print("not written", flush=True)
    os._exit(0)
os.close(inside[0])
os.close(outside[1])
for commits in (0, 1, 2):
    assert os.read(outside[0], 1)
    permit(True)
    churn(store, commits)
    permit(False)
    os.write(inside[1], b"x")
assert os.wait()[1] == 0
permit(True)
"""
    with open_folder() as folder:
        if folder is None:
            pytest.skip("needs a folder that every user may enter")
        said = python(script, folder).splitlines()
    assert said == ["whole", "whole", "overtaken: True", "not written"]
