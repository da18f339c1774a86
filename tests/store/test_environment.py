"""LMDB's pitfalls are hidden from users: growth, processes, forks, versions, a full disk."""

import errno
import itertools
import json
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import expected
import lmdb
import pytest
from clichild import CliChild
from package import in_child
from storekit import big, equal, identity, kv_of, put_kv, write

from ragkv.errors import CorruptStoreError, StoreBusyError, StoreError
from ragkv.store import Holder, Store
from ragkv.store.environment import LOCK_FILE, RWLock

COMMON = """
import os, signal, sys
import torch
from storekit import big, equal
from ragkv.errors import *
from ragkv.store import Store
path = sys.argv[1]
"""


def may_be_entered(folder: Path) -> bool:
    return all(path.stat().st_mode & 0o001 for path in (folder, *folder.parents))


@contextmanager
def open_folder() -> Iterator[Path | None]:
    """A folder that every user of the machine may enter, for tests that drop root privileges.

    None if no temporary folder is open to all: TMPDIR may be private, and pytest's own folders are.
    """
    for place in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if Path(place).is_dir() and may_be_entered(Path(place).resolve()):
            with tempfile.TemporaryDirectory(dir=place) as folder:
                Path(folder).chmod(0o755)
                yield Path(folder)
            return
    yield None


def process(script: str, path: Path) -> CliChild:
    return CliChild(path, program=COMMON + script)


def python(script: str, path: Path) -> str:
    """Run the code in a new process and return its output."""
    code, out, errors = process(script, path).end()
    assert code == 0, errors
    return out


def test_readers_and_growth_in_threads(tmp_path):
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


def test_a_reader_follows_the_growth_of_another_process(tmp_path):
    Store.create(tmp_path, map_size=256 << 10).close()
    script = """
store = Store.open(path)
for line in sys.stdin:
    identity, kv = big(int(line))
    print(equal(store.get_kv(identity), kv), flush=True)
store.stage_kv([big(99)])
"""
    reader = process(script, tmp_path)
    with Store.open(tmp_path) as store:
        for n in range(4):
            store.stage_kv([big(n)])
            reader.say(f"{n}")
            assert reader.line() == "True\n"
        assert reader.end() == (0, "", "")
        assert store.has_kv(big(99)[0])  # the other process wrote after our growth, and did not undo it


def test_stores_of_a_path_share_one_environment(tmp_path):
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


def test_a_closed_store_says_so(store):
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.stats()


def test_an_interrupt_on_the_way_into_a_transaction_ends_it(store, monkeypatch):
    """Otherwise closing the store would wait for the transaction forever."""
    enter = RWLock.enter

    def interrupted(*given: object) -> None:
        enter(*given)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RWLock, "enter", interrupted)
        for call in (store.stats, store._live().check_pages):
            with pytest.raises(KeyboardInterrupt):
                call()
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


def test_an_interrupt_while_readers_are_waited_for_shuts_nobody_out(tmp_path):
    """While the map waits to grow, and while the store waits to close; it can be closed later."""
    script = """
import threading, time
signal.alarm(600)
store = Store.create(path)
identity, kv = big(1)
store.stage_kv([(identity, kv)])
held, free = threading.Event(), threading.Event()
def read():
    with store._live().read():
        held.set()
        free.wait(600)
reader = threading.Thread(target=read)
reader.start()
held.wait(600)
shared = store._live()._map
def press():
    while not shared.rwlock._shut:
        time.sleep(0.001)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
for wait in (lambda: shared.resize(1), store.close):
    threading.Thread(target=press).start()
    try:
        wait()
    except KeyboardInterrupt:
        print("interrupted", equal(store.get_kv(identity), kv))
free.set()
reader.join()
store.close()
print("closed", shared.env)
with Store.open(path) as again:
    print(again.has_kv(identity))
"""
    assert python(script, tmp_path) == "interrupted True\ninterrupted True\nclosed None\nTrue\n"


