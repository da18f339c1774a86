"""APB's blocks over ranks (APB §3.5): several processes encode the blocks of one long document in parallel.

Of n ranks, rank r encodes the blocks r, r + n, r + 2n, …, one in each round. In every layer, each rank gathers the KV
that the blocks of the round pass on; a block sees that of earlier blocks, in this round and in all before. The tensor
operations are those of `SequentialExecutor`, and so are the results, bit for bit. Encoded blocks are sent to rank 0,
which answers. `ragkv.cli.ranks` is the command that every rank runs (docs/distributed.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from ragkv.attention.kv import ChunkKV
from ragkv.errors import RanksError, UsageError
from ragkv.model.apb.document import EncodedBlock, LongDocument, PassedKV

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_SECONDS = 1
"""How long a wait within torch may keep an interrupt waiting."""


def meeting_place(timeout: float) -> tuple[Store, int, int]:
    """The store where the ranks meet, this rank, and their number, from `torchrun`'s environment variables.

    UsageError without them, RanksError if the ranks have not come within `timeout` seconds.
    """
    meeting: Future[tuple[Store, int, int]] = Future()

    def meet() -> None:
        try:
            meeting.set_result(next(rendezvous("env://", timeout=timedelta(seconds=timeout))))
        except BaseException as error:
            meeting.set_exception(error)

    # in a thread: torch waits for ever if a process at the port accepts the connection and does not answer
    Thread(target=meet, name="ragkv-ranks", daemon=True).start()
    try:
        return meeting.result(timeout + _POLL_SECONDS)
    except ValueError as error:
        raise UsageError(
            "Start the ranks with torchrun --nproc-per-node N -m ragkv.cli.ranks …, or set RANK, WORLD_SIZE, "
            f"MASTER_ADDR and MASTER_PORT ({_line(error)})."
        ) from error
    except (RuntimeError, TimeoutError) as error:
        raise RanksError(
            f"The ranks have not met within {timeout:g} seconds: start all of them, with a MASTER_ADDR and a "
            f"MASTER_PORT that is free there and that all can reach ({_line(error)})."
        ) from error


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


class RankGroup:
    """The ranks that have met in `store`: gloo on processors, NCCL on GPUs.

    All ranks call the same methods in the same order. Plain bytes are sent, never pickled objects. RanksError if a rank
    has ended, or makes the others wait longer than `timeout` seconds.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout: float, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._timeout = timeout
        self._device = device if device.type == "cuda" else torch.device("cpu")
        limit = timedelta(seconds=timeout)
        try:
            # beside torch's default group, which a process has once
            if self._device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
            else:
                self._group = dist.ProcessGroupGloo(store, rank, size, limit)
        except RuntimeError as error:
            raise self._lost(error) from error

    def gather(self, mine: Tensor) -> Tensor:
        """The tensors of all ranks, which have the same shape and dtype: `(ranks, *mine.shape)`, where `mine` is."""
        sent = self._bytes(mine)
        received = sent.new_empty((self.size, len(sent)))
        if len(sent):
            self._wait(self._group.allgather([list(received)], [sent]))
        return received.view(-1).view(mine.dtype).view(self.size, *mine.shape).to(mine.device)

    def send_to_first(self, mine: Tensor) -> None:
        """Send rank 0 a tensor, which it receives by `receive`."""
        self._wait(self._group.send([self._bytes(mine)], 0, 0))

    def receive(self, rank: int, like: Tensor) -> Tensor:
        """On rank 0: the tensor that `rank` sends, of the shape and dtype, and to the device, of `like`."""
        received = self._bytes(torch.empty_like(like))
        self._wait(self._group.recv([received], rank, 0))
        return received.view(like.dtype).view(like.shape).to(like.device)

    def require_same(self, facts: Mapping[str, str]) -> None:
        """RanksError, the same on all ranks, that names the first rank and fact which differ from rank 0's."""
        texts = [fact.encode("utf-8", "surrogatepass") for fact in facts.values()]
        hashes = b"".join(hashlib.blake2b(text, digest_size=32).digest() for text in texts)
        everyone = self.gather(torch.frombuffer(bytearray(hashes), dtype=torch.uint8).view(len(texts), -1))
        for rank, same in enumerate((everyone == everyone[0]).all(-1).tolist()):
            for name, equal in zip(facts, same, strict=True):
                if not equal:
                    raise RanksError(f"Rank {rank} has another {name} than rank 0; all ranks must have the same.")

    def _bytes(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device).contiguous().view(-1).view(torch.uint8)

    def _wait(self, work: Any) -> None:
        try:
            if self._device.type == "cuda":
                work.wait()  # does not block the host: NCCL's own watchdog ends a collective that hangs
                return
            while not _done(work):
                pass
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> RanksError:
        return RanksError(
            f"Another rank has ended, cannot be reached or has taken longer than {self._timeout:g} seconds; see "
            f"what it reports, and start all ranks again ({_line(error)})."
        )


