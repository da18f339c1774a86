"""The processor time of each rank, where several encode a long document side by side: threads of this process."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist

from ragkv.distributed.group import Group
from ragkv.distributed.hello import Hello
from ragkv.distributed.lockstep import Lockstep
from ragkv.distributed.meeting import meet
from ragkv.distributed.watch import Watch
from ragkv.model.apb import Book

__all__ = ["rank_seconds"]

_PATIENCE = 3600.0
"""Seconds: ranks that share cores with other work wait long for each other, which is not counted."""


def rank_seconds(book: Book, ranks: int) -> list[float]:
    """Of each rank the time of its own thread, all that it computes; what it waits for the others is not in it.

    They speak gloo. Of a processor alone, with one thread of torch's for each rank.
    """
    store = dist.HashStore()  # type: ignore[attr-defined]
    seconds = [0.0] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        watch: Watch | None = None
        try:
            torch.set_num_threads(1)  # of this thread: others would not be in its time
            meeting = meet(store, rank, ranks, Hello(same={}), timeout=_PATIENCE)
            place = dist.PrefixStore(meeting.prefix, store)  # type: ignore[attr-defined]
            watch = Watch(place, rank, meeting.hellos, gone=_PATIENCE)
            group = Group(place, rank, ranks, watch, timeout=_PATIENCE, device=book.model.device)
            started = time.thread_time()
            for _ in Lockstep(group).run(book):
                continue
            seconds[rank] = time.thread_time() - started
            group.gather(torch.zeros(1))  # nobody leaves while another is at work
        except BaseException as error:
            errors.append(error)
            if watch is not None:
                watch.tell(str(error))
        finally:
            if watch is not None:
                watch.close()

    threads = [threading.Thread(target=run, args=(rank,), name=f"ragkv-bench-rank-{rank}") for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return seconds