def test_a_map_that_the_process_has_no_room_for_is_said_and_the_old_one_kept(tmp_path):
    """LMDB unmaps the old map first, so without a fallback nothing could be read any more."""
    script = """
import resource
from pathlib import Path
store = Store.create(path)
identity, kv = big(1)
store.stage_kv([(identity, kv)])
assert equal(store.get_kv(identity), kv)  # with all that is loaded for it
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
_, most = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), most))
try:
    store._live()._map.resize(1 << 30)
except StoreError as error:
    print("ulimit -v" in str(error))
resource.setrlimit(resource.RLIMIT_AS, (most, most))
print(equal(store.get_kv(identity), kv))
store._live()._map.resize(1 << 30)
print(equal(store.get_kv(identity), kv))
"""
    assert python(script, tmp_path) == "True\nTrue\nTrue\n"


def test_a_fork_opens_its_own(tmp_path):
    """While other threads read, as in a server that forks a worker."""
    script = """
import threading
store = Store.create(path)
identity, kv = big(1)
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


@pytest.mark.parametrize(("version", "advice"), [(b"5", "upgrade"), (b"3", "ingest again")])
@pytest.mark.parametrize("readonly", [False, True])
def test_another_format_is_refused(store, version, advice, readonly):
    store.close()
    with lmdb.open(str(store.directory), max_dbs=9) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            txn.put(b"format", version, db=meta)
    for _ in range(2):  # a refusal leaves nothing open
        with pytest.raises(StoreError, match=advice):
            Store.open(store.directory.parent, readonly=readonly)


@pytest.mark.parametrize("readonly", [False, True])
def test_a_foreign_environment_is_refused(tmp_path, readonly):
    (tmp_path / "store").mkdir()
    lmdb.open(str(tmp_path / "store")).close()
    with pytest.raises(CorruptStoreError, match="no finished store"):
        Store.open(tmp_path, readonly=readonly)


def test_an_unfinished_creation_is_taken_up(tmp_path):
    (tmp_path / "store").mkdir()
    lmdb.open(str(tmp_path / "store")).close()
    with Store.create(tmp_path) as store:
        assert store.stats().documents == 0


def test_create_and_open_say_what_is_wrong(tmp_path):
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


def test_a_folder_may_have_any_name(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9\n")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("the file system takes UTF-8 names only")
    with Store.create(folder) as store:
        store.maintenance.copy(folder / "copy", compact=True)
    assert Store.exists(folder / "copy")


def test_no_permission_is_said():
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


# ---- process

READERS = """
def put(store, n):
    "Replaces 1 MB."
    store.keep_kv(big(0, 500)[0], big(n, 500)[1])

def churn(store, times=10):
    "Pages of the file after so many replacements."
    for n in range(times):
        put(store, n)
    return store._live()._map.live().info()["last_pgno"]

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


def test_a_killed_reader_holds_back_no_pages(tmp_path):
    """A live reader does hold pages back, which validates the measurement; the next open frees a dead reader's slot."""
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
store.close()
path += "/small"  # a writer frees the slot before the map grows
store = Store.create(path, map_size=16 << 20)
churn(store)
pid, pipe = child(pinning)
os.read(pipe, 5)
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
churn(store, 60)
print("freed", store.stats().map_bytes >> 20)
"""
    assert python(READERS + script, tmp_path) == "freed 16\n"


def test_a_full_table_of_readers_is_said_and_dead_ones_make_room(tmp_path):
    script = """
store = Store.create(path)
put(store, 1)
def many(own, say):
    held = [own._live()._map.live().begin() for _ in range(512)]
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
    message = python(READERS + script, tmp_path).splitlines()
    assert message == [*["/store is being read 512 times at once, which is the limit: "
                      "end some of the processes or threads that read it, and try again"] * 2, "1"]  # fmt: skip


def test_reads_without_a_lock_notice_a_writer_that_overtakes_them():
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
        message = python(READERS + script, folder).splitlines()
    assert message == ["whole", "whole", "overtaken: True", "not written"]


# ---- lock

