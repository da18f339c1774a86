"""How ranks meet, notice that one is lost, and exchange tensors in bounded time.

Ranks meet in generations. Each sends a handshake first, because all must have the same model, prompt and settings. When
a rank is lost, the others end the generation and wait in the next one. A restarted rank finds its own handshake in the
present generation and ends it too. All keys in the store contain the number of the generation, so no old message is
taken for a new one.

A collective that hangs does not show which rank is at fault. So each rank writes a heartbeat to the store every second.
A rank without a fresh heartbeat is lost; a rank that is alive but has begun fewer collectives is the one that the
others wait for. Every collective ends in bounded time, with a result or with an error that names the cause.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ragkv import __version__
from ragkv.errors import RanksError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

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


_LOOK = 0.1  # seconds
_LAST_LOOK = 30.0
"""After a rank has found a difference, it waits this many seconds for the others to read it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The ranks of one generation: `handshakes` by rank."""

    generation: int
    rank: int
    handshakes: tuple[Handshake, ...]

    @property
    def prefix(self) -> str:
        """The prefix of all keys of this generation."""
        return f"ragkv/{self.generation}"


def meet(store: Store, rank: int, size: int, handshake: Handshake, *, timeout: float) -> Rendezvous:
    """Send the handshake in the first generation that lacks this rank's, and wait for those of all `size` ranks.

    RanksError when some do not come within `timeout` seconds, or when one differs (`require_alike`): all get the same
    sentence, naming the rank. A rank that has read it waits until all have: the store may end with it, and torchrun
    ends all ranks of a machine when the first one fails.
    """
    until = time.monotonic() + timeout
    try:
        generation = _generation(store)
        while store.check([_key(generation, rank)]):
            generation = _end(store, generation, until)
        while True:
            store.set(_key(generation, rank), handshake.to_json())
            missing = [other for other in range(size) if not store.check([_key(generation, other)])]
            if not missing:
                break
            if time.monotonic() > until:
                raise RanksError(_missing(missing, size, timeout))
            time.sleep(_LOOK)  # TCPStore's own waiting would print a warning each time
            if (newest := _generation(store)) > generation:  # a rank was restarted meanwhile
                generation = newest
        greetings = [store.get(_key(generation, other)) for other in range(size)]
    except RuntimeError as error:
        raise RanksError(
            "The store where the ranks meet cannot be reached; check MASTER_ADDR and MASTER_PORT, and that rank 0's "
            "machine accepts connections there."
        ) from error
    try:
        found = tuple(Handshake.from_bytes(each, other) for other, each in enumerate(greetings))
        require_alike(found)
    except RanksError:
        with suppress(RanksError, RuntimeError):  # torchrun's SIGTERM, or the store is gone: the others already know
            _wait_for_readers(store, generation, rank, size)
        raise
    return Rendezvous(generation=generation, rank=rank, handshakes=found)


def is_over(store: Store, generation: int) -> bool:
    """Whether a rank has ended the generation."""
    return _generation(store) > generation


def _generation(store: Store) -> int:
    return int(store.add("ragkv/generation", 0))


def _end(store: Store, generation: int, until: float) -> int:
    """End a generation and return the next one; several ranks may do this at once."""
    if store.add(f"ragkv/{generation}/over", 1) == 1:
        store.add("ragkv/generation", 1)
    while (newest := _generation(store)) <= generation:
        if time.monotonic() > until:
            raise RanksError("The rank that was to begin the next generation has ended; start all ranks again.")
        time.sleep(_LOOK)
    return newest


def _wait_for_readers(store: Store, generation: int, rank: int, size: int) -> None:
    """Wait until all ranks have read all handshakes."""
    until = time.monotonic() + _LAST_LOOK
    store.set(f"ragkv/{generation}/read/{rank}", "")
    keys = [f"ragkv/{generation}/read/{other}" for other in range(size)]
    while not store.check(keys) and time.monotonic() < until:
        time.sleep(_LOOK)


def _key(generation: int, rank: int) -> str:
    return f"ragkv/{generation}/hello/{rank}"


def _missing(missing: list[int], size: int, timeout: float) -> str:
    named = ", ".join(map(str, missing))
    return (
        f"Of {size} ranks, {'this one' if len(missing) == 1 else 'these'} did not come within {timeout:g} seconds: "
        f"{named}. Look at what they say, and start them again."
    )


logger = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two heartbeats."""
GONE = 10.0
"""Seconds without a new heartbeat after which a rank counts as lost."""
_MOST_BYTES = 4096


