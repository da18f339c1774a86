"""The processors of this process, how many of them other programs leave idle, and the threads that compute.

`import ragkv` makes OpenMP's threads sleep soon when they wait. A command also uses only as many threads as processors
are idle (docs/operations.md, "A busy machine"); the Python API leaves torch's number of threads as it is.
"""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from ragkv.util.lazy import torch_if_loaded

_POLICY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""The variables by which a user says how OpenMP's threads wait."""
COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""The variables by which a user says how many there are."""
_SPINS = "10000"
"""How often GNU's OpenMP polls before a thread sleeps: for 0.1 ms, a thirtieth of its default. On idle processors a
prefill of 256 tokens takes 1 % longer (6 % without polling), beside a busy process 1.2 times as long as on one thread.
"""
_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LEAST_SECONDS, _MOST_SECONDS = 0.1, 30.0
"""Over how long the use of the processors is measured: the system counts it in steps of 10 ms."""


def sleep_soon() -> None:
    """Make OpenMP's threads sleep soon when they wait, unless the user chose how they wait.

    By default they spin for milliseconds, which on a busy machine keeps a processor from the thread that they wait for.
    OpenMP reads the variables once, when torch is imported.
    """
    if os.environ.keys().isdisjoint(_POLICY):
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": _SPINS}


def cores() -> int:
    """The number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def granted() -> float:
    """How many processors' time the control groups of the process, or of its container, grant it."""
    group, own = _GROUPS
    limits = [(group / "cpu/cpu.cfs_quota_us", group / "cpu/cpu.cfs_period_us")]  # of version 1
    with suppress(OSError):
        group /= own.read_text().rpartition("0::/")[2].strip()
    least = math.inf
    for files in (*limits, *((folder / "cpu.max",) for folder in (group, *group.parents))):
        with suppress(OSError, ValueError):  # there is no such group, or its limit is "max"
            quota, period = map(int, " ".join(file.read_text() for file in files).split())
            least = min(least, quota / period) if quota > 0 else least
    return least


def _usage() -> tuple[float, float]:
    """The time, and for how many seconds other programs have used this process's processors (0 if it is not known).

    Programs of lower priority do not count, because they make way; time that the hypervisor took does.
    """
    used = -sum(os.times()[:4])
    if not hasattr(os, "sched_getaffinity"):
        return time.monotonic(), used
    with suppress(OSError, ValueError):
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name in names:
                user, nice, system, _idle, _waiting, irq, soft, steal = map(int, ticks[:8])
                shared = nice if os.nice(0) > 0 else 0
                used += (user + shared + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), used


class _Watch:
    """A measurement that has begun. `idle` is whether the number of threads follows the idle processors."""

    def __init__(self, *, idle: bool) -> None:
        self.idle = idle
        self.begun = _usage()

    def idle_cores(self) -> float:
        """How many processors other programs left idle since, or in the last moment if that is long ago."""
        (begun, used), (now, used_now) = self.begun, _usage()
        if not _LEAST_SECONDS <= now - begun <= _MOST_SECONDS:
            (begun, used) = now, used_now
            time.sleep(_LEAST_SECONDS)
            now, used_now = _usage()
        return min(float(cores()), cores() - (used_now - used) / (now - begun))


_watch: _Watch | None = None
_idle: float | None = None
_unfitted: int | None = None
"""How many threads the measurement allows, until torch knows."""


def watch_processors(*, idle: bool = True) -> None:
    """Begin to measure what `fit_threads` needs, unless variables of OpenMP or MKL say how many threads there are.

    Without `idle`, for a process that outlives the present load, threads are as many as processors are granted.
    """
    global _watch
    _watch = _Watch(idle=idle) if os.environ.keys().isdisjoint(COUNTS) else None


def fit_threads() -> None:
    """Let torch use as many threads as processors are idle, once, when a command loads its first model."""
    global _unfitted
    _measure()
    if _unfitted is None:
        return
    import torch

    threads, _unfitted = _unfitted, None
    if threads < torch.get_num_threads():  # else what torch chose, such as one thread for two of a core
        torch.set_num_threads(threads)


def thread_count() -> int:
    """The threads of a runtime other than torch: as many as variables name, else as many as processors are idle."""
    _measure()
    if (torch := torch_if_loaded()) is not None:
        fit_threads()
        return int(torch.get_num_threads())
    named = next((os.environ[name] for name in COUNTS if name in os.environ), "")
    return int(named) if named.isdecimal() and int(named) else _unfitted or cores()


def _measure() -> None:
    global _watch, _idle, _unfitted
    if _watch is not None:
        watch, _watch = _watch, None
        _idle = watch.idle_cores()
        _unfitted = max(1, math.ceil(min(cores(), granted(), round(_idle) if watch.idle else math.inf)))


def use_threads(threads: int) -> None:
    """Use so many threads, also in processes that this one starts."""
    global _watch, _unfitted
    _watch = _unfitted = None
    os.environ |= dict.fromkeys(COUNTS, str(threads))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def describe() -> str:
    """The processors and threads of this process, for `ragkv doctor`."""
    import torch

    number, threads = cores(), torch.get_num_threads()
    idle = "" if _idle is None else f", {max(0.0, _idle):.1f} idle"
    policy = next((f", {name}={os.environ[name]}" for name in _POLICY if name in os.environ), "")
    return f"{number} core{'s' * (number != 1)}{idle}, {threads} thread{'s' * (threads != 1)}{policy}"
