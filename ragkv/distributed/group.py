"""How ranks meet, detect that one is lost, and exchange tensors in bounded time.

Ranks meet once. Each first sends a handshake, because all must have the same model, prompt and settings. Every
collective ends in bounded time: torch's gloo fails if a connection is lost, and its waiting has a limit. A failure does
not show which rank is at fault, so each rank that notices one reports it to the store where they met, which makes the
others stop waiting; the rank that does not report is the lost one. The launcher has to start them again.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ragkv import __version__
from ragkv.errors import RanksError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
_MOST_HANDSHAKE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """`same` has the facts that must be equal on all ranks, by their names in error messages."""

    same: Mapping[str, str]
    version: str = __version__
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)

    def to_json(self) -> str:
        """For `from_bytes`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, rank: int) -> Handshake:
        """Parse the output of `to_json`; RanksError for anything else."""
        try:
            if len(data) > _MOST_HANDSHAKE_BYTES:
                raise ValueError("it is too long")
            found = json.loads(data)
            same = {str(name): str(value) for name, value in found["same"].items()}
            return cls(same=same, version=str(found["version"]), host=str(found["host"]), process=int(found["process"]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RanksError(
                f"The handshake of rank {rank} cannot be read ({error}); run the same version of ragkv on all ranks."
            ) from error

    def named(self, rank: int) -> str:
        """The rank for a message, with its host and process."""
        return f"rank {rank} ({self.host}, process {self.process})"


def require_alike(handshakes: Sequence[Handshake]) -> None:
    """RanksError that names the first rank that differs from rank 0, and in what."""
    first = handshakes[0]
    for rank, other in enumerate(handshakes):
        mine, theirs = ({"ragkv": each.version, **each.same} for each in (first, other))
        for name in mine | theirs:
            if mine.get(name) != theirs.get(name):
                raise RanksError(
                    f"{_capital(other.named(rank))} has another {name} than rank 0: {theirs.get(name, 'none')}, not "
                    f"{mine.get(name, 'none')}; all ranks must have the same."
                )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


_LOOK = 0.05  # seconds
_LAST_LOOK = 30.0
"""Seconds that a rank which has found a difference waits for the others to read it too."""
_GRACE = 5.0
"""Seconds that the other ranks have to report, after one has noticed a failure."""
_EVERY = 1.0
_MOST_NOTICE = 1024
_STORE_GONE = (
    "The store where the ranks meet cannot be reached: rank 0, or what started the ranks, has ended, or MASTER_ADDR "
    "and MASTER_PORT are wrong. Start all ranks again."
)


def answered(call: Callable[[], T], timeout: float) -> T:
    """The result of `call`; TimeoutError if it takes longer than `timeout` seconds, while its thread goes on.

    TCPStore waits for ever if the process or the machine at the other end hangs with its connections open.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    Thread(target=run, name="ragkv-store", daemon=True).start()
    return found.result(timeout)


class BoundedStore:
    """A store whose calls end: RuntimeError for one that takes longer than `timeout` seconds, and for all after it."""

    def __init__(self, store: Store, timeout: float) -> None:
        self._store = store
        self._timeout = timeout
        self._late = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._answer, name)

    def _answer(self, name: str, *given: Any) -> Any:
        if self._late:
            raise RuntimeError("the store does not answer")
        try:
            return answered(partial(getattr(self._store, name), *given), self._timeout)
        except TimeoutError as error:
            self._late = True
            raise RuntimeError(f"the store has not answered within {self._timeout:g} seconds") from error


class Peers:
    """The ranks that have met in `store`, and their reports to each other there. `handshakes` are by rank."""

    def __init__(self, store: Store | BoundedStore, rank: int, handshakes: Sequence[Handshake]) -> None:
        self.rank = rank
        self.handshakes = tuple(handshakes)
        self._store = store
        self._others = [other for other in range(len(handshakes)) if other != rank]
        self._silent: list[int] = []  # ranks that did not report after a failure

    @classmethod
    def meet(cls, store: Store | BoundedStore, rank: int, size: int, handshake: Handshake, *, timeout: float) -> Peers:
        """Send the handshake, and wait for those of all `size` ranks.

        RanksError if some do not arrive within `timeout` seconds, or if one differs (`require_alike`): all get the same
        sentence, naming the rank. A rank that has read it waits until all have, because the store may end with it, and
        torchrun ends all ranks of a machine when the first one fails.
        """
        try:
            store.set(f"hello/{rank}", handshake.to_json())
            missing = wait_for(store, [f"hello/{other}" for other in range(size)], timeout)
            here = [other for other in range(size) if other not in missing]
            greetings = [store.get(f"hello/{other}") for other in here]
        except RuntimeError as error:
            raise RanksError(_STORE_GONE) from error
        try:
            if missing:
                raise RanksError(
                    f"Of {size} ranks, {'this one' if len(missing) == 1 else 'these'} did not come within {timeout:g} "
                    f"seconds: {', '.join(map(str, missing))}. Look at what they say, and start them again."
                )
            found = [Handshake.from_bytes(each, other) for other, each in enumerate(greetings)]
            require_alike(found)
        except RanksError:
            # torchrun's SIGTERM, or the store is gone: the others already know
            with suppress(RanksError, RuntimeError):
                store.set(f"read/{rank}", "")
                wait_for(store, [f"read/{other}" for other in here], _LAST_LOOK)
            raise
        return cls(store, rank, found)

    def wait_until_loaded(self, patience: float) -> None:
        """Wait until all ranks have called this; RanksError if one does not within `patience` seconds."""
        try:
            self._store.set(f"loaded/{self.rank}", "")
            keys = [f"loaded/{rank}" for rank in range(len(self.handshakes))]
            missing = wait_for(self._store, keys, patience, self.check)
        except RuntimeError as error:
            raise self.after_failure(error) from error
        if missing:
            raise RanksError(
                f"Rank {', '.join(map(str, missing))} did not load the model within {patience:g} seconds; if that is "
                "only slow, raise --patience."
            )

    def notify(self, why: str) -> None:
        """Report the reason why this rank gives up."""
        with suppress(RuntimeError):
            self._store.set(f"notice/{self.rank}", why[:_MOST_NOTICE])
            self._store.add("failures", 1)

    def leave(self, timeout: float) -> None:
        """Leave. Rank 0, which may hold the store, waits at most `timeout` seconds for the others, which otherwise
        would only see that the store is gone, and not why."""
        with suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "")
            if self.rank == 0:
                wait_for(self._store, [f"left/{other}" for other in self._others if other not in self._silent], timeout)

    def check(self) -> None:
        """RanksError when another rank has failed or noticed a failure."""
        if self._store.add("failures", 0):
            raise self.after_failure(RuntimeError("another rank has failed"))

    def after_failure(self, error: Exception) -> RanksError:
        """The error for a failure, after the others have reported too; it names those that do not, if any."""
        reason = str(error).strip().split("\n")[0]
        why = f"The ranks cannot speak to each other any more ({reason}); start them again."
        try:
            self._store.set(f"here/{self.rank}", "")
            self._store.add("failures", 1)
            until = time.monotonic() + _GRACE
            while silent := [r for r in self._others if not self._has(f"here/{r}") and not self._has(f"notice/{r}")]:
                if time.monotonic() > until:
                    break
                time.sleep(_LOOK)
            self._silent = silent
            gave_up = [rank for rank in self._others if self._has(f"notice/{rank}")]
            if gave_up:
                notice = self._store.get(f"notice/{gave_up[0]}")[:_MOST_NOTICE].decode(errors="replace")
                why = f"{_capital(self._named(gave_up[0]))} gave up: {notice}"
            elif silent:
                verb = (
                    "has ended, cannot be reached or is" if len(silent) == 1 else "have ended, cannot be reached or are"
                )
                why = (
                    f"{_capital(', '.join(map(self._named, silent)))} {verb} not where the others wait. Start all "
                    "ranks again; if that is only slow, raise --timeout."
                )
        except RuntimeError:
            why = _STORE_GONE
        found = RanksError(why)
        found.__cause__ = error
        return found

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _named(self, rank: int) -> str:
        return self.handshakes[rank].named(rank)


def wait_for(
    store: Store | BoundedStore, keys: Sequence[str], timeout: float, check: Callable[[], object] = lambda: None
) -> list[int]:
    """Wait at most `timeout` seconds until the store has all keys; returns the indices of the missing ones.

    It polls: TCPStore's own waiting would print a warning each time, and cannot call `check`.
    """
    until = time.monotonic() + timeout
    while missing := [place for place, key in enumerate(keys) if not store.check([key])]:
        check()
        if time.monotonic() > until:
            break
        time.sleep(_LOOK)
    return missing


MOST_BYTES = 1 << 28
"""The largest message of bytes that a rank may send: candidates with their texts are far smaller."""


class RankGroup:
    """`ragkv.attention.batch.Ranks` over a torch process group: gloo on CPUs, NCCL on GPUs.

    It sends tensors and plain bytes, never pickled objects. `sent` counts the bytes that this rank has put into
    collectives. If a rank is lost, gives up, or makes the others wait longer than `timeout` seconds, every method
    raises RanksError, which names the rank at fault if it is known.
    """

    def __init__(
        self, store: Store, rank: int, size: int, peers: Peers, *, timeout: float, device: torch.device
    ) -> None:
        self.rank = rank
        self.size = size
        self.sent = 0
        self._peers = peers
        self._timeout = timeout
        self._device = device if device.type == "cuda" else torch.device("cpu")
        self._begun: Any = None  # collectives that have not ended
        # torch's own limit is only a safety net: our wait ends first, with the cause
        limit = timedelta(seconds=2 * timeout + 10 * _EVERY)
        try:
            self._backend: Any = _backend(store, rank, size, limit, self._device)
        except RuntimeError as error:
            raise peers.after_failure(error) from error

    def gather(self, mine: Tensor) -> Tensor:
        """Every rank's tensor, all of one shape and dtype: `(ranks, *mine.shape)` where `mine` is."""
        if not mine.numel():
            return mine.new_empty((self.size, *mine.shape))
        sent = mine.to(self._device).reshape(-1)
        found = sent.new_empty(self.size * sent.numel())
        self.sent += sent.nbytes
        # as in all_gather_into_tensor, which needs torch's default group
        self._finish(lambda: self._backend._allgather_base(found, sent))
        return found.view(self.size, *mine.shape).to(mine.device)

    def first(self, mine: Tensor) -> Tensor:
        """Rank 0's tensor; all have its shape and dtype."""
        if not mine.numel():
            return mine
        tensor = mine.to(self._device).contiguous().clone()
        self.sent += tensor.nbytes if self.rank == 0 else 0
        self._finish(lambda: self._backend.broadcast(tensor, 0))
        return tensor.to(mine.device)

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
        """Leave the group at once, even if a collective has not ended.

        Freeing a torch group blocks until all its operations have ended or timed out, which takes long if a rank hangs
        with its connections open. So another thread frees it, once its collectives have ended.
        """
        backend, begun = self._backend, self._begun
        self._backend = self._begun = None
        if begun is not None and not begun.is_completed():
            Thread(target=_hold, args=(backend, begun), name="ragkv-group-end", daemon=True).start()

    def _finish(self, start: Callable[[], Any]) -> None:
        """Run a collective, waiting in short steps, so that another rank's report can end it."""
        until = time.monotonic() + self._timeout
        try:
            work = self._begun = start()
            if self._device.type == "cuda":
                work.wait()  # does not block the host: NCCL's own watchdog ends a hanging collective
                return
            while not _done(work):
                self._peers.check()
                if time.monotonic() > until:
                    raise self._peers.after_failure(TimeoutError(f"no answer within {self._timeout:g} seconds"))
            self._begun = None
        except RuntimeError as error:
            raise self._peers.after_failure(error) from error


def _hold(backend: Any, begun: Any) -> None:
    """Keep a process group until the last collective has ended.

    It polls instead of waiting within torch, so that the interpreter can end this thread without freeing the group.
    """
    while not begun.is_completed():
        time.sleep(_EVERY)
    del backend


def _done(work: Any) -> bool:
    """Wait a second for a gloo collective; RuntimeError if it has failed."""
    try:
        work.wait(timedelta(seconds=_EVERY))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has just ended, or raises the reason of its failure
    return True


def _backend(store: Store, rank: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    """A process group beside torch's default one, so that a process can leave it and make the next."""
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