NOBODY = (1 << 31) - 1  # larger than any system's process ids, so never in use
TIME = r"(\d{4}-\d\d-\d\d )?\d\d:\d\d"  # with the date if it was before midnight
HOLD = """
with Store.open(path) as store, store.writing("ragkv ingest docs/"):
    print("holding", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def other(store: Store) -> Iterator[CliChild]:
    """Another process that holds the lock until it reads a line."""
    child = process(HOLD, store.directory.parent)
    assert child.line() == "holding\n"
    yield child
    child.process.kill()
    child.end()


class Clock:
    """A clock that only sleeping advances."""

    now = 0.0
    time, localtime, strftime = map(staticmethod, (time.time, time.localtime, time.strftime))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_busy_store_names_its_holder(store, other, monkeypatch):
    monkeypatch.setattr("ragkv.store.environment.time", Clock())
    holder = store.writer()
    assert holder is not None
    assert (holder.pid, holder.host, holder.command) == (other.process.pid, socket.gethostname(), "ragkv ingest docs/")
    result: list[Holder] = []
    for timeout in (0, 0.2):
        with (
            pytest.raises(StoreBusyError, match=rf"PID {other.process.pid} \(ragkv ingest docs/, since {TIME}\)"),
            store.writing("ragkv gc", timeout=timeout, on_wait=result.append),
        ):
            pytest.fail("two at once")
    assert result == [holder]  # without a timeout, not called; with one, called once


def test_single_transactions_do_not_wait(store, other):
    write(store, "a", (1, 2))
    assert put_kv(store, identity(1, 2, prefix_ids=(9,)), kv_of(identity(1, 2, prefix_ids=(9,))), "a#0")
    store.keep_kv(identity(9), kv_of(identity(9)))
    store.put_meta("a", 1)
    assert store.stats().kv_records == 3
    assert other.process.is_alive()


SUSPENDED = """
def suspend(txn):
    txn.put("meta", b"fact/late", b"1")
    print("inside", flush=True)
    sys.stdin.readline()

with Store.open(path) as store, store.writing("ragkv ingest docs/"):
    store._live().write(suspend)
"""


@pytest.fixture
def suspended(store: Store) -> Iterator[CliChild]:
    """Another process, stopped within a transaction that sets a fact. The store of this process is closed."""
    store.put_meta("a", 1)
    store.close()
    child = process(SUSPENDED, store.directory.parent)
    assert child.line() == "inside\n"
    os.kill(child.process.pid, signal.SIGSTOP)
    yield child
    child.process.kill()
    child.process.join()


def test_a_suspended_writer_does_not_stop_readers(store, suspended, monkeypatch):
    monkeypatch.setattr("ragkv.store.environment.time", Clock())
    with Store.open(store.directory.parent) as own:
        assert not own.readonly
        assert (own.get_meta("a"), own.get_meta("late")) == (1, None)
        holder = rf"PID {suspended.process.pid} \(ragkv ingest docs/, since {TIME}\) .* may be suspended"
        for _ in range(2):
            with pytest.raises(StoreBusyError, match=holder):
                own.put_meta("b", 2)
        os.kill(suspended.process.pid, signal.SIGCONT)
        suspended.say("")
        assert suspended.end()[0] == 0
        own.put_meta("b", 2)  # now it is opened for writing
        assert [own.get_meta(name) for name in ("a", "late", "b")] == [1, 1, 2]


def test_a_writer_that_is_killed_in_its_turn_leaves_it_to_others(store, suspended):
    with Store.open(store.directory.parent) as own:
        suspended.end(signal.SIGKILL)
        own.put_meta("b", 2)
        assert [own.get_meta(name) for name in ("a", "late", "b")] == [1, None, 2]


@pytest.mark.parametrize("end", ["released", "killed"])
def test_the_lock_ends_with_its_holder(store, other, end):
    def stop(_: Holder) -> None:
        if end == "killed":
            other.process.kill()
        else:
            other.say("")

    result: list[str] = []
    with store.writing("ragkv gc", on_wait=lambda holder: (result.append(str(holder)), stop(holder))):
        assert len(result) == 1
        assert re.fullmatch(rf"PID {other.process.pid} \(ragkv ingest docs/, since {TIME}\)", result[0])
        mine = store.writer()
        assert mine is not None
        assert (mine.pid, mine.command) == (os.getpid(), "ragkv gc")
    assert store.writer() is None
    other.process.join(600)
    assert other.process.exitcode == (-signal.SIGKILL if end == "killed" else 0)


def test_stores_and_threads_of_one_process_exclude_each_other(store):
    inside, most, lock = 0, 0, threading.Lock()

    def work(own: Store) -> None:
        nonlocal inside, most
        for _ in range(5):
            with own.writing("ragkv gc", on_wait=lambda _: None), own.writing("nested", timeout=0):
                with lock:
                    inside += 1
                    most = max(most, inside)
                time.sleep(0.001)
                with lock:
                    inside -= 1

    with Store.open(store.directory.parent) as second:
        threads = [threading.Thread(target=work, args=[own]) for own in (store, store, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert most == 1
        with store.writing("ragkv gc"), pytest.raises(StoreBusyError, match=f"PID {os.getpid()} "):
            second.writing("ragkv compact", timeout=0).__enter__()


FORK = """
def free():
    try:
        with Store.open(path) as own, own.writing("ragkv repair", timeout=0):
            return True
    except StoreBusyError:
        return False

