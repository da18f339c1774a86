"""`Runtime`: runs the requests to one model together, one step at a time; `Stream` and `TokenStream` are the callers'
handles.

An engine thread runs the steps for all requests, and ends when none can go on. It starts when a caller waits for a
token, so requests that were submitted before begin together. Callers wait at the bell of their own request: an
interrupt ends the wait of its thread, and never enters a step.

`limits_for` derives a runtime's limits from the user's settings and, for the rest, from the model's size and the
available memory.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ragkv.engines.base import Sample, require_reach, require_supported
from ragkv.errors import AnswerInterruptedError, UsageError
from ragkv.runtime.batch_executor import BatchExecutor
from ragkv.runtime.decoding import Decoder, Generation, Token
from ragkv.runtime.executor import Executor, require_served
from ragkv.runtime.kv_pool import KVPool, Lease, with_shared
from ragkv.runtime.scheduler import Scheduler, Ticket
from ragkv.runtime.step import Job, Stepper

if TYPE_CHECKING:
    from ragkv.engines import Engine, ModelFacts, Request
    from ragkv.model.language_model import LanguageModel

logger = logging.getLogger(__name__)


class TokenStream:
    """The tokens of one request as they are generated. Closing or dropping it cancels the rest."""

    def __init__(self, runtime: Runtime, job: Job) -> None:
        self._runtime = runtime
        self._job = job
        self._over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        if self._over:
            raise StopIteration
        try:
            self._runtime.wait(self._job)
            tokens, _ = self._runtime.taken(self._job, most=1)
        except BaseException:
            self.close()
            raise
        if not tokens:
            self.close()
            raise StopIteration
        self._over = tokens[0].finish_reason is not None
        return tokens[0]

    def close(self) -> None:
        """Cancel the rest of the answer."""
        self._over = True
        self._runtime.cancel(self._job)

    def __del__(self) -> None:
        self.close()


class Stream:
    """A request that the caller drives by hand: read the scores, then append any token.

    `scores` are those of the next token, `(vocab,)` in fp32. It serves measurements and comparisons; `Runtime.decode`
    generates answers.
    """

    def __init__(self, runtime: Runtime, engine: Engine, request: Request) -> None:
        self._runtime = runtime
        self._job = runtime.submit(engine, request, None)
        try:
            self._choice()
        except BaseException:  # its traceback would keep the request alive
            self.close()
            raise

    def __del__(self) -> None:
        if hasattr(self, "_job"):  # otherwise submit refused it
            self.close()

    def close(self) -> None:
        """Release the request's KV; it cannot be continued."""
        self._runtime.cancel(self._job)

    @property
    def scores(self) -> Tensor:
        return self._choice().scores

    @property
    def position(self) -> int:
        """The position of the next token in the longest sequence."""
        return self._job.position

    def advance(self, token_id: int, *, wait: bool = True) -> None:
        """Append a token and compute the next scores. Without `wait`, they are computed when the scores of any stream
        are needed, in one step for all streams that were advanced before.
        """
        self._choice()
        self._runtime.answer(self._job, token_id)
        if wait:
            self._runtime.wait(self._job)

    def best(self) -> int:
        """The greedy choice; the lowest id among equals."""
        return int(self._choice().best())

    def winner(self, token_id: int) -> int | None:
        """Index into `Request.chunks` of the expert that proposes `token_id`; None where there are no experts."""
        choice = self._choice()
        return None if choice.winners is None else choice.owners[int(choice.winners[token_id])]

    def _choice(self) -> Sample:
        self._runtime.wait(self._job)
        if self._job.error is not None:
            raise self._job.error
        if not isinstance(self._job.operation, Sample):
            raise ValueError("the request has ended: it has no scores any more")
        return self._job.operation