class Heartbeat:
    """The heartbeats of one generation of ranks, in `store`, a connection of its own."""

    def __init__(self, store: Store, rank: int, handshakes: Sequence[Handshake], *, gone: float = GONE) -> None:
        self.rank = rank
        self.handshakes = tuple(handshakes)
        self.number = 0
        """The number of collectives that this rank has started."""
        self._gone = gone
        self._store = store
        self._notices: dict[int, str] = {}
        self._numbers = dict.fromkeys(range(len(handshakes)), 0)
        self._signs: dict[int, tuple[bytes, float]] = {r: (b"", time.monotonic()) for r in range(len(handshakes))}
        self._lost: str | None = None
        self._others = [other for other in self._signs if other != rank]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ragkv-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeat; the others see that this rank has left."""
        with suppress(RuntimeError):  # the store is gone, as the others know
            self._store.set(f"left/{self.rank}", "")
        self._stop.set()
        self._thread.join()

    def notify(self, why: str) -> None:
        """Publish why this rank gives up; the others read it at their next check."""
        with suppress(RuntimeError):
            self._store.set(f"notice/{self.rank}", why[: _MOST_BYTES // 4])

    def wait_for_others(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until each of the others has left or is lost.

        The rank that holds the store calls this before it ends. Otherwise the others would only see that the store is
        gone, and not why.
        """
        until = time.monotonic() + timeout
        with suppress(RuntimeError):
            while not all(self._is_gone(rank) or self._store.check([f"left/{rank}"]) for rank in self._others):
                if self._lost is not None or time.monotonic() > until:
                    return
                time.sleep(EVERY / 20)

    def trouble(self) -> str | None:
        """The known reason why no collective can end any more."""
        if self._lost is not None:
            return self._lost
        for rank, why in sorted(self._notices.items()):
            return f"{self._named(rank)} gave up: {why}"
        for rank in self._others:
            if self._is_gone(rank):
                return (
                    f"{self._named(rank)} has ended or cannot be reached: there was no sign of it for "
                    f"{self._gone:.0f} seconds. Start it again, and ask again."
                )
        return None

    def after_failure(self, error: Exception) -> RanksError:
        """After a collective has failed: wait for the cause to become known, if it does."""
        until = time.monotonic() + self._gone + 2 * EVERY
        while (why := self.trouble()) is None and time.monotonic() < until:
            time.sleep(EVERY / 4)
        reason = str(error).strip().split("\n")[0]
        found = RanksError(why or f"The ranks cannot speak to each other any more ({reason}); start them again.")
        found.__cause__ = error
        return found

    def too_slow(self, timeout: float) -> RanksError:
        """The error for a collective that has not ended in time although all ranks are alive."""
        behind = [rank for rank, number in self._numbers.items() if rank != self.rank and number < self.number]
        named = ", ".join(self._named(rank) for rank in behind) or "Another rank"
        verb = "is" if len(behind) < 2 else "are"
        return RanksError(
            f"{named[:1].upper()}{named[1:]} {verb} alive, but {verb} not where the others have waited for {timeout:g} "
            "seconds; if that is only slow, raise --timeout."
        )

    def _is_gone(self, rank: int) -> bool:
        return time.monotonic() - self._signs[rank][1] > self._gone

    def _named(self, rank: int) -> str:
        named = self.handshakes[rank].named(rank)
        return named[:1].upper() + named[1:]

    def _run(self) -> None:
        count = 0
        try:
            while True:
                count += 1
                self._store.set(f"sign/{self.rank}", f"{count} {self.number}")
                self._look()
                if self._stop.wait(EVERY):
                    return
        except (dist.DistError, RuntimeError) as error:
            logger.debug("the store of the ranks is gone: %s", error)
            self._lost = (
                "The store where the ranks meet cannot be reached: rank 0, or torchrun on its machine, has ended. "
                "Start all ranks again."
            )

    def _look(self) -> None:
        now = time.monotonic()
        for rank in self._others:
            if rank not in self._notices and self._store.check([f"notice/{rank}"]):
                self._notices[rank] = self._store.get(f"notice/{rank}")[:_MOST_BYTES].decode(errors="replace")
            if self._store.check([f"sign/{rank}"]):
                sign = self._store.get(f"sign/{rank}")
                if sign != self._signs[rank][0]:
                    self._signs[rank] = sign, now
                    number = sign.split(b" ")[-1][:20]
                    self._numbers[rank] = int(number) if number.isdigit() else 0