store = Store.open(path)
with store.writing("ragkv gc"):
    idle = os.fork()
    if idle == 0:
        signal.pause()
    nested = os.fork()
    if nested == 0:
        print("the child finds it free:", free(), flush=True)
    else:
        assert os.waitpid(nested, 0)[1] == 0
        print("held after the child left the block:", store.writer().pid == os.getpid(), flush=True)
if nested == 0:  # it left the block that only its parent had entered
    os._exit(0)
print("free again, though a child lives that was forked inside:", free())
os.kill(idle, signal.SIGKILL)
"""


def test_a_fork_neither_inherits_the_lock_nor_takes_it_away(store):
    store.close()
    assert python(FORK, store.directory.parent).splitlines() == [
        "the child finds it free: False",
        "held after the child left the block: True",
        "free again, though a child lives that was forked inside: True",
    ]


@pytest.mark.parametrize("content", ["", "{", '{"pid": 1}', "dead"])
def test_what_a_killed_holder_left_in_the_file_names_nobody(store, content, monkeypatch):
    """Only the current holder's name counts: here the holder has not written its name yet."""
    monkeypatch.setattr("ragkv.store.environment.time", Clock())
    if content == "dead":
        content = json.dumps({"pid": NOBODY, "host": socket.gethostname(), "command": "x", "since": 0})
    with store.writing("ragkv gc"), Store.open(store.directory.parent) as second:
        (store.directory / LOCK_FILE).write_text(content)
        assert second.writer() is None
        with pytest.raises(StoreBusyError, match="another process"):
            second.writing("ragkv repair", timeout=0).__enter__()


def test_a_replaced_lock_file_is_not_held(store):
    path = store.directory / LOCK_FILE
    with store.writing("ragkv gc"), Store.open(store.directory.parent) as second:
        path.rename(path.with_suffix(".old"))
        with second.writing("ragkv repair", timeout=0):
            assert path.exists()


def test_the_lock_is_freed_and_names_its_holder(store):
    with pytest.raises(KeyboardInterrupt), store.writing("ragkv gc"):
        raise KeyboardInterrupt
    assert store.writer() is None
    with store.writing("ragkv gc", timeout=0):
        pass
    with (
        Store.open(store.directory.parent, readonly=True) as opened,
        pytest.raises(StoreError, match="read-only"),
    ):
        opened.writing("ragkv gc").__enter__()
    text = str(Holder(pid=7, host="elsewhere", command="ragkv gc", since=0.0))
    assert re.fullmatch(r"PID 7 on elsewhere \(ragkv gc, since 19(70|69)-\d\d-\d\d \d\d:\d\d\)", text)


def test_a_disk_that_fails_hides_no_error_and_keeps_no_lock(store, monkeypatch):
    truncate, calls = os.ftruncate, itertools.count()

    def once(*given: int) -> None:
        if next(calls):  # when the name is taken back
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        truncate(*given)

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", once)
        with pytest.raises(KeyboardInterrupt), store.writing("ragkv gc"):
            raise KeyboardInterrupt
    with store.writing("ragkv gc", timeout=0):
        pass


