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
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from ragkv.engines.ability import require_able, require_reach
from ragkv.errors import AnswerInterruptedError, UsageError
from ragkv.runtime.decoder import Decoder, Generation, Token
from ragkv.runtime.job import Job
from ragkv.runtime.limit import Limits
from ragkv.runtime.pool import Lease, Pool
from ragkv.runtime.scheduler import Scheduler, Ticket
from ragkv.runtime.shared import with_shared
from ragkv.runtime.stepper import Stepper
from ragkv.runtime.stream import TokenStream

if TYPE_CHECKING:
    from ragkv.attention.across import Ranks
    from ragkv.engines import Engine, Request
    from ragkv.model.language import LanguageModel

__all__ = ["Runtime", "runtime_of"]

logger = logging.getLogger(__name__)

_all: weakref.WeakSet[Runtime] = weakref.WeakSet()


class Runtime:
    """Answers requests to one model, many at a time; any number of threads.

    `batch_tokens` tokens at most are in one step, `max_rows` rows run at a time; unset, they follow from the memory at
    hand (`ragkv.runtime.limit`). `budget` bytes of chunk KV are leased at a time.

    With `ranks`, the runtimes of all of them take the same steps: they are made with the same limits, and asked the
    same things in the same order, one thread each. Rank 0 chooses the tokens.
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
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
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
        self._jobs: dict[Ticket, Job] = {}  # submitted and not ended
        me = weakref.ref(self)  # no circle: KV is freed with the last who holds the runtime

        def end(job: Job, error: BaseException | None) -> None:
            runtime = me()
            if runtime is not None:
                runtime._end(job, error)

        self._stepper = Stepper(self._model, self.pool, self._scheduler, end, self._ranks)
        self._leasing: deque[object] = deque()  # who waits for KV, in order
        self._closed: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        # filled without the lock, by whoever leaves
        self._returned: deque[Lease] = deque()
        self._leaving: deque[Job] = deque()

    @property
    def model(self) -> LanguageModel:
        """The model that it steps."""
        return self._stepper.model

    @property
    def idle(self) -> bool:
        """Whether nothing is asked of it, and nobody holds KV of its pool."""
        with self._locked():
            return not (self._jobs or self._stepper.running or self._scheduler.waiting or self.pool.leased)

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
        never run, UnsupportedModelError for an engine that the model cannot run exactly, AnswerInterruptedError when
        its `owner` was closed.
        """
        model = self.model
        require_able(engine, model)
        limit = 0 if generation is None else generation.max_new_tokens
        parts = (request.prefix_ids, *(chunk.token_ids for chunk in request.chunks), request.suffix_ids)
        require_reach(engine, model, sum(map(len, parts)) + limit)
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
                self._stepper.tell(job, token_id)
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
                self._stepper.marks = []
                self._driver = None  # first of all: if an interrupt comes now, the step is over all the same
                with self._changed:
                    self._clear()
                    self._changed.notify_all()
                self._post()

    def _break(self, cause: BaseException) -> bool:
        """A step was broken off: end what was in the middle of something, and say whether there was any.

        What had not been read yet is read again by the next step: rows count nothing before the end of a pass.
        """
        with self._changed:
            self._stepper.running = [job for job in self._jobs.values() if self._scheduler.runs(job.ticket)]
        torn = self._stepper.torn()
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
        if job in self._stepper.running:
            self._stepper.running.remove(job)
        if job.lease is not None:
            self._returned.append(job.lease)

    def _step(self) -> bool:
        with self._changed:
            stalled, self._stalled = self._stalled, False
            admitted = [self._jobs[ticket] for ticket in self._scheduler.admit(over=stalled)]
        return self._stepper.step(admitted) or self._unblock()

    def _unblock(self) -> bool:
        """Nothing can run: all that was let in waits for whoever asked. If others wait for its room, it goes on.

        What is led by hand cannot go on: then the next one is let in beside it, whatever it needs.
        """
        if not self._scheduler.waiting and not self._leasing:
            return False
        ahead = [job for job in self._stepper.running if job.paused and job.decoder is not None]
        for job in ahead:
            job.ahead = math.inf
        self._stalled = not ahead and bool(self._scheduler.waiting)
        return self._stalled or bool(ahead)


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
