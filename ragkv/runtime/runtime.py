"""Where engines meet the model: the rows of all requests, step by step.

There is no thread of its own. Whoever waits for a token drives: one of the waiting threads runs the next step for all
requests, the others sleep until it is over, and when the one that drove has what it wanted, another takes its place.
So threads and tasks that ask at the same time are answered in one batch, a single request runs in its own thread, and
nothing is left running when nobody asks.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragkv.attention.kv import OwnKV
from ragkv.attention.row import Row
from ragkv.attention.slab import Slabs
from ragkv.attention.stack import Stack
from ragkv.engines.program import Choose, Greedy, Leave, Read, Until
from ragkv.errors import AnswerInterruptedError, UsageError
from ragkv.runtime.decoder import Decoder, Generation, Token
from ragkv.runtime.job import Job
from ragkv.runtime.limit import Limits
from ragkv.runtime.pool import Lease, Pool
from ragkv.runtime.scheduler import Scheduler, Ticket
from ragkv.runtime.shared import with_shared
from ragkv.runtime.stream import TokenStream

if TYPE_CHECKING:
    from ragkv.engines import Engine, Request
    from ragkv.model.language import LanguageModel

__all__ = ["Runtime", "runtime_of"]

Pieces = list[tuple[int, Row, Sequence[int]]]

logger = logging.getLogger(__name__)

_all: weakref.WeakSet[Runtime] = weakref.WeakSet()


class Runtime:
    """Answers requests to one model, many at a time; any number of threads.

    `batch_tokens` tokens at most are in one step, `max_rows` rows run at a time; unset, they follow from the memory at
    hand (`ragkv.runtime.limit`). `budget` bytes of chunk KV are leased at a time.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        batch_tokens: int = 4096,
        max_rows: int = 256,
        own_tokens: int = 1 << 20,
        budget: int = 8 << 30,
        strict: bool = False,
    ) -> None:
        self._model = weakref.ref(model)  # the model holds its runtime, and is freed with the last who holds it
        self.pool = Pool(budget)
        self._scheduler = Scheduler(batch_tokens=batch_tokens, max_rows=max_rows, own_tokens=own_tokens, strict=strict)
        self._start()
        _all.add(self)

    def _start(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._driver: int | None = None
        """The thread that runs a step now."""
        self._steps = 0
        self._stalled = False
        self._marks: list[tuple[Job, Row, int, int]] = []  # where the rows of the last pass stood before it
        self._jobs: dict[Ticket, Job] = {}  # submitted and not ended
        self._running: list[Job] = []  # let in
        self._leasing: deque[object] = deque()  # who waits for KV, in order
        self._slabs = Slabs()
        self._closed: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        # filled without the lock, by whoever leaves
        self._returned: deque[Lease] = deque()
        self._leaving: deque[Job] = deque()

    @property
    def model(self) -> LanguageModel:
        """The model that it steps."""
        model = self._model()
        if model is None:
            raise ReferenceError("the runtime's model is gone: hold the model for as long as it is asked")
        return model

    @property
    def idle(self) -> bool:
        """Whether nothing is asked of it, and nobody holds KV of its pool."""
        with self._locked():
            return not (self._jobs or self._running or self._scheduler.waiting or self.pool.leased)

    def submit(
        self,
        engine: Engine,
        request: Request,
        generation: Generation | None,
        *,
        owner: object = None,
        lease: Lease | None = None,
    ) -> Job:
        """Start a request; `generation` None: whoever asked chooses its tokens (`Stream`).

        `lease`, the KV that it reads, goes back to the pool when it ends. Raises UsageError for a request that can
        never run, AnswerInterruptedError when its `owner` was closed.
        """
        model = self.model
        limit = 0 if generation is None else generation.max_new_tokens
        demand = engine.demand(request, limit)
        reads = frozenset(id(chunk.kv) for chunk in request.chunks if chunk.kv is not None)
        ticket = Ticket(rows=demand.rows, tokens=demand.tokens, reads=reads.union(demand.shared), shared=demand.shared)
        decoder = None if generation is None else Decoder(model, generation)
        # one that is led by hand would keep others waiting
        origin = (engine, request) if engine.stacks and decoder is not None else None
        program = None if origin else with_shared(engine.program(request, model), self.pool)
        job = Job(program, ticket, decoder, model=model, owner=owner, lease=lease, origin=origin)
        with self._locked():
            self._require_open(owner)
            self._scheduler.submit(ticket)
            self._jobs[ticket] = job
        return job

    def wait(self, job: Job) -> None:
        """Return when the job is `ready`, driving the runtime if nobody does."""
        while True:
            with self._locked():
                while not job.ready and self._driver is not None:
                    self._sleep()
                if job.ready:
                    return
            if not self._drive():  # nothing can run for now: somebody else has to do something
                with self._locked():
                    if not job.ready and self._driver is None:
                        self._sleep()

    def advance(self) -> bool:
        """Run one step for all, or wait for the one that runs; False when there is nothing to do."""
        with self._locked():
            if self._driver is not None:
                self._sleep()
                return True
        return self._drive()

    def answer(self, job: Job, token_id: int) -> None:
        """Give a job that pauses at a `Choose` its token; for jobs whose tokens whoever asked chooses."""
        told = False
        while not told:
            with self._locked():
                while self._driver is not None:
                    self._sleep()

            def tell() -> bool:
                nonlocal told
                told = True
                self._run(job, token_id)
                return True

            self._drive(tell)
        self.wait(job)

    def tokens(self, job: Job) -> TokenStream:
        """The answer's tokens as they come; closing the iterator early cancels the rest."""
        return TokenStream(self, job)

    def taken(self, job: Job) -> tuple[list[Token], bool]:
        """The tokens that have come, without waiting, and whether no more will; raises what ended the job."""
        ended = job.ended  # asked first: the last token comes before the end
        if job.cancelled and job.error is None:
            return [], ended
        tokens = [job.tokens.popleft() for _ in range(len(job.tokens))]
        if ended and not tokens and job.error is not None:
            raise job.error
        return tokens, ended and job.error is None

    def decode(self, engine: Engine, request: Request, generation: Generation) -> TokenStream:
        """One request's tokens, from its question on."""
        return self.tokens(self.submit(engine, request, generation))

    def cancel(self, job: Job) -> None:
        """End the job before its next step; nothing happens to one that has ended. Never waits."""
        if not job.ended:
            job.cancelled = True
            self._leaving.append(job)
            self._post()

    def close(self, owner: object, message: str) -> None:
        """End all jobs of `owner`, now and later, with AnswerInterruptedError(message).

        Returns when no step reads anything of theirs. UsageError within a step, which cannot wait for its own end.
        """
        with self._locked():
            if self._driver == threading.get_ident():
                raise UsageError("An index cannot be closed by what runs within its model's step; close it elsewhere.")
            self._closed[owner] = message
            for job in self._jobs.values():
                if job.owner is owner and not job.cancelled:
                    job.cancelled, job.error = True, AnswerInterruptedError(message)
                    self._leaving.append(job)
            steps = self._steps
            self._changed.notify_all()
            while self._driver is not None and self._steps == steps:
                self._sleep()

    def lease(
        self,
        sizes: Mapping[Hashable, int],
        *,
        owner: object = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Lease | None:
        """Take KV for a request, in turn, waiting until others give theirs back as long as that can happen.

        None once `cancelled()` is true (`nudge` has it looked at), AnswerInterruptedError when `owner` is closed.
        """
        turn, stuck = object(), False
        self._leasing.append(turn)
        try:
            while not cancelled():
                with self._locked():
                    self._require_open(owner)
                    first = self._leasing[0] is turn
                    if first and (stuck or self.pool.fits(sizes)):
                        return self.pool.lease(sizes)
                    if not first or self._loading:  # they are sure to go on
                        self._sleep()
                        continue
                stuck = not self.advance()  # what holds the KV waits for those who asked: it shall not hold up others
            return None
        finally:
            self._leasing.remove(turn)
            self._post(changed=True)

    def try_lease(self, sizes: Mapping[Hashable, int], *, owner: object = None) -> Lease | None:
        """`lease` where it can be had now, and nobody waits for one."""
        with self._locked():
            self._require_open(owner)
            return self.pool.lease(sizes) if not self._leasing and self.pool.fits(sizes) else None

    @property
    def has_room(self) -> bool:
        """Whether a small request that is submitted now would be let in at the next step."""
        with self._locked():
            return self._scheduler.has_room

    def release(self, lease: Lease) -> None:
        """Give KV back. Never waits."""
        self._returned.append(lease)
        self._post()

    def restart(self) -> None:
        """Forget all that was asked: for the child of a fork, where nobody answers it."""
        jobs = list(self._jobs.values())
        self.pool, self._scheduler = Pool(self.pool.budget), self._scheduler.emptied()
        self._start()
        for job in jobs:
            job.end(AnswerInterruptedError("The answer was begun before a fork; ask again in this process."))

    def nudge(self) -> None:
        """Have those who wait for a lease look whether they still want it. Never waits."""
        self._post(changed=True)

    @property
    def _loading(self) -> bool:
        """Under the lock: whether somebody has leased KV and not begun to read it."""
        return self.pool.leases > sum(job.lease is not None for job in self._jobs.values())

    def _require_open(self, owner: object) -> None:
        message = None if owner is None else self._closed.get(owner)
        if message is not None:
            raise AnswerInterruptedError(message)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; what was cancelled or given back meanwhile is gone on entering and soon after leaving."""
        try:
            with self._changed:
                self._clear()
                yield
        finally:
            self._post()

    def _sleep(self) -> None:
        """Under the lock: until something changes. Refused within a step: nobody else would end it.

        The second is a net: an interrupt may come between the end of a step and the word that it is over.
        """
        if self._driver == threading.get_ident():
            raise UsageError("A question cannot be asked by what runs within its model's step (a stopping criterion).")
        self._changed.wait(1.0)

    def _post(self, *, changed: bool = False) -> None:
        """Clear now, unless the lock is held: then whoever holds it clears when it is let go.

        A generator that is collected may come here inside a `with` of this very thread, so it must not wait.
        """
        while (changed or self._returned or (self._leaving and self._driver is None)) and self._changed.acquire(
            blocking=False
        ):
            try:
                self._clear()
                self._changed.notify_all()
                changed = False
            finally:
                self._changed.release()

    def _clear(self) -> None:
        """Under the lock: end cancelled jobs unless a step is running that may read them, and take back leases."""
        while self._leaving and self._driver is None:
            job = self._leaving.popleft()
            job.end(job.error)
            self._forget(job)
            self._changed.notify_all()
        while self._returned:
            self.pool.release(self._returned.popleft())

    def _drive(self, work: Callable[[], bool] | None = None) -> bool:
        """One step for all (or `work`), unless another thread runs one; whether something was done."""
        mine = False
        try:
            with self._changed:
                if self._driver is not None:
                    return True
                self._clear()
                self._driver, mine = threading.get_ident(), True
            with torch.inference_mode():
                return self._step() if work is None else work()
        except BaseException as error:
            if not mine or not self._break(error) or not isinstance(error, Exception):
                raise
            logger.exception("a step of the model failed")
            return True
        finally:
            if mine:
                self._steps += 1
                self._marks = []
                self._driver = None  # first of all: if an interrupt comes now, the step is over all the same
                with self._changed:
                    self._clear()
                    self._changed.notify_all()
                self._post()

    def _break(self, cause: BaseException) -> bool:
        """A step was broken off: end what was in the middle of something, and say whether there was any.

        What had not been read yet is read again by the next step: rows count nothing before the end of a pass.
        """
        for job, row, length, position in self._marks:
            job.torn |= (row.own.length, row.position) != (length, position)
        with self._changed:
            self._running = [job for job in self._jobs.values() if self._scheduler.runs(job.ticket)]
        torn = [job for job in self._running if job.torn or job.ask is None]
        for job in torn:
            error = AnswerInterruptedError("The answer was interrupted while it was generated; ask again.")
            error.__cause__ = cause
            self._end(job, error)
        return bool(torn)

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        job.end(error)
        with self._changed:
            self._forget(job)

    def _forget(self, job: Job) -> None:
        """Under the lock: a job that has ended holds nothing here any more."""
        self._scheduler.leave(job.ticket)
        self._jobs.pop(job.ticket, None)
        if job in self._running:
            self._running.remove(job)
        if job.lease is not None:
            self._returned.append(job.lease)

    def _step(self) -> bool:
        with self._changed:
            stalled, self._stalled = self._stalled, False
            admitted = [self._jobs[ticket] for ticket in self._scheduler.admit(over=stalled)]
            self._running += admitted
        self._begin([job for job in admitted if job.origin is not None])
        for job in admitted:
            if not job.ended:
                self._run(job, None)
        resumed = self._resume()
        reading = [job for job in self._running if isinstance(job.ask, Read) and not job.paused]
        choosing = any(_chooses(job) and not job.paused for job in self._running)
        if not (admitted or resumed or reading or choosing):
            return self._unblock()
        takes = self._scheduler.share([job.wants() for job in reading])
        work = [(job, pieces) for job, take in zip(reading, takes, strict=True) if (pieces := job.pieces(take))]
        if work:
            self._forward(work)
        self._deliver([job for job, _ in work if not job.ended])
        return True

    def _begin(self, jobs: Sequence[Job]) -> None:
        """Programs for requests that were let in at the same time, of engines that stack them."""
        groups: dict[tuple[type[Engine], Any], list[Job]] = {}
        for job in jobs:
            assert job.origin is not None
            groups.setdefault((type(job.origin[0]), job.origin[0].config), []).append(job)
        for group in groups.values():
            origins = [job.origin for job in group if job.origin is not None]
            try:
                programs = origins[0][0].together([request for _, request in origins], self.model)
            except Exception as error:
                for job in group:
                    self._end(job, error)
                continue
            for job, program in zip(group, programs, strict=True):
                job.program, job.origin = with_shared(program, self.pool), None

    def _resume(self) -> bool:
        """Go on with those that wait for another's doing, if it is done; whether there were any."""
        ready = [job for job in self._running if isinstance(job.ask, Until) and job.ask.ready()]
        for job in ready:
            if not job.ended:
                self._run(job, None)
        return bool(ready)

    def _unblock(self) -> bool:
        """Nothing can run: all that was let in waits for whoever asked. If others wait for its room, it goes on.

        What is led by hand cannot go on: then the next one is let in beside it, whatever it needs.
        """
        if not self._scheduler.waiting and not self._leasing:
            return False
        ahead = [job for job in self._running if job.paused and job.decoder is not None]
        for job in ahead:
            job.ahead = math.inf
        self._stalled = not ahead and bool(self._scheduler.waiting)
        return self._stalled or bool(ahead)

    def _forward(self, work: Sequence[tuple[Job, Pieces]]) -> None:
        """One forward pass for all; if it fails, one for each job, so that only those fail that must."""
        self._settle(work)
        rows = [row for _, pieces in work for _, row, _ in pieces]
        owners = [job for job, pieces in work for _ in pieces]
        self._marks = [(job, row, row.own.length, row.position) for job, row in zip(owners, rows, strict=True)]
        kept = [[len(row.kept(len(ids))) for _, row, ids in pieces] for _, pieces in work]
        try:
            logits = self.model.step(rows, [ids for _, pieces in work for _, _, ids in pieces])
        except Exception as error:
            if len(work) == 1:
                self._end(work[0][0], error)
            else:
                for each in work:
                    self._forward([each])
            return
        for job, _ in work:
            job.torn = True  # until its program was told
        own = torch.split(logits, [sum(counts) for counts in kept])
        for (job, pieces), counts, scores in zip(work, kept, own, strict=True):
            job.read(pieces, counts, scores)

    def _settle(self, work: Sequence[tuple[Job, Pieces]]) -> None:
        settling = [
            row for _, pieces in work for _, row, ids in pieces if len(ids) == 1 and row.own.length and not row.settled
        ]
        if settling:
            active = [row for job in self._running if isinstance(job.ask, Read) for row in job.ask.rows]
            try:
                self.pool.settle(settling, active, self.model.rotary, windowed=bool(self.model.windows))
            except (MemoryError, RuntimeError) as error:  # it is only faster: the rows read on where the chunks lie
                logger.warning("contexts are read in pieces, as there is no memory to join them: %s", error)
            for row in settling:
                row.settled = True

    def _deliver(self, jobs: Sequence[Job]) -> bool:
        """Send the programs their logits, choose all tokens that they ask for, wait once, and send those."""
        for job in jobs:
            logits = job.read_whole()
            if logits is None:
                job.torn = False
            else:
                self._run(job, logits)
                del logits
        self._resume()
        chosen = False
        while choosing := [job for job in self._running if _chooses(job) and not job.paused]:
            self._choose(choosing)
            chosen = True
        return chosen

    def _choose(self, jobs: Sequence[Job]) -> None:
        told: list[Tensor] = []
        kept: list[tuple[Job, int, bool, bool]] = []  # (job, tokens, is there a winner, was it drawn)
        for job in jobs:
            job.torn = True
            try:
                chosen, finite = job.choice()
                winners = job.ask.winners if isinstance(job.ask, Choose) else None
                telling = [chosen, None if winners is None else winners.index_select(0, chosen.reshape(1)), finite]
                told += [t.reshape(-1).to(self.model.device, torch.long) for t in telling if t is not None]
            except Exception as error:
                self._end(job, error)
                continue
            kept.append((job, chosen.numel(), winners is not None, finite is not None))
        if not kept:
            return
        numbers = iter(torch.cat(told).tolist())  # the one wait for the device
        for job, count, won, drawn in kept:
            tokens = [next(numbers) for _ in range(count)]
            winner = next(numbers) if won else None
            sound = bool(next(numbers)) if drawn else True
            if isinstance(job.ask, Greedy):
                self._run(job, tokens)
            else:
                self._take(job, tokens[0], winner, finite=sound)

    def _take(self, job: Job, token_id: int, winner: int | None, *, finite: bool) -> None:
        assert isinstance(job.ask, Choose)
        assert job.decoder is not None
        most = self.model.max_positions
        try:
            token = job.decoder.take(
                job.ask,
                token_id,
                None if winner is None else job.ask.owners[winner],
                finite=finite,
                full=most is not None and job.position >= most,
            )
        except Exception as error:
            self._end(job, error)
            return
        job.tokens.append(token)
        if token.finish_reason is None:
            self._run(job, token_id)
        else:
            self._end(job)

    def _run(self, job: Job, answer: Any) -> None:
        """Send the program an answer and go on to an ask that has to wait."""
        job.torn = True
        try:
            ask = job.send(answer)
            while isinstance(ask, Leave):
                for row in ask.rows:
                    row.own = OwnKV()
                ask = job.send(None)
            if isinstance(ask, Read):
                self._prepare(job, ask)
            job.begin(ask)
            job.torn = False
        except StopIteration:
            self._end(job)
        except Exception as error:
            self._end(job, error)

    def _prepare(self, job: Job, ask: Read) -> None:
        if not ask.rows or not all(ask.ids) or len({id(row) for row in ask.rows}) < len(ask.rows):
            raise ValueError("a Read names each of its rows once, at least one, with at least one token for each")
        last = max(max(row.places(len(ids))) for row, ids in zip(ask.rows, ask.ids, strict=True))
        self.model.require_positions(last + 1)
        running = sum(job.ticket.rows for job in self._running)
        for row, ids in zip(ask.rows, ask.ids, strict=True):
            fresh = not row.own.length and row.own.reserve  # without a reserve one read is all that it takes
            if fresh and job.decoder is not None and not isinstance(row, Stack):
                row.own = self._slabs.place(len(ids), job.decoder.remaining, running)


def _chooses(job: Job) -> bool:
    return isinstance(job.ask, Greedy) or (isinstance(job.ask, Choose) and job.decoder is not None)


def runtime_of(model: LanguageModel, limits: Limits | None = None) -> Runtime:
    """The one runtime of a model, so that all who ask the same model are answered together.

    Whoever asks for it first says within which `limits`.
    """
    return model.companion(Runtime, lambda model: Runtime(model, **({} if limits is None else asdict(limits))))


def _forget_all() -> None:
    """In the child of a fork: the threads that ran steps or waited are not here, and their locks are nobody's."""
    for runtime in list(_all):
        runtime.restart()


os.register_at_fork(after_in_child=_forget_all)
