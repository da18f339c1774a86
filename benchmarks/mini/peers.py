"""Processes that share the steps of a training on one CPU.

A step of a small model consists of many small operations, in which threads gain little. Processes that each take a
part of the rows and sum their gradients are faster by nearly their number.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ALONE", "Peer", "peers"]

_PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others; long, because a laptop may sleep meanwhile."""
_PARTING = 20.0  # seconds that a process gets to end by itself


@dataclass(frozen=True, slots=True)
class Peer:
    """One of `count` processes that train together. Rank 0 writes checkpoints and reports progress."""

    rank: int
    count: int

    def rows(self, count: int) -> range:
        """Which of a step's `count` rows this process takes."""
        return range(self.rank, count, self.count)

    def mean_gradients(self, model: nn.Module, weight: float) -> None:
        """Average the gradients over all processes' rows; `weight` is the divisor of this process's mean loss."""
        if self.count == 1:
            return
        import torch
        from torch import distributed

        gradients = [value.grad for value in model.parameters() if value.grad is not None]
        total = torch.tensor([weight])
        distributed.all_reduce(total)
        flat = torch.cat([gradient.flatten() for gradient in gradients]).mul_(weight / float(total))
        distributed.all_reduce(flat)
        for gradient, summed in zip(gradients, torch.split(flat, [one.numel() for one in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))


ALONE = Peer(0, 1)


@contextmanager
def peers(count: int, work: Callable[[Peer], object]) -> Iterator[Peer]:
    """Run `work` in `count` - 1 further processes while the `with` block runs, which gets this process's `Peer`.

    The processes share this one's threads. They end with the block, however it ends. If one of them dies, the next step
    of this process raises RuntimeError.
    """
    if count == 1:
        yield ALONE
        return
    import torch
    from torch import distributed, multiprocessing

    threads = torch.get_num_threads()
    own = max(1, threads // count)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        group = f"file://{folder}/group"
        others = [
            context.Process(target=_work, args=(work, Peer(rank, count), group, own), daemon=True)
            for rank in range(1, count)
        ]
        for process in others:
            process.start()
        try:
            first = Peer(0, count)
            _join(first, group, own)
            yield first
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()
            for process in others:
                process.terminate()
            for process in others:
                process.join(_PARTING)
                process.kill()
                process.join()
            torch.set_num_threads(threads)


def _work(work: Callable[[Peer], object], peer: Peer, group: str, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the first process, which ends this one
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit()
    )  # exit normally, because a killed process leaves semaphores behind
    _join(peer, group, threads)
    work(peer)


def _join(peer: Peer, group: str, threads: int) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(threads)
    distributed.init_process_group("gloo", init_method=group, rank=peer.rank, world_size=peer.count, timeout=_PATIENCE)
