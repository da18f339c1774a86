"""The rules of LMDB that a user must never meet: growth, processes, forks, versions, a full disk."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest
from namespace import namespace
from openfolder import open_folder

from ragkv.attention.kv import ChunkKV
from ragkv.errors import CorruptStoreError, StoreError
from ragkv.store import KVIdentity, Store

Record = tuple[KVIdentity, ChunkKV]

COMMON = """
import os, sys
import torch
from ragkv.errors import *
from ragkv.attention.kv import ChunkKV
from ragkv.store import KVIdentity, Store
from ragkv.types import Encoding
path = sys.argv[1]
def record(n, tokens=1000):
    ids = (n, *range(tokens - 1))
    tensor = torch.full((4, tokens, 128), n, dtype=torch.bfloat16)
    identity = KVIdentity(model="m", encoding=Encoding.STANDALONE, chunk_ids=ids)
    return identity, ChunkKV(keys=(tensor,), values=(tensor,))
"""


def python(script: str, path: Path, *prefix: str) -> str:
    """What a fresh interpreter prints."""
    result = subprocess.run(
        [*prefix, sys.executable, "-c", COMMON + script, path],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def big(make_kv: Callable[..., ChunkKV], identity: Callable[..., KVIdentity]) -> Callable[[int], Record]:
    """The n-th of many records of 2 MB."""

    def make(n: int) -> Record:
        return identity(n, *range(999)), make_kv(1000, layers=1, kv_heads=4, head_dim=128, seed=n)

    return make


def test_a_tiny_map_grows(
    tmp_path: Path,
    big: Callable[[int], Record],
    equal: Callable[..., bool],
) -> None:
    with Store.create(tmp_path, map_size=256 << 10) as store:
        records = [big(n) for n in range(6)]
        for pair in records[:3]:
            store.stage_kv([pair])
        store.stage_kv(records[3:])
        assert store.stats().map_bytes >= 12_000_000
    with Store.open(tmp_path) as store:
        assert all(equal(store.get_kv(of), kv) for of, kv in records)


def test_readers_and_growth_in_threads(
    tmp_path: Path,
    big: Callable[[int], Record],
    equal: Callable[..., bool],
) -> None:
    failures: list[BaseException | str] = []
    done = threading.Event()
    with Store.create(tmp_path, map_size=256 << 10) as store:
        first, kv = big(0)
        store.stage_kv([(first, kv)])

        def read() -> None:
            try:
                while not done.is_set():
                    if not equal(store.get_kv(first), kv):
                        failures.append("another tensor")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for n in range(1, 12):
            store.stage_kv([big(n)])
        done.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert store.stats().kv_records == 12


def test_a_reader_follows_the_growth_of_another_process(tmp_path: Path) -> None:
    Store.create(tmp_path, map_size=256 << 10).close()
    reader = subprocess.Popen(
        [
            sys.executable,
            "-c",
            COMMON + "store = Store.open(path)\n"
            "for line in sys.stdin:\n"
            "    identity, kv = record(int(line))\n"
            "    got = store.get_kv(identity)\n"
            "    print(got is not None and torch.equal(got.keys[0], kv.keys[0]), flush=True)\n"
            "store.stage_kv([record(99)])\n",
            tmp_path,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with reader, Store.open(tmp_path) as store:
        assert reader.stdin is not None
        assert reader.stdout is not None
        namespace: dict[str, object] = {"__name__": "common"}
        exec(COMMON.replace("path = sys.argv[1]", ""), namespace)
        record = namespace["record"]
        assert callable(record)
        for n in range(4):
            store.stage_kv([record(n)])
            reader.stdin.write(f"{n}\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == "True\n"
        reader.stdin.close()
        assert reader.wait(600) == 0
        assert store.has_kv(record(99)[0])  # the other one's write came after our growth, and grew nothing away


def test_stores_of_a_path_share_one_environment(tmp_path: Path, write: Callable[..., object]) -> None:
    first = Store.create(tmp_path / "index")
    (tmp_path / "link").symlink_to(tmp_path / "index")
    with Store.open(tmp_path / "link") as second, Store.open(tmp_path / "index", readonly=True) as third:
        write(second, "a", (1, 2))
        first.close()
        assert third.chunk("a#0") == second.chunk("a#0")
        with pytest.raises(StoreError, match="read-only"):
            third.put_meta("x", 1)
    with Store.open(tmp_path / "index", readonly=True) as alone:
        with pytest.raises(StoreError, match="read-only in this process"):
            Store.open(tmp_path / "index")
        with pytest.raises(StoreError, match="read-only"):
            alone.delete_document("a")
        assert alone.get_meta("x") is None


def test_a_closed_store_says_so(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.stats()


def test_a_fork_opens_its_own(tmp_path: Path) -> None:
    """With readers busy in other threads, as in a server that forks a worker."""
    script = """
