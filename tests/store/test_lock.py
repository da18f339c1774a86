"""One long writing job at a time: the next one waits and says for whom, and nobody else waits at all."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ragkv.errors import StoreBusyError, StoreError
from ragkv.store import Holder, Store
from ragkv.store.lock import LOCK_FILE

NOBODY = (1 << 31) - 1  # beyond what any system numbers its processes with, so never taken again
TIME = r"(\d{4}-\d\d-\d\d )?\d\d:\d\d"  # with the day when it was before midnight
HOLD = """
import os, sys
from ragkv.store import Store
with Store.open(sys.argv[1]) as store, store.writing("ragkv ingest docs/"):
    print("holding", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def other(store: Store) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until it reads a line."""
    command = [sys.executable, "-c", HOLD, store.directory.parent]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        yield process
        process.kill()


class Clock:
    """Goes on by what is slept, and by nothing else."""

    now = 0.0
    time, localtime, strftime = map(staticmethod, (time.time, time.localtime, time.strftime))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_busy_store_names_its_holder(
    store: Store, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.store.lock.time", Clock())
    holder = store.writer()
    assert holder is not None
    assert (holder.pid, holder.host, holder.command) == (other.pid, socket.gethostname(), "ragkv ingest docs/")
    told: list[Holder] = []
    for timeout in (0, 0.2):
        with (
            pytest.raises(StoreBusyError, match=rf"PID {other.pid} \(ragkv ingest docs/, since {TIME}\)"),
            store.writing("ragkv gc", timeout=timeout, on_wait=told.append),
        ):
            pytest.fail("two at once")
    assert told == [holder]  # not at all with no time to wait; then once


def test_single_transactions_do_not_wait(
    store: Store, other: subprocess.Popen[str], write: Callable[..., object], kv_of: Callable, identity: Callable
) -> None:
    write(store, "a", (1, 2))
    assert store.put_kv(identity(1, 2, prefix_ids=(9,)), kv_of(identity(1, 2, prefix_ids=(9,))), chunk_id="a#0")
    store.keep_kv(identity(9), kv_of(identity(9)))
    store.put_meta("a", 1)
    assert store.stats().kv_records == 3
    assert other.poll() is None


@pytest.mark.parametrize("end", ["released", "killed"])
def test_the_lock_ends_with_its_holder(store: Store, other: subprocess.Popen[str], end: str) -> None:
    def stop(_: Holder) -> None:
        if end == "killed":
            other.send_signal(signal.SIGKILL)
        else:
            assert other.stdin is not None
            other.stdin.write("\n")
            other.stdin.flush()

    told: list[str] = []
    with store.writing("ragkv gc", on_wait=lambda holder: (told.append(str(holder)), stop(holder))):
        assert len(told) == 1
        assert re.fullmatch(rf"PID {other.pid} \(ragkv ingest docs/, since {TIME}\)", told[0])
        mine = store.writer()
        assert mine is not None
        assert (mine.pid, mine.command) == (os.getpid(), "ragkv gc")
    assert store.writer() is None
    assert other.wait(600) == (-signal.SIGKILL if end == "killed" else 0)


def test_stores_and_threads_of_one_process_exclude_each_other(store: Store) -> None:
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
import os, signal, sys
from ragkv.errors import StoreBusyError
from ragkv.store import Store

def free():
    try:
        with Store.open(sys.argv[1]) as own, own.writing("ragkv repair", timeout=0):
            return True
    except StoreBusyError:
        return False

store = Store.open(sys.argv[1])
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


def test_a_fork_neither_inherits_the_lock_nor_takes_it_away(store: Store) -> None:
    store.close()
    done = subprocess.run(
        [sys.executable, "-c", FORK, store.directory.parent], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.splitlines() == [
        "the child finds it free: False",
        "held after the child left the block: True",
        "free again, though a child lives that was forked inside: True",
    ]


@pytest.mark.parametrize("content", ["", "{", '{"pid": 1}', "dead"])
def test_what_a_killed_holder_left_in_the_file_names_nobody(store: Store, content: str) -> None:
    """The name belongs to whoever has the lock now, or to nobody: here one who is about to write it."""
    if content == "dead":
        content = json.dumps({"pid": NOBODY, "host": socket.gethostname(), "command": "x", "since": 0})
    with store.writing("ragkv gc"), Store.open(store.directory.parent) as second:
        (store.directory / LOCK_FILE).write_text(content)
        assert second.writer() is None
        with pytest.raises(StoreBusyError, match="another process"):
            second.writing("ragkv repair", timeout=0).__enter__()


def test_a_replaced_lock_file_is_not_held(store: Store) -> None:
    path = store.directory / LOCK_FILE
    with store.writing("ragkv gc"), Store.open(store.directory.parent) as second:
        path.rename(path.with_suffix(".old"))
        with second.writing("ragkv repair", timeout=0):
            assert path.exists()


def test_an_exception_frees_the_lock(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt), store.writing("ragkv gc"):
        raise KeyboardInterrupt
    assert store.writer() is None
    with store.writing("ragkv gc", timeout=0):
        pass


def test_a_read_only_store_has_no_writer(store: Store) -> None:
    with (
        Store.open(store.directory.parent, readonly=True) as opened,
        pytest.raises(StoreError, match="read-only"),
    ):
        opened.writing("ragkv gc").__enter__()


def test_a_holder_of_another_host_and_day_is_told_as_such() -> None:
    text = str(Holder(pid=7, host="elsewhere", command="ragkv gc", since=0.0))
    assert re.fullmatch(r"PID 7 on elsewhere \(ragkv gc, since 19(70|69)-\d\d-\d\d \d\d:\d\d\)", text)