# ---- truncation


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A closed index of one document."""
    with Store.create(tmp_path / "index", map_size=1 << 20) as store:
        write(store, "a", *((n,) * 50 for n in range(1, 40)))
    return tmp_path / "index"


def used(index: Path) -> int:
    with Store.open(index, readonly=True) as store, store._live().read():
        return int((store._live()._map.env.info()["last_pgno"] + 1) * 4096)


def test_a_file_that_is_cut_while_it_is_open(cut, tmp_path):
    cases = [("data.mdb", size) for size in (0, 1, 4096, used(cut) // 2, used(cut) - 4096)] + [("lock.mdb", 0)]

    def use_each() -> None:
        for number, (readonly, (name, size)) in enumerate(itertools.product((True, False), cases)):
            print(f"{name} of {size} bytes, read-only: {readonly}", flush=True)  # the last line if the process dies
            use_a_cut_file(shutil.copytree(cut, tmp_path / str(number)), readonly, name, size)

    assert in_child(use_each) == 0


def use_a_cut_file(index: Path, readonly: bool, name: str, size: int) -> None:
    with Store.open(index, readonly=readonly) as store:
        uses: list[Callable[[], object]] = [
            *(lambda: list(store.documents()), lambda: store.text("a"), store.stats, store.maintenance.verify),
            *(
                lambda: store.maintenance.copy(index / "copy"),
                lambda: store.maintenance.copy(index / "compacted", compact=True),
            ),
            *(lambda: store.generation,),
        ]
        if not readonly:
            uses += [lambda: store.put_meta("a", 1), lambda: store.delete_document("a")]
        assert store.text("a")
        os.truncate(index / "store" / name, size)
        for use in uses:
            with pytest.raises(StoreError, match=rf"{re.escape(name)}.*(too|cut) short|(too|cut) short.*{name}"):
                use()
    assert (index / "store" / name).stat().st_size == size, "a writer has made it long again"


def test_room_behind_the_last_page_is_no_loss(cut):
    size = used(cut)
    with Store.open(cut) as store:
        os.truncate(cut / "store" / "data.mdb", size)
        assert store.text("a")
        store.put_meta("a", 1)
    with Store.open(cut) as store:
        assert store.get_meta("a") == 1
        assert store.maintenance.verify().ok


def test_a_file_that_is_replaced_or_moved_while_it_is_open(cut, tmp_path):
    with Store.open(cut) as store:
        store.maintenance.copy(tmp_path / "copy", compact=True)
        copied = tmp_path / "copy" / "store" / "data.mdb"
        copied.replace(cut / "store" / "data.mdb")
        for use in (lambda: store.text("a"), lambda: store.put_meta("a", 1), lambda: store.maintenance.verify()):
            with pytest.raises(StoreError, match="was replaced while it was open: open the index again"):
                use()
    with Store.open(cut) as store:
        assert store.text("a")
        cut.rename(tmp_path / "moved")
        with pytest.raises(StoreError, match="moved or deleted"):
            store.text("a")
    with Store.open(tmp_path / "moved") as store:
        assert store.maintenance.verify().ok
        shutil.rmtree(tmp_path / "moved")
        with pytest.raises(StoreError, match="moved or deleted"):
            store.text("a")


def test_a_file_that_others_make_longer_is_no_false_alarm(tmp_path):
    """Everything that a reader finds while the map grows is complete and belongs to its document."""
    script = """
from expected import operation, perform
with Store.open(path) as store:
    print(flush=True)
    for number in range(40):
        perform(store, operation(number))
    perform(store, operation(40, "write") | {"tokens": [[1, 2, 3]]})
"""
    Store.create(tmp_path / "index", map_size=128 << 10).close()
    with Store.open(tmp_path / "index", readonly=True) as store:
        first, result = store.stats().map_bytes, 0
        child = process(script, tmp_path / "index")
        assert child.line() == "\n"
        writing = True
        while writing:
            writing = child.process.is_alive()  # read once more after it ends
            for stored in store.documents():
                for chunk in store.chunks(stored.document.document_id):
                    of = identity(*chunk.token_ids)
                    kv = store.get_kv(of)
                    if kv is not None:  # None: replaced in the meantime
                        assert equal(kv, expected.kv_of(of, int(kv.keys[0][0, 0, 0])))
                        result += 1
        assert child.end() == (0, "", "")
        assert result > 0
        assert store.stats().map_bytes > first


def test_the_directory_of_the_process_may_change(cut, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with Store.open("index", readonly=True) as store:
        monkeypatch.chdir(Path("/"))
        assert store.text("a")
