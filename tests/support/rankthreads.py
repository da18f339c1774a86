"""Ranks as threads of one process: real gloo groups over an in-memory store."""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from ragkv.distributed.group import Handshake, Peers, RankGroup

WAIT = 600.0
"""Seconds: a generous limit that only ends a hung test."""


def in_threads(work: Callable[..., Any], given: Collection[Any]) -> list[Any]:
    """Run `work` for each item in a thread; returns the results, or raises the first error after all have ended."""
    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(work, given))


def on_ranks(size: int, work: Callable[[RankGroup], Any], *, timeout: float = WAIT) -> list[Any]:
    """Run `work` on each of `size` ranks; returns the results, or raises the first error."""
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

    in_threads(run, range(size))
    if errors:
        raise errors[0]
    return found
