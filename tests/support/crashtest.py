"""Kill writers and check what they leave: RocksDB's db_crashtest for the store.

python tests/support/crashtest.py --seed 1 --random 100 --fresh 20 --rounds 5

This process imports everything and opens no store. It forks a writer, which announces and acknowledges each operation
over a pipe. The writer is killed from outside at a random moment, or kills itself at a named point. A forked checker
then compares the store with the acknowledged operations: the operation in flight may be present or absent, but not
partial. Then the next writer continues with the same store.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from expected import Expected, observe, operation, perform
from storecheck import problems

import ragkv.store.environment as environment
import ragkv.store.record as record
import ragkv.store.store as kvstore
from ragkv.store import Raw, Store, Zstd
from ragkv.store.tables import Transaction
from ragkv.util.plugins import kernel_module

MAP_BYTES = 128 << 10
POINTS: dict[str, tuple[object, str, str]] = {
    # name: the wrapped function, and whether the writer dies before or after the call, or inside its callback
    "create: directory made": (environment.Database, "acquire", "before"),
    "create: environment made": (environment.Database, "_create_tables", "before"),
    "create: between two tables": (environment.Database, "_table", "before"),
    "create: done": (kvstore.Store, "create", "after"),
    "write: before the file is extended": (environment.os, "truncate", "before"),
    "write: after the file is extended": (environment.os, "truncate", "after"),
    "write: between two puts": (Transaction, "put", "before"),
    "write: between two deletes": (Transaction, "delete", "after"),
    "write: references released": (Transaction, "release", "after"),
    "write: a record dropped": (Transaction, "drop_record", "after"),
    "write: begun, not applied": (environment.Database, "write", "in"),
    "write: applied, not committed": (environment.Database, "write", "end"),
    "write: committed, not acknowledged": (environment.Database, "write", "after"),
    "evict: a record is gone": (Transaction, "evict", "after"),
    "stage: between two batches": (kvstore.Store, "_stage", "after"),
    "resize: before": (environment.FileMap, "resize", "before"),
    "resize: in it": (environment.RWLock, "reopen", "before"),
    "resize: after": (environment.FileMap, "resize", "after"),
}
"""Points at whose n-th call a writer kills itself. The product has no hooks: the writer wraps its own methods."""


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def arm(point: str, calls: int) -> None:
    """Make this process kill itself at this call of the point."""
    owner, name, when = POINTS[point]
    original: Callable[..., Any] = getattr(owner, name)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls -= 1
        if calls == 0 and when == "before":
            die()
        if calls == 0 and when in ("in", "end"):
            apply = args[1]
            args = (args[0], lambda txn: (when == "in" and die(), apply(txn), die()))
        result = original(*args, **kwargs)
        if calls == 0:
            die()
        return result

    setattr(owner, name, staticmethod(deadly) if name in ("acquire", "create") else deadly)


def write(path: Path, say: Callable[[object], None], first: int, count: int) -> None:
    """The writer: `count` operations from number `first` on, each announced and acknowledged."""
    kvstore.STAGE_BYTES = 20_000  # many batches
    record.SEGMENT_BYTES = record.JOINT_BYTES = 8192  # many segments
    codec = Zstd() if first % 3 == 0 else Raw()
    say({"started": os.getpid()})
    with Store.create(path, map_size=MAP_BYTES, codec=codec, exist_ok=True) as store, store.writing("w", timeout=5):
        say({"opened": True})
        store.set_budget(None)  # a writer may have been killed before it reported an eviction
        for number in range(first, first + count):
            todo = operation(number)
            say({"begin": todo})
            say({"done": number, "answer": perform(store, todo)})


def check(path: Path, say: Callable[[object], None], allowed: list[Expected]) -> None:
    """The checker: which of the allowed states is found, or all differences."""
    with Store.create(path, exist_ok=True) as store, store.writing("check", timeout=5):
        found, seen = problems(store), observe(store)
    views = [state.view() for state in allowed]
    wrong = [] if seen in views else [_difference(seen, view) for view in views]
    state = max((n for n, view in enumerate(views) if view == seen), default=None)
    say({"problems": found, "wrong": wrong, "state": state})


def _difference(seen: dict[str, Any], view: dict[str, Any]) -> str:
    return "; ".join(f"{part}: found {seen[part]!r}, not {view[part]!r}" for part in seen if seen[part] != view[part])


@dataclass
class Child:
    """A forked process, and the lines that it sends."""

    pid: int
    pipe: int
    lines: list[dict[str, Any]] = field(default_factory=list)
    _rest: bytes = b""

    @classmethod
    def fork(cls, work: Callable[..., None], *arguments: Any, point: tuple[str, int] | None = None) -> Child:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writing)
            return cls(pid, reading)
        try:
            os.close(reading)
            if point is not None:
                arm(*point)
            with os.fdopen(writing, "wb", buffering=0) as pipe:
                work(arguments[0], lambda line: pipe.write(json.dumps(line).encode() + b"\n"), *arguments[1:])
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)

    def listen(self, until: float, word: str | None = None) -> bool:
        """Read lines until a deadline; False at the child's end. Returns at once when `word` was received."""
        while (left := until - time.monotonic()) > 0 and not (word and any(word in line for line in self.lines)):
            if select.select([self.pipe], [], [], left)[0]:
                data = os.read(self.pipe, 65536)
                if not data:
                    return False
                *whole, self._rest = (self._rest + data).split(b"\n")
                self.lines += map(json.loads, whole)
        return True

    def end(self, signal_number: int | None = None) -> int:
        """Kill the process if a signal is given, read its remaining lines, and return its exit status."""
        if signal_number is not None:
            os.kill(self.pid, signal_number)
        if self.listen(time.monotonic() + 600):
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"the process did not end: {self.lines[-2:]}")
        os.close(self.pipe)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Harness:
    """One store, and any number of killed writers."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.expected = Expected()
        self.number = 1 + seed * 100_000 % 10_000_000  # exact in float32
        self.count: Counter[str] = Counter()

    def kill_at_random(self, draw: random.Random) -> None:
        child = Child.fork(write, self.path, self.number, 1 << 60)  # until it is killed, however late
        word = draw.choice(["started", "opened", "opened", "opened"])
        assert child.listen(time.monotonic() + 600, word), child.lines
        child.listen(time.monotonic() + draw.uniform(0, 0.02 if word == "started" else draw.choice([0.1, 0.4])))
        self._look(child.end(signal.SIGKILL), child, f"random, after {word}")

    def kill_at(self, point: str, calls: int) -> bool:
        """Kill a writer at a point; False if it ended without reaching the point this often."""
        child = Child.fork(write, self.path, self.number, 30, point=(point, calls))
        code = child.end()
        self._look(code, child, point)
        return code == -signal.SIGKILL

    def go_on(self) -> None:
        """Run a writer that is not killed."""
        child = Child.fork(write, self.path, self.number, 8)
        self._look(child.end(), child, "undisturbed")

    def _look(self, code: int, child: Child, how: str) -> None:
        assert code in (0, -signal.SIGKILL), child.lines
        pending = None
        for line in child.lines:
            if "begin" in line:
                pending = line["begin"]
                self.number = pending["number"] + 1
            elif "done" in line:
                assert pending is not None
                self.expected, answer = self.expected.after(pending)
                assert answer == line["answer"], f"{pending} answered {line['answer']}"
                self.count["acknowledged"] += 1
                pending = None
        allowed = [self.expected] if pending is None else list(self.expected.during(pending))
        checker = Child.fork(check, self.path, allowed)
        assert checker.end() == 0, f"after {how}: {checker.lines}"
        (answer,) = checker.lines
        assert not answer["problems"], f"after {how}, in {pending}: {answer['problems']}"
        assert not answer["wrong"], f"after {how}, in {pending}: {answer['wrong']}"
        self.expected = allowed[answer["state"]]
        if code:
            self.count["kills"] += 1
            self.count[how] += 1
            self.count["in an operation"] += pending is not None
            self.count["in an operation, which is there"] += pending is not None and answer["state"] == len(allowed) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--random", type=int, default=0, help="kills at random moments, one store through all")
    parser.add_argument("--fresh", type=int, default=0, help="the same, a new store for each")
    parser.add_argument("--rounds", type=int, default=0, help="kills at each named point, a new store for each")
    options = parser.parse_args()
    if kernel := kernel_module("ragkv.store.read_kernel"):
        kernel.copy_checked([], np.empty(0, np.uint8))  # compile it here, not in each process that reads KV
    draw = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp())
    total: Counter[str] = Counter()
    try:
        stores = [Harness(folder / "long", options.seed)]
        for _ in range(options.random):
            stores[0].kill_at_random(draw)
        stores[0].go_on()
        for n in range(options.fresh):
            stores.append(Harness(folder / f"fresh {n}", options.seed + n + 1))
            stores[-1].kill_at_random(draw)
            stores[-1].go_on()
        for n in range(options.rounds):
            for place, point in enumerate(POINTS):
                stores.append(Harness(folder / f"{n} {place}", options.seed + 17 * n + place))
                calls = 1 if n == 0 else draw.randrange(1, 3 + 40 * ("between" in point))
                if not stores[-1].kill_at(point, calls):
                    assert calls > 1, f"never reached: {point}"
                    total["ended before the point"] += 1
                stores[-1].go_on()
        for store in stores:
            total.update(store.count)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(total))


if __name__ == "__main__":
    sys.exit(main())