LINGER_SECONDS = 0.05
"""How long the engine thread waits for more to do before it ends; a process that ends waits for it."""
MOST_SEQUENCES = 256
"""Default number of concurrent sequences; a decode step gains little from more."""
OWN_SHARE = 8
"""1/OWN_SHARE of the memory is for own KV: questions and generated tokens."""
WORK_SHARE = 16
"""1/WORK_SHARE of the memory is for the activations of one step, which depend on its tokens."""
LEAST_TOKENS, MOST_TOKENS = 256, {"cuda": 8192}
"""The smallest and largest default number of tokens in a step. On devices that are not named here the largest is 4096,
which makes the matrices large enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeLimits:
    """At most `batch_tokens` tokens in a step; at a time, `max_rows` sequences, `own_tokens` tokens of own KV and
    `budget` bytes of chunk KV. With `strict`, a request that needs more sequences is refused; else it runs alone.
    """

    batch_tokens: int = 4096
    max_rows: int = MOST_SEQUENCES
    own_tokens: int = 1 << 20
    budget: int = 8 << 30
    strict: bool = False


def limits_for(
    model: LanguageModel, *, memory: int, budget: int, batch_tokens: int | None = None, max_rows: int | None = None
) -> RuntimeLimits:
    """The limits for a model on a machine (or device) with `memory` bytes, `budget` of them for chunk KV.

    `batch_tokens` and `max_rows` are the user's and hold strictly.
    """
    hidden, inner = model.config.hidden_size, getattr(model.config, "intermediate_size", None)
    # residuals, queries and partial results in fp32, and the MLP's activations: an upper bound
    working = 4 * (12 * hidden + 4 * (inner if isinstance(inner, int) else 4 * hidden))
    most = MOST_TOKENS.get(model.device.type, 4096)
    tokens = min(most, max(LEAST_TOKENS, memory // WORK_SHARE // working))
    shape = model.kv_shape
    rows = MOST_SEQUENCES if batch_tokens is None else batch_tokens  # each sequence has a token in every step
    if batch_tokens is None and shape.state_bytes:
        rows = max(min(rows, memory // OWN_SHARE // shape.state_bytes), 1)
    return RuntimeLimits(
        batch_tokens=tokens if batch_tokens is None else batch_tokens,
        max_rows=rows if max_rows is None else max_rows,
        own_tokens=max(memory // OWN_SHARE // max(shape.token_bytes, 1), 1),
        budget=budget if model.joins else budget // 2,  # each sequence has a copy of the KV that it continues
        strict=batch_tokens is not None or max_rows is not None,
    )


_all: weakref.WeakSet[Runtime] = weakref.WeakSet()


class Runtime:
    """Answers requests to one model, many at a time, from any number of threads.

    At most `batch_tokens` tokens are in one step and `max_rows` sequences run at a time; by default, both follow from
    the available memory (`limits_for`). At most `budget` bytes of chunk KV are leased. `executor` makes what runs the
    model; it must not keep the model alive.
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
        executor: Callable[[Any], Executor] = BatchExecutor,
    ) -> None:
        self._model = weakref.ref(model)  # weak: the model holds its runtime
        self._make_executor = executor
        self.executor = executor(model)
        self.pool = KVPool(budget)
        if (most := self.executor.traits.max_sequences) is not None:
            max_rows = min(max_rows, most)
        self._scheduler = Scheduler(batch_tokens=batch_tokens, max_rows=max_rows, own_tokens=own_tokens, strict=strict)
        self._start()
        _all.add(self)

    def _start(self) -> None:
        self._lock = threading.Lock()
        """Held while requests come and go, never while a step runs."""
        self._thread: threading.Thread | None = None
        """The engine thread, while there is one; without it, who holds the lock may do its work."""
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Rings for the engine thread."""
        self._jobs: dict[Ticket, Job] = {}  # submitted and not ended
        self._stalled = False
        self._over: list[Job] = []
        """Jobs that the running step has stopped."""
        me = weakref.ref(self)  # weak: no reference cycle

        def end(job: Job, error: BaseException | None) -> None:
            runtime = me()
            if runtime is not None:
                runtime._end(job, error)

        self._stepper = Stepper(self.executor, self.pool, self._scheduler, end)
        self._leasing: list[_LeaseRequest] = []  # the requests that wait for KV, in order
        self._closed: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        # appended to by any thread, without the lock: the collection of a generator may come while it is held
        self._returned: deque[Lease] = deque()
        self._leaving: deque[Job] = deque()
        self._choices: deque[tuple[Job, int]] = deque()
        self._closing: deque[SimpleQueue[None]] = deque()

    @property
    def model(self) -> ModelFacts:
        """The model that it runs; ReferenceError once it has been freed."""
        return self.executor.model

    @property
    def idle(self) -> bool:
        """Whether it has no requests, and no KV of its pool is held, once those that were cancelled have ended."""
        self._after_step()
        with self._lock:
            self._clear()
            return not (self._jobs or self._stepper.running or self._scheduler.waiting or self.pool.leased)

    def submit(
        self,
        engine: Engine,
        request: Request,
        generation: Generation | None,
        *,
        owner: object = None,
        lease: Lease | None = None,
        bell: SimpleQueue[Any] | None = None,
    ) -> Job:
        """Queue a request, which begins with the next `wait`. If `generation` is None, the caller chooses its tokens
        (`Stream`). `bell` gets an item whenever there is something to take; requests may share one.

        `lease`, the KV that it reads, is returned to the pool when it ends. Raises UsageError for a request that can
        never run, UnsupportedModelError for an engine that the model cannot run exactly, AnswerInterruptedError if its
        `owner` was closed.
        """
        model = self.model
        require_supported(engine, model)
        require_served(engine, self.executor)
        limit = 0 if generation is None else generation.max_new_tokens
        parts = (request.prefix_ids, *(chunk.token_ids for chunk in request.chunks), request.suffix_ids)
        require_reach(engine, model, sum(map(len, parts)) + limit)
        demand = engine.demand(request, limit)
        most = self.executor.traits.max_sequences
        if most is not None and demand.rows > most:
            raise UsageError(
                f"The question needs {demand.rows} sequences at a time, and {self.executor.traits.name} has {most}; "
                "lower --top-k."
            )
        reads = frozenset(id(chunk.kv) for chunk in request.chunks if chunk.kv is not None)
        ticket = Ticket(rows=demand.rows, tokens=demand.tokens, reads=reads.union(demand.shared), shared=demand.shared)
        decoder = None if generation is None else Decoder(model, generation)
        program = with_shared(engine.program(request, model), self.pool, self.executor)
        job = Job(program, ticket, decoder, model=model, owner=owner, lease=lease, bell=bell)
        with self._lock:
            self._require_open(owner)
            self._jobs[ticket] = job
            try:
                self._scheduler.submit(ticket)
            except BaseException:
                del self._jobs[ticket]
                raise
        self._ring()
        return job

    def wait(self, job: Job) -> None:
        """Return when the job is `ready`."""
        while not job.ready:
            self._require_outside()
            self._run()
            job.bell.get()

    def wait_any(self, bell: SimpleQueue[Any]) -> None:
        """Return when one of the requests with this bell may be `ready`."""
        self._require_outside()
        self._run()
        bell.get()
        while not bell.empty():
            bell.get()

    def advance(self) -> bool:
        """Run one step in this thread, after an engine thread has ended; False if there is nothing to do. For tests:
        `wait` runs the steps otherwise.
        """
        self._require_outside()
        while True:
            with self._lock:
                if (thread := self._thread) is None:
                    self._thread = threading.current_thread()
                    break
            thread.join()
        try:
            return self._turn()
        finally:
            with self._lock:
                self._thread = None
                self._clear()

    def answer(self, job: Job, token_id: int) -> None:
        """Give a job that waits at a `Sample` its token, if the caller chooses the tokens; the next `wait` goes on."""
        job.operation = None
        self._choices.append((job, token_id))
        self._ring()

    def tokens(self, job: Job) -> TokenStream:
        """The answer's tokens as they are generated; closing the iterator early cancels the rest."""
        return TokenStream(self, job)

    def taken(self, job: Job, *, most: int | None = None) -> tuple[list[Token], bool]:
        """The tokens generated so far (at most `most`), without waiting, and whether they are all; raises the job's
        error."""
        ended, paused = job.ended, job.paused  # read first: the last token comes before the end
        if job.cancelled and job.error is None:
            return [], ended
        tokens = [job.tokens.popleft() for _ in range(len(job.tokens))[:most]]
        if ended and not tokens and job.error is not None:
            raise job.error
        if paused and tokens and not ended:
            self._run()
        return tokens, ended and not job.tokens and job.error is None

    def decode(self, engine: Engine, request: Request, generation: Generation) -> TokenStream:
        """One request's answer, token by token, beginning with the read of its question."""
        return self.tokens(self.submit(engine, request, generation))

    def cancel(self, job: Job) -> None:
        """End the job before its next step; does nothing to a job that has ended. Never waits."""
        if not job.ended:
            job.cancelled = True
            self._leaving.append(job)
            job.bell.put(None)
            self._ring()

    def close(self, owner: object, message: str) -> None:
        """End all jobs of `owner`, now and later, with AnswerInterruptedError(message).

        Returns once no step reads any of their KV. UsageError within a step, which cannot wait for its own end.
        """
        self._require_outside("An index cannot be closed from within its model's step; close it elsewhere.")
        with self._lock:
            self._closed[owner] = message
            for job in self._jobs.values():
                if job.owner is owner and not job.cancelled:
                    job.cancelled, job.error = True, AnswerInterruptedError(message)
                    self._leaving.append(job)
            for request in self._leasing:
                request.bell.put(None)
        self._after_step()

    def lease(
        self,
        sizes: Mapping[Hashable, int],
        *,
        owner: object = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Lease | None:
        """Lease KV for a request, in turn, waiting for others to return theirs as long as they can.

        None once `cancelled()` is true (`nudge` makes waiting threads check it); AnswerInterruptedError if `owner` is
        closed.
        """
        request = _LeaseRequest(sizes)
        with self._lock:
            self._require_open(owner)
            self._leasing.append(request)
            self._clear()
        granted = False
        try:
            while request.lease is None and not cancelled():
                self._require_open(owner)
                self._require_outside()
                self._run()
                request.bell.get()
            granted = request.lease is not None and not cancelled()
            return request.lease if granted else None
        finally:
            with self._lock:
                if request in self._leasing:
                    self._leasing.remove(request)
            if request.lease is not None and not granted:
                self.release(request.lease)

    def try_lease(self, sizes: Mapping[Hashable, int], *, owner: object = None) -> Lease | None:
        """`lease`, if it is possible at once and no other request waits for one; else None."""
        with self._lock:
            self._require_open(owner)
            self._clear()
            return self.pool.lease(sizes) if not self._leasing and self.pool.fits(sizes) else None

    @property
    def has_room(self) -> bool:
        """Whether a small request that is submitted now would start with the next step."""
        with self._lock:
            self._clear()
            return self._scheduler.has_room

    def release(self, lease: Lease) -> None:
        """Return KV to the pool. Never waits."""
        self._returned.append(lease)
        self._ring()

    def restart(self) -> None:
        """Forget all requests: for the child of a fork, where nothing answers them."""
        jobs, model = list(self._jobs.values()), self._model()
        if model is not None:
            self.executor = self._make_executor(model)
        self.pool, self._scheduler = KVPool(self.pool.budget), self._scheduler.emptied()
        self._start()
        for job in jobs:
            job.end(AnswerInterruptedError("The answer was begun before a fork; ask again in this process."))

    def nudge(self) -> None:
        """Make the threads that wait for a lease check whether they still want it. Never waits."""
        for request in list(self._leasing):
            request.bell.put(None)

    @property
    def _loading(self) -> bool:
        """Under the lock: whether a request has leased KV that it has not begun to read."""
        return self.pool.leases > sum(job.lease is not None for job in self._jobs.values())

    def _after_step(self) -> None:
        """Wait until cancelled jobs have ended: after the running step, if there is one."""
        done: SimpleQueue[None] = SimpleQueue()
        with self._lock:
            self._closing.append(done)
            self._clear()
        self._bell.put(None)
        done.get()

    def _require_open(self, owner: object) -> None:
        message = None if owner is None else self._closed.get(owner)
        if message is not None:
            raise AnswerInterruptedError(message)

    def _require_outside(
        self, message: str = "A question cannot be asked from within its model's step (by a stopping criterion)."
    ) -> None:
        if self._thread is threading.current_thread():
            raise UsageError(message)

    def _ring(self) -> None:
        """Have what was appended to the queues done: by the engine thread before its next step, or without one now.

        It must not wait: the collection of a generator may call it while this very thread holds the lock; then the
        queues are cleared when the next one takes the lock.
        """
        self._bell.put(None)
        if self._thread is None and self._lock.acquire(blocking=False):
            try:
                self._clear()
            finally:
                self._lock.release()

    def _clear(self) -> None:
        """Under the lock: end cancelled jobs and finish closing, unless a step may run; take back leases, and grant
        them to those who wait.
        """
        if self._thread is None or self._thread is threading.current_thread():
            while self._leaving:
                job = self._leaving.popleft()
                self._forget(job)
                job.end(job.error)
            while self._closing:
                self._closing.popleft().put(None)
        while self._returned:
            self.pool.release(self._returned.popleft())
        while self._leasing and self.pool.fits(self._leasing[0].sizes):
            self._grant()

    def _grant(self) -> None:
        request = self._leasing.pop(0)
        request.lease = self.pool.lease(request.sizes)
        request.bell.put(None)

    def _run(self) -> None:
        """Have an engine thread."""
        with self._lock:
            if self._thread is not None:
                self._bell.put(None)
                return
            self._thread = thread = threading.Thread(target=self._serve, name="ragkv-engine")
            try:
                thread.start()
            except BaseException:  # no more threads, or an interrupt before it has begun
                if thread.ident is None:
                    self._thread = None
                raise

    def _serve(self) -> None:
        """The engine thread: run steps as long as there is something to do, and for `LINGER_SECONDS` more."""
        while True:
            while self._turn():
                pass
            with suppress(Empty):
                self._bell.get(timeout=LINGER_SECONDS)
                continue
            with self._lock:
                if self._bell.empty():
                    self._thread = None
                    self._clear()
                    return

    def _turn(self) -> bool:
        """Do what was asked for, and run one step for all requests; False if nothing can go on."""
        while not self._bell.empty():
            self._bell.get()
        try:
            while self._choices:
                job, token_id = self._choices.popleft()
                if not job.stopped:
                    with torch.inference_mode():
                        self._stepper.advance(job, token_id)
            with self._lock:
                self._clear()
                stalled, self._stalled = self._stalled, False
                admitted = [self._jobs[ticket] for ticket in self._scheduler.admit(over=stalled)]
            if not threading.main_thread().is_alive():  # the program ends: nothing is generated ahead of its reader
                for job in self._stepper.running:
                    job.ahead = 1
            with torch.inference_mode():
                return self._stepper.step(admitted) or self._unblock()
        except BaseException as error:  # of a caller's own code; an interrupt comes to the main thread
            logger.exception("a step of the model failed")
            for job in [job for job in self._jobs.values() if self._scheduler.runs(job.ticket)]:
                failure = AnswerInterruptedError("The answer was interrupted while it was generated; ask again.")
                failure.__cause__ = error
                self._end(job, failure)
            return True
        finally:  # no frame of the step holds KV any more
            while self._over:
                self._over.pop().end()

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        with self._lock:
            self._forget(job)
        job.stop(error)
        self._over.append(job)

    def _forget(self, job: Job) -> None:
        """Under the lock: drop everything that the runtime holds for a job that has ended."""
        self._scheduler.leave(job.ticket)
        self._jobs.pop(job.ticket, None)
        if job in self._stepper.running:
            self._stepper.running.remove(job)
            self.executor.request_ended()
        if job.lease is not None:
            self._returned.append(job.lease)
            job.lease = None

    def _unblock(self) -> bool:
        """Called if all admitted jobs wait for their callers. If other jobs wait for their room, the admitted ones
        continue. If others wait for KV that nobody will give back, the first gets it beyond the budget.

        A job that its caller drives cannot continue: then the next job is admitted beside it, whatever it needs.
        """
        with self._lock:
            self._clear()
            if not self._scheduler.waiting and not self._leasing:
                return False
            ahead = [job for job in self._stepper.running if job.paused and job.decoder is not None]
            for job in ahead:
                job.ahead = math.inf
            self._stalled = not ahead and bool(self._scheduler.waiting)
            if not ahead and not self._stalled and not self._loading:
                self._grant()
            return self._stalled or bool(ahead)


class _LeaseRequest:
    """A request that waits for KV; `bell` rings when it has its lease, or should look whether it still wants one."""

    def __init__(self, sizes: Mapping[Hashable, int]) -> None:
        self.sizes, self.bell = sizes, SimpleQueue[None]()
        self.lease: Lease | None = None


def runtime_of(model: LanguageModel, limits: RuntimeLimits | None = None) -> Runtime:
    """The one runtime of a model, so that all requests to the same model are answered together.

    The first caller sets its `limits`.
    """
    return model.companion(Runtime, lambda model: Runtime(model, **({} if limits is None else asdict(limits))))


def _forget_all() -> None:
    """In the child of a fork: threads that ran steps or waited do not exist here, so nothing holds their locks."""
    for runtime in list(_all):
        runtime.restart()


os.register_at_fork(after_in_child=_forget_all)