MOST_BYTES = 1 << 28
"""The largest message of bytes that a rank may send: candidates with their texts are far smaller."""


class RankGroup:
    """`ragkv.attention.batch.Ranks` over a process group of torch's: gloo on the processor, NCCL on GPUs.

    Tensors and plain bytes travel, never pickled objects. `sent` counts the bytes that this rank has put into
    collectives. When a rank is lost, gives up, or makes the others wait longer than `timeout` seconds, any method
    raises RanksError, which names the rank at fault if it is known.
    """

    def __init__(
        self, store: Store, rank: int, size: int, watch: Heartbeat, *, timeout: float, device: torch.device
    ) -> None:
        self.rank = rank
        self.size = size
        self.sent = 0
        self._heartbeat = watch
        self._timeout = timeout
        self._device = device if device.type == "cuda" else torch.device("cpu")
        self._begun: Any = None  # collectives that have not ended
        # torch's own limit is only a safety net: our wait ends first, with the cause
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

        Freeing a torch group blocks until everything that was begun has ended or timed out, which takes long if a rank
        hangs with its connections open. So another thread frees it, once its collectives have ended.
        """
        backend, begun = self._backend, self._begun
        self._backend = self._begun = None
        if begun is not None and not begun.is_completed():
            Thread(target=_hold, args=(backend, begun), name="ragkv-group-end", daemon=True).start()

    def _finish(self, start: Callable[[], Any]) -> None:
        """Run a collective, waiting in short steps, so that news from the heartbeat can end it."""
        self._heartbeat.number += 1
        until = time.monotonic() + self._timeout
        try:
            work = self._begun = start()
            if self._device.type == "cuda":
                work.wait()  # the host does not wait here: NCCL's own watchdog ends what hangs
                return
            while not _done(work):
                if why := self._heartbeat.trouble():
                    raise RanksError(why)
                if time.monotonic() > until:
                    raise self._heartbeat.too_slow(self._timeout)
            self._begun = None
        except RuntimeError as error:
            raise self._heartbeat.after_failure(error) from error


def _hold(backend: Any, begun: Any) -> None:
    """Keep a process group until the last collective has ended.

    This polls instead of waiting within torch, so that the interpreter can end this thread without freeing the group.
    """
    while not begun.is_completed():
        time.sleep(EVERY)
    del backend


def _done(work: Any) -> bool:
    """Wait a second for a collective of gloo; RuntimeError if it has failed."""
    try:
        work.wait(timedelta(seconds=EVERY))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it ended just now, or raises why it failed
    return True


def _backend(store: Store, rank: int, size: int, timeout: timedelta, device: torch.device) -> Any:
    """A process group beside torch's default one, so that a process may leave it and make the next."""
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
