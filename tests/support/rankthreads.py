"""Ranks as threads of one process: real gloo groups over an in-memory store, without a process for each."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ragkv.distributed.group import Handshake, Peers, RankGroup

WAIT = 600.0
"""Seconds: generous, for what never comes in a test that passes."""


def on_ranks(size: int, work: Callable[[RankGroup], Any], *, timeout: float = WAIT) -> list[Any]:
    """What `work` returns on each of `size` ranks; the first error of any is raised."""
    store = dist.HashStore()
    found: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        peers = None
        try:
            peers = Peers.meet(store, rank, size, Handshake(same={}), timeout=WAIT)
            group = RankGroup(store, rank, size, peers, timeout=timeout, device=torch.device("cpu"))
            found[rank] = work(group)
        except BaseException as error:
            errors.append(error)
            if peers is not None:
                peers.notify(str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found
