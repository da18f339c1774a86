"""The collectives that ranks answer with, each of which ends in bounded time, by a result or by a sentence."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ragkv.distributed.watch import EVERY, Watch
from ragkv.errors import RanksError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Group"]

MOST_BYTES = 1 << 28
"""What a rank may send of bytes at a time: candidates with their texts are far less."""


class Group:
    """`ragkv.attention.across.Ranks` over a process group of torch's: gloo on the processor, NCCL on GPUs.

    Tensors and plain bytes travel, never pickled objects. `sent` counts the bytes that this rank has put into
    collectives. Any method raises RanksError, with a sentence that names the rank at fault if that can be known, when a
    rank is gone, gives up, or keeps the others waiting longer than `timeout` seconds.
    """

    def __init__(
        self, store: Store, rank: int, size: int, watch: Watch, *, timeout: float, device: torch.device
    ) -> None:
        self.rank = rank
        self.size = size
        self.sent = 0
        self._watch = watch
        self._timeout = timeout
        self._device = device if device.type == "cuda" else torch.device("cpu")
        self._begun: Any = None  # what has not ended
        # its own limit is a net: a wait of ours ends first, and knows why
        limit = timedelta(seconds=2 * timeout + 10 * EVERY)
        try:
            self._backend: Any = _backend(store, rank, size, limit, self._device)
        except RuntimeError as error:
            raise watch.after_failure(error) from error

    def gather(self, mine: Tensor) -> Tensor:
        """Every rank's tensor, all of one shape and dtype: `(ranks, *mine.shape)` where `mine` is."""
        if not mine.numel():
            return mine.new_empty((self.size, *mine.shape))
        sent = mine.to(self._device).reshape(-1)
        found = sent.new_empty(self.size * sent.numel())
        self.sent += sent.nbytes
        # as all_gather_into_tensor does it, which wants torch's default group
        self._finish(lambda: self._backend._allgather_base(found, sent))
        return found.view(self.size, *mine.shape).to(mine.device)

    def first(self, mine: Tensor) -> Tensor:
        """Rank 0's tensor; all have its shape and dtype."""
        if not mine.numel():
            return mine
        told = mine.to(self._device).contiguous().clone()
        self.sent += told.nbytes if self.rank == 0 else 0
        self._finish(lambda: self._backend.broadcast(told, 0))
        return told.to(mine.device)

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of the ranks; they may differ in length."""
        if len(mine) > MOST_BYTES:
            raise RanksError(f"{len(mine)} bytes are too many to send to the other ranks; lower --candidates.")
        lengths = self.gather(torch.tensor([len(mine)]))[:, 0].tolist()
        if max(lengths) > MOST_BYTES:
            raise RanksError("Another rank sends more than any does; run the same version of ragkv on all ranks.")
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else 0
        found = self.gather(padded)
        return [found[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def close(self) -> None:
        """End it for this rank, at once, even if a collective of it has not ended.

        torch keeps whoever frees a group until all that was begun has ended or reached its limit, which is long where a
        rank stands still with its connections open. So it is freed elsewhere, and not before.
        """
        backend, begun = self._backend, self._begun
        self._backend = self._begun = None
        if begun is not None and not begun.is_completed():
            Thread(target=_hold, args=(backend, begun), name="ragkv-group-end", daemon=True).start()

    def _finish(self, start: Callable[[], Any]) -> None:
        """Run a collective; a wait is cut into short ones, so that what the watch learns ends it."""
        self._watch.number += 1
        until = time.monotonic() + self._timeout
        try:
            work = self._begun = start()
            if self._device.type == "cuda":
                work.wait()  # the host does not wait here: NCCL's own watchdog ends what hangs
                return
            while not _done(work):
                if why := self._watch.trouble():
                    raise RanksError(why)
                if time.monotonic() > until:
                    raise self._watch.too_slow(self._timeout)
            self._begun = None
        except RuntimeError as error:
            raise self._watch.after_failure(error) from error


def _hold(backend: Any, begun: Any) -> None:
    """Keep a process group until the collective that was begun last has ended.

    By looking, not by waiting within torch: an interpreter that ends stops this thread here, and frees nothing.
    """
    while not begun.is_completed():
        time.sleep(EVERY)
    del backend


def _done(work: Any) -> bool:
    """Wait a second for the end of a collective of gloo's; RuntimeError when it has failed."""
    try:
        work.wait(timedelta(seconds=EVERY))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it ended just now, or raises why it failed
    return True


def _backend(store: Store, rank: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    """A process group of its own, beside torch's default one: a process may leave it and make the next."""
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