import threading
store = Store.create(path)
identity, kv = record(1)
store.stage_kv([(identity, kv)])
stop = threading.Event()
def read():
    while not stop.is_set():
        assert store.get_kv(identity) is not None
threads = [threading.Thread(target=read) for _ in range(2)]
[thread.start() for thread in threads]
for n in range(5):
    if os.fork() == 0:
        try:
            store.get_kv(identity)
        except StoreError as error:
            assert "fork" in str(error)
            with Store.open(path) as own:
                assert own.has_kv(identity)
                own.put_meta(f"child {n}", n)
                store.close()
                os._exit(0)
        os._exit(1)
    assert os.wait()[1] == 0
    assert store.get_meta(f"child {n}") == n
stop.set()
[thread.join() for thread in threads]
store.close()
print("ok")
"""
    assert python(script, tmp_path) == "ok\n"


def test_a_full_disk_loses_nothing_committed(tmp_path: Path) -> None:
    prefix = namespace()
    if prefix is None:
        pytest.skip("needs a mount namespace to make a small disk")
    script = """
store = Store.create(path)
store.stage_kv([record(1)])
try:
    store.stage_kv([record(n) for n in range(2, 20)])
except StoreFullError as error:
    print("full")
first, kv = record(1)
assert torch.equal(store.get_kv(first).keys[0], kv.keys[0])
assert store.stats().kv_records == 1
store.put_meta("still", "writable")
store.close()
assert Store.open(path).get_meta("still") == "writable"
"""
    mounted = 'mount -t tmpfs -o size=12m none "$0" && exec "$@" "$0"'
    command = [*prefix, "sh", "-c", mounted, str(tmp_path), sys.executable, "-c", COMMON + script]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (result.returncode, result.stdout) == (0, "full\n"), result.stderr


def test_a_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    script = """
import resource
store = Store.create(path, map_size=1 << 20)
store.put_meta("a", 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
try:
    store.stage_kv([record(n) for n in range(9)])
except StoreFullError:
    print("full")
assert store.get_meta("a") == 1
"""
    assert python(script, tmp_path) == "full\n"


@pytest.mark.parametrize(("version", "advice"), [(b"4", "upgrade"), (b"0", "ingest again")])
@pytest.mark.parametrize("readonly", [False, True])
def test_another_format_is_refused(store: Store, version: bytes, advice: str, readonly: bool) -> None:
    store.close()
    with lmdb.open(str(store.directory), max_dbs=9) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(b"format", version, db=meta)
    for _ in range(2):  # a refusal leaves nothing open
        with pytest.raises(StoreError, match=advice):
            Store.open(store.directory.parent, readonly=readonly)


@pytest.mark.parametrize("readonly", [False, True])
def test_a_foreign_environment_is_refused(tmp_path: Path, readonly: bool) -> None:
    (tmp_path / "store").mkdir()
    lmdb.open(str(tmp_path / "store")).close()
    with pytest.raises(CorruptStoreError, match="no finished store"):
        Store.open(tmp_path, readonly=readonly)


def test_an_unfinished_creation_is_taken_up(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    lmdb.open(str(tmp_path / "store")).close()
    with Store.create(tmp_path) as store:
        assert store.stats().documents == 0


def test_create_and_open_say_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StoreError, match="ragkv ingest"):
        Store.open(tmp_path / "nothing")
    for refuse in (Store.open, Store.create):
        with pytest.raises(StoreError, match="is a file"):
            refuse(file)
    with Store.create(tmp_path / "index"), pytest.raises(StoreError, match="already"):
        Store.create(tmp_path / "index")
    with pytest.raises(StoreError, match="already"):
        Store.create(tmp_path / "index")
    assert Store.exists(tmp_path / "index")
    assert not Store.exists(tmp_path / "nothing")


def test_no_permission_is_said() -> None:
    script = """
Store.create(path).close()
os.chmod(path + "/store/data.mdb", 0o444)
os.chmod(path + "/store/lock.mdb", 0o444)
if os.fork() == 0:
    if os.getuid() == 0:  # to whom everything is permitted
        os.setuid(65534)
    try:
        Store.open(path)
    except StoreError as error:
        os._exit(0 if "may not be" in str(error) else 2)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    with open_folder() as folder:
        if folder is None:
            pytest.skip("needs a folder that every user may enter")
        assert python(script, folder) == "0\n"