def _done(work: Any) -> bool:
    """Wait a moment for a gloo operation; RuntimeError if it has failed."""
    try:
        work.wait(timedelta(seconds=_POLL_SECONDS))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has just ended, or raises the reason of its failure
    return True


class RankExecutor:
    """A `BlockExecutor` over ranks. Rank 0 gets all blocks, without their choice of passed tokens; the others get none.

    All ranks run the same documents in the same order.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def run(self, long_document: LongDocument) -> Iterator[EncodedBlock]:
        group, blocks = self.group, long_document.layout.blocks
        exchange = _RoundExchange(group, long_document)
        anchor = long_document.anchor() if group.rank < blocks else None
        for first in range(0, blocks, group.size):
            exchange.first = first
            block = first + group.rank
            encoded = long_document.encode(block, anchor, exchange) if block < blocks else None
            if encoded is None:
                exchange.attend()
            elif group.rank:
                for tensor in encoded.kv.tensors:
                    group.send_to_first(tensor)
            else:
                yield encoded
                for rank in range(1, min(group.size, blocks - first)):
                    yield self._received(rank, first + rank, encoded.kv, long_document)

    def _received(self, rank: int, block: int, like: ChunkKV, long_document: LongDocument) -> EncodedBlock:
        """The block that `rank` sends, of the same dtypes and on the same devices as the KV of another one."""
        layout = long_document.layout
        tokens = len(layout.span(block))

        def received(tensor: Tensor) -> Tensor:
            return self.group.receive(rank, tensor.new_empty((tensor.shape[0], tokens, tensor.shape[2])))

        keys, values = tuple(map(received, like.keys)), tuple(map(received, like.values))
        return EncodedBlock(kv=ChunkKV(keys=keys, values=values, encoded_at=layout.position(block)), chosen=())


class _RoundExchange:
    """A `PassingExchange` of blocks that run at the same time, each on its rank."""

    def __init__(self, group: RankGroup, long_document: LongDocument) -> None:
        self._group = group
        self._layout = long_document.layout
        self._model = long_document.model
        self._passed: dict[tuple[int, int], PassedKV] = {}
        self.first = 0
        """The first block of this round."""

    def gather_earlier(self, block: int, layer: int, mine: PassedKV) -> Sequence[PassedKV]:
        self._gather(layer, mine)
        return [self._passed[earlier, layer] for earlier in range(block)]

    def attend(self) -> None:
        """Take part in the last round without a block."""
        for layer in range(self._model.layers):
            if layer not in self._model.shared:
                self._gather(layer, None)

    def _gather(self, layer: int, mine: PassedKV | None) -> None:
        """Gather [K|V], `(kv_heads, l_p, key_dim + value_dim)`, and positions in models with sliding windows."""
        shape, most = self._model.kv_shape, self._layout.lengths.passing
        heads, key_dim, value_dim = shape.layers[layer]
        device = self._model.device if mine is None else mine.key.device
        both = torch.zeros((heads, most, key_dim + value_dim), dtype=getattr(torch, shape.dtype), device=device)
        places = torch.zeros((heads, most), dtype=torch.int64, device=device)
        if mine is not None:
            count = mine.key.shape[1]
            both[:, :count] = torch.cat([mine.key, mine.value], -1)
            places[:, :count] = mine.positions
        everyone = self._group.gather(both)
        positions = self._group.gather(places) if self._model.windows else places.expand(self._group.size, -1, -1)
        for rank in range(min(self._group.size, self._layout.blocks - self.first)):
            count = self._layout.passed(self.first + rank)
            key, value = everyone[rank, :, :count, :key_dim], everyone[rank, :, :count, key_dim:]
            passed = PassedKV(key.contiguous(), value.contiguous(), positions[rank, :, :count])
            self._passed[self.first + rank, layer] = passed
