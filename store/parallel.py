"""Threads that share the work of a large read: checksums, copies and decompression all release the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

__all__ = ["share"]

MOST = 4
"""Threads on one read, including the caller's. With more of them, memory bandwidth is the limit."""

_lock = Lock()
_pool: ThreadPoolExecutor | None = None


def share(tasks: Sequence[Callable[[], None]]) -> None:
    """Run all tasks, in any order. The calling thread works too, and takes every task that no other has begun.

    On a busy machine nothing is lost: a helper that gets no processor time holds up one task at most. Returns, or
    raises what a task raised, only when no task is running any more.
    """
    rest = iter(tasks)  # threads may share the iterator of a list

    def work() -> None:
        for task in rest:
            task()

    helpers = _ask(work, min(_cores(), MOST, len(tasks)) - 1)
    try:
        work()
    finally:
        begun = [helper for helper in helpers if not helper.cancel()]
        errors = [error for helper in begun if (error := helper.exception()) is not None]
    for error in errors:
        raise error


def _ask(work: Callable[[], None], count: int) -> list[Future[None]]:
    global _pool
    if count < 1:
        return []
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(MOST - 1, thread_name_prefix="ragkv-read")
        pool = _pool
    try:
        return [pool.submit(work) for _ in range(count)]
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        return []


def _cores() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_child() -> None:
    """Start anew after a fork: threads do not survive it, and one of them may have held the lock."""
    global _pool, _lock
    _pool, _lock = None, Lock()


os.register_at_fork(after_in_child=_in_child)
