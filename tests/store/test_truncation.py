"""Files that are cut, replaced or moved while a store has them open: an error in words, where LMDB dies of SIGBUS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ragkv.attention.kv import ChunkKV
from ragkv.errors import StoreError
from ragkv.store import KVIdentity, Store
from ragkv.types import Chunk

Write = Callable[..., list[Chunk]]

SCRIPT = """
import json, os, shutil, sys
from pathlib import Path
from ragkv.errors import StoreError
from ragkv.store import Store

sound, index, cases = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])

def look(readonly, file, size):
    uses = {
        "documents": lambda store: list(store.documents()),
        "text": lambda store: store.text("a"),
        "stats": lambda store: store.stats(),
        "verify": lambda store: store.verify(),
        "backup": lambda store: store.copy(index / "copy"),
        "compact": lambda store: store.copy(index / "compacted", compact=True),
        "generation": lambda store: store.generation,
    }
    if not readonly:
        uses["put"] = lambda store: store.put_meta("a", 1)
        uses["delete"] = lambda store: store.delete_document("a")
    with Store.open(index, readonly=readonly) as store:
        assert store.text("a")
        os.truncate(index / "store" / file, size)
        for name, use in uses.items():
            try:
                use(store)
                print("WRONG", name, "said nothing", flush=True)
            except StoreError as error:
                if file not in str(error) or "too short" not in str(error) and "cut short" not in str(error):
                    print("WRONG", name, error, flush=True)
    assert (index / "store" / file).stat().st_size == size, "a writer has made it long again"

for case in cases:
    shutil.rmtree(index, ignore_errors=True)
    shutil.copytree(sound, index)
    pid = os.fork()  # importing takes longer than the rest
    if not pid:
        look(*case)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture
def cut(tmp_path: Path, write: Write) -> Path:
    """An index of one document, no longer open."""
    with Store.create(tmp_path / "index", map_size=1 << 20) as store:
        write(store, "a", *((n,) * 50 for n in range(1, 40)))
    return tmp_path / "index"


def used(index: Path) -> int:
    with Store.open(index, readonly=True) as store, store._live().read():
        return int((store._live()._env.info()["last_pgno"] + 1) * 4096)


def test_a_file_that_is_cut_while_it_is_open(cut: Path, tmp_path: Path) -> None:
    sizes = [0, 1, 4096, used(cut) // 2, used(cut) - 4096]
    cases = [[readonly, "data.mdb", size] for readonly in (True, False) for size in sizes]
    cases += [[readonly, "lock.mdb", 0] for readonly in (True, False)]
    command = [sys.executable, "-c", SCRIPT, str(cut), str(tmp_path / "open"), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0"] * len(cases), (done.stdout, done.stderr)  # a signal would be negative


def test_room_behind_the_last_page_is_no_loss(cut: Path) -> None:
    size = used(cut)
    with Store.open(cut) as store:
        os.truncate(cut / "store" / "data.mdb", size)
        assert store.text("a")
        store.put_meta("a", 1)
    with Store.open(cut) as store:
        assert store.get_meta("a") == 1
        assert store.verify().ok


def test_a_file_that_is_replaced_or_moved_while_it_is_open(cut: Path, tmp_path: Path) -> None:
    with Store.open(cut) as store:
        store.copy(tmp_path / "copy", compact=True)
        copied = tmp_path / "copy" / "store" / "data.mdb"
        copied.replace(cut / "store" / "data.mdb")
        for use in (lambda: store.text("a"), lambda: store.put_meta("a", 1), lambda: store.verify()):
            with pytest.raises(StoreError, match="was replaced while it was open: open the index again"):
                use()
    with Store.open(cut) as store:
        assert store.text("a")
        cut.rename(tmp_path / "moved")
        with pytest.raises(StoreError, match="moved or deleted"):
            store.text("a")
    with Store.open(tmp_path / "moved") as store:
        assert store.verify().ok
        shutil.rmtree(tmp_path / "moved")
        with pytest.raises(StoreError, match="moved or deleted"):
            store.text("a")


def test_a_file_that_others_make_longer_is_no_false_alarm(
    tmp_path: Path, make_kv: Callable[..., ChunkKV], identity: Callable[..., KVIdentity]
) -> None:
    script = """
import sys, torch
from ragkv.attention.kv import ChunkKV
from ragkv.store import KVIdentity, Store
from ragkv.types import Encoding
with Store.open(sys.argv[1]) as store:
    for n in range(40):
        key = KVIdentity(model="c0ffee", encoding=Encoding.STANDALONE, prefix_ids=(), chunk_ids=(n,) * 64)
        tensor = torch.full((4, 64, 64), float(n))
        store.stage_kv([(key, ChunkKV(keys=(tensor,), values=(tensor,), encoded_at=0))])
"""
    index = tmp_path / "index"
    with Store.create(index, map_size=128 << 10) as store:
        store.put_meta("a", 1)
        child = subprocess.Popen([sys.executable, "-c", script, str(index)])
        while child.poll() is None:
            assert store.get_meta("a") == 1
        assert child.returncode == 0
        assert store.stats().kv_records == 40


def test_the_directory_of_the_process_may_change(cut: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with Store.open("index", readonly=True) as store:
        monkeypatch.chdir(Path("/"))
        assert store.text("a")
