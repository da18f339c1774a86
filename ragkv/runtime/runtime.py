"""`Runtime`: runs the requests to one model together, one step at a time; `Stream` and `TokenStream` are the callers'
handles.

There is no background thread. The threads that wait for a token drive the runtime: one of them runs the next step for
all requests while the others sleep, and when it has its token, another takes over. So requests that arrive at the same
time, from threads or tasks, are answered in one batch; a single request runs in its own thread; and nothing runs when
nothing is asked.

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
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from ragkv.engines.base import Sample, require_reach, require_supported
from ragkv.errors import AnswerInterruptedError, UsageError
from ragkv.runtime.decoding import Decoder, Generation, Token
from ragkv.runtime.executor import Executor, require_served
from ragkv.runtime.kv_pool import KVPool, Lease, with_shared
from ragkv.runtime.scheduler import Scheduler, Ticket
from ragkv.runtime.step import Job, Stepper
from ragkv.util.lazy import torch_if_loaded

if TYPE_CHECKING:
    from torch import Tensor

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
            cancelled = self._job.cancelled and self._job.error is None
            if not cancelled and self._job.tokens:
                token = self._job.tokens.popleft()
                self._over = token.finish_reason is not None
                return token
        except BaseException:
            self.close()
            raise
        self.close()
        if self._job.error is not None:
            raise self._job.error
        raise StopIteration

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
        import torch

        return torch.as_tensor(self._choice().scores)

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


MAX_SEQUENCES = 256
"""Default number of concurrent sequences; a decode step gains little from more."""
OWN_SHARE = 8
"""1/OWN_SHARE of the memory is for own KV: questions and generated tokens."""
WORK_SHARE = 16
"""1/WORK_SHARE of the memory is for the activations of one step, which depend on its tokens."""
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 256, {"cuda": 8192}
"""The smallest and largest default number of tokens in a step. On devices that are not named here the largest is 4096,
which makes the matrices large enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeLimits:
    """At most `batch_tokens` tokens in a step; at a time, `max_sequences` sequences, `own_tokens` tokens of own KV and
    `budget` bytes of chunk KV. With `strict`, a request that needs more sequences is refused; else it runs alone.
    """

    batch_tokens: int = 4096
    max_sequences: int = MAX_SEQUENCES
    own_tokens: int = 1 << 20
    budget: int = 8 << 30
    strict: bool = False


def limits_for(
    model: LanguageModel, *, memory: int, budget: int, batch_tokens: int | None = None, max_sequences: int | None = None
) -> RuntimeLimits:
    """The limits for a model on a machine (or device) with `memory` bytes, `budget` of them for chunk KV.

    `batch_tokens` and `max_sequences` are the user's and hold strictly.
    """
    hidden, inner = model.config.hidden_size, getattr(model.config, "intermediate_size", None)
    # residuals, queries and partial results in fp32, and the MLP's activations: an upper bound
    working = 4 * (12 * hidden + 4 * (inner if isinstance(inner, int) else 4 * hidden))
    most = MAX_STEP_TOKENS.get(model.device.type, 4096)
    tokens = min(most, max(MIN_STEP_TOKENS, memory // WORK_SHARE // working))
    shape = model.kv_shape
    sequences = MAX_SEQUENCES if batch_tokens is None else batch_tokens  # each sequence has a token in every step
    if batch_tokens is None and shape.state_bytes:
        sequences = max(min(sequences, memory // OWN_SHARE // shape.state_bytes), 1)
    return RuntimeLimits(
        batch_tokens=tokens if batch_tokens is None else batch_tokens,
        max_sequences=sequences if max_sequences is None else max_sequences,
        own_tokens=max(memory // OWN_SHARE // max(shape.token_bytes, 1), 1),
        budget=budget if model.joins else budget // 2,  # each sequence has a copy of the KV that it continues
        strict=batch_tokens is not None or max_sequences is not None,
    )


_all: weakref.WeakSet[Runtime] = weakref.WeakSet()


class Runtime:
    """Answers requests to one model, many at a time, from any number of threads.

    At most `batch_tokens` tokens are in one step and `max_sequences` sequences run at a time; by default, both follow
    from the available memory (`limits_for`). At most `budget` bytes of chunk KV are leased. `executor` makes what runs
    the model, by default `model.executor`, else `BatchExecutor`; it must not keep the model alive.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        batch_tokens: int = 4096,
        max_sequences: int = 256,
        own_tokens: int = 1 << 20,
        budget: int = 8 << 30,
        strict: bool = False,
        executor: Callable[[Any], Executor] | None = None,
    ) -> None:
        self._model = weakref.ref(model)  # weak: the model holds its runtime
        self._make_executor = executor or getattr(type(model), "executor", None) or _batch_executor
        self.executor = self._make_executor(model)
        self.pool = KVPool(budget)
        if (most := self.executor.traits.max_sequences) is not None:
            max_sequences = min(max_sequences, most)
        self._make_scheduler = partial(
            Scheduler, batch_tokens=batch_tokens, max_sequences=max_sequences, own_tokens=own_tokens, strict=strict
        )
        self._scheduler = self._make_scheduler()
        self._start()
        _all.add(self)

    def _start(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._driver: int | None = None
        """The thread that is running a step."""
        self._steps = 0
        self._stalled = False
        self._jobs: dict[Ticket, Job] = {}  # submitted and not ended
        me = weakref.ref(self)  # weak: no reference cycle

        def end(job: Job, error: BaseException | None) -> None:
            runtime = me()
            if runtime is not None:
                runtime._end(job, error)

        self._stepper = Stepper(self.executor, self.pool, self._scheduler, end)
        self._leasing: deque[object] = deque()  # the requests that wait for KV, in order
        self._closed: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        # appended to without the lock
        self._returned: deque[Lease] = deque()
        self._leaving: deque[Job] = deque()

    @property
    def model(self) -> ModelFacts:
        """The model that it runs; ReferenceError once it has been freed."""
        return self.executor.model

    @property
    def idle(self) -> bool:
        """Whether it has no requests, and no KV of its pool is held."""
        with self._locked():
            return not (self._jobs or self._stepper.running or self._scheduler.waiting or self.pool.leased)

    def require(self, engine: Engine) -> None:
        """UnsupportedModelError for an engine that it cannot run exactly."""
        require_supported(engine, self.model)
        require_served(engine, self.executor)

    def submit(
        self,
        engine: Engine,
        request: Request,
        generation: Generation | None,
        *,
        owner: object = None,
        lease: Lease | None = None,
    ) -> Job:
        """Start a request. If `generation` is None, the caller chooses its tokens (`Stream`).

        `lease`, the KV that it reads, is returned to the pool when it ends. Raises UsageError for a request that can
        never run, UnsupportedModelError for an engine that the model cannot run exactly, AnswerInterruptedError if its
        `owner` was closed.
        """
        self.require(engine)
        parts = (request.prefix_ids, *(chunk.token_ids for chunk in request.chunks), request.suffix_ids)
        new = 0 if generation is None else generation.max_new_tokens
        require_reach(engine, self.model, sum(map(len, parts)) + new)
        job = self._prepare(engine, request, generation)
        job.owner, job.lease = owner, lease
        with self._locked():
            self._require_open(owner)
            self._start_job(job)
        return job

    def _prepare(self, engine: Engine, request: Request, generation: Generation | None) -> Job:
        """The job of a request that `require` and the model's reach allow; nothing of it runs yet."""
        demand = engine.demand(request, 0 if generation is None else generation.max_new_tokens)
        most = self.executor.traits.max_sequences
        if most is not None and demand.sequences > most:
            raise UsageError(
                f"The question needs {demand.sequences} sequences at a time, and {self.executor.traits.name} has "
                f"{most}; lower --top-k."
            )
        reads = frozenset(id(chunk.kv) for chunk in request.chunks if chunk.kv is not None)
        ticket = Ticket(
            sequences=demand.sequences, tokens=demand.tokens, reads=reads.union(demand.shared), shared=demand.shared
        )
        decoder = None if generation is None else Decoder(self.model, generation)
        program = with_shared(engine.program(request, self.model), self.pool, self.executor)
        return Job(program, ticket, decoder, model=self.model)

    def _start_job(self, job: Job) -> None:
        """Under the lock."""
        self._scheduler.submit(job.ticket)
        self._jobs[job.ticket] = job

    def wait(self, job: Job) -> None:
        """Return when the job is `ready`; drive the runtime meanwhile if no other thread does."""
        while True:
            with self._locked():
                while not job.ready and self._driver is not None:
                    self._sleep()
                if job.ready:
                    return
            if not self._drive():  # nothing can run until another thread acts
                with self._locked():
                    if not job.ready and self._driver is None:
                        self._sleep()

    def advance(self) -> bool:
        """Run one step for all requests, or wait for the running one; False if there is nothing to do."""
        with self._locked():
            if self._driver is not None:
                self._sleep()
                return True
        return self._drive()

    def answer(self, job: Job, token_id: int) -> None:
        """Give a job that waits at a `Sample` its token, if the caller chooses the tokens. Runs no step."""
        sent = False

        def send() -> bool:
            nonlocal sent
            sent = True
            self._stepper.advance(job, token_id)
            return True

        while not sent:  # another thread may take the drive first
            with self._locked():
                while self._driver is not None:
                    self._sleep()
            self._drive(send)

    def tokens(self, job: Job) -> TokenStream:
        """The answer's tokens as they are generated; closing the iterator early cancels the rest."""
        return TokenStream(self, job)

    def taken(self, job: Job, *, most: int | None = None) -> tuple[list[Token], bool]:
        """The tokens generated so far (at most `most`), without waiting, and whether they are all; raises the job's
        error."""
        ended = job.ended  # read first: the last token comes before the end
        if job.cancelled and job.error is None:
            return [], ended
        tokens = [job.tokens.popleft() for _ in range(len(job.tokens))[:most]]
        if ended and not tokens and job.error is not None:
            raise job.error
        return tokens, ended and not job.tokens and job.error is None

    def decode(self, engine: Engine, request: Request, generation: Generation) -> TokenStream:
        """One request's answer, token by token, beginning with the read of its question."""
        return self.tokens(self.submit(engine, request, generation))

    def cancel(self, job: Job) -> None:
        """End the job before its next step; does nothing to a job that has ended. Never waits."""
        if not job.ended:
            job.cancelled = True
            self._leaving.append(job)
            self._post()

    def close(self, owner: object, message: str) -> None:
        """End all jobs of `owner`, now and later, with AnswerInterruptedError(message).

        Returns once no step reads any of their KV. UsageError within a step, which cannot wait for its own end.
        """
        with self._locked():
            if self._driver == threading.get_ident():
                raise UsageError("An index cannot be closed from within its model's step; close it elsewhere.")
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
        """Lease KV for a request, in turn, waiting for others to return theirs as long as they can.

        None once `cancelled()` is true (`nudge` makes waiting threads check it); AnswerInterruptedError if `owner` is
        closed.
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
                    if not first or self._loading:  # those requests will certainly continue
                        self._sleep()
                        continue
                stuck = not self.advance()  # the leases' holders wait for their callers: do not block other requests
            return None
        finally:
            self._leasing.remove(turn)
            self._post(changed=True)

    def try_lease(self, sizes: Mapping[Hashable, int], *, owner: object = None) -> Lease | None:
        """`lease`, if it is possible at once and no other request waits for one; else None."""
        with self._locked():
            self._require_open(owner)
            return self.pool.lease(sizes) if not self._leasing and self.pool.fits(sizes) else None

    @property
    def has_room(self) -> bool:
        """Whether a small request that is submitted now would start with the next step."""
        with self._locked():
            return self._scheduler.has_room

    def release(self, lease: Lease) -> None:
        """Return KV to the pool. Never waits."""
        self._returned.append(lease)
        self._post()

    def restart(self) -> None:
        """Forget all requests: for the child of a fork, where nothing answers them."""
        jobs, model = list(self._jobs.values()), self._model()
        if model is not None:
            self.executor = self._make_executor(model)
        self.pool, self._scheduler = KVPool(self.pool.budget), self._make_scheduler()
        self._start()
        for job in jobs:
            job.end(AnswerInterruptedError("The answer was begun before a fork; ask again in this process."))

    def nudge(self) -> None:
        """Make the threads that wait for a lease check whether they still want it. Never waits."""
        self._post(changed=True)

    @property
    def _loading(self) -> bool:
        """Under the lock: whether a request has leased KV that it has not begun to read."""
        return self.pool.leases > sum(job.lease is not None for job in self._jobs.values())

    def _require_open(self, owner: object) -> None:
        message = None if owner is None else self._closed.get(owner)
        if message is not None:
            raise AnswerInterruptedError(message)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; cancelled jobs and returned leases are cleared on entry and soon after exit."""
        try:
            with self._changed:
                self._clear()
                yield
        finally:
            self._post()

    def _sleep(self) -> None:
        """Under the lock: wait for a change. Refused within a step, which no other thread could end.

        The timeout of a second is a safety net: an interrupt may come between the end of a step and its notification.
        """
        if self._driver == threading.get_ident():
            raise UsageError("A question cannot be asked from within its model's step (by a stopping criterion).")
        self._changed.wait(1.0)

    def _post(self, *, changed: bool = False) -> None:
        """Clear now, unless the lock is held: then its holder clears when it releases the lock.

        It must not wait: the collection of a generator may call it while this very thread holds the lock.
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
        """Under the lock: end cancelled jobs, unless a running step may read them, and take back leases."""
        while self._leaving and self._driver is None:
            job = self._leaving.popleft()
            job.end(job.error)
            self._forget(job)
            self._changed.notify_all()
        while self._returned:
            self.pool.release(self._returned.popleft())

    def _drive(self, work: Callable[[], bool] | None = None) -> bool:
        """Run one step for all (or `work`), unless another thread runs one; returns whether anything was done."""
        mine = False
        try:
            with self._changed:
                if self._driver is not None:
                    return True
                self._clear()
                self._driver, mine = threading.get_ident(), True
            torch = torch_if_loaded()
            with nullcontext() if torch is None else torch.inference_mode():
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
                self._driver = None  # first of all: an interrupt from here on must find the step over
                with self._changed:
                    self._clear()
                    self._changed.notify_all()
                self._post()

    def _break(self, cause: BaseException) -> bool:
        """After an interrupted step: end the jobs that were in the middle of something; returns whether there were any.

        The next step reads again what was not read: a sequence counts no token before the end of a pass.
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
        """Under the lock: drop everything that the runtime holds for a job that has ended."""
        self._scheduler.leave(job.ticket)
        self._jobs.pop(job.ticket, None)
        if job in self._stepper.running:
            self._stepper.running.remove(job)
            self.executor.request_ended()
        if job.lease is not None:
            self._returned.append(job.lease)

    def _step(self) -> bool:
        with self._changed:
            stalled, self._stalled = self._stalled, False
            admitted = [self._jobs[ticket] for ticket in self._scheduler.admit(over=stalled)]
        return self._stepper.step(admitted) or self._unblock()

    def _unblock(self) -> bool:
        """Called if all admitted jobs wait for their callers. If other jobs wait for their room, the admitted ones
        continue.

        A job that its caller drives cannot continue: then the next job is admitted beside it, whatever it needs.
        """
        if not self._scheduler.waiting and not self._leasing:
            return False
        ahead = [job for job in self._stepper.running if job.paused and job.decoder is not None]
        for job in ahead:
            job.ahead = math.inf
        self._stalled = not ahead and bool(self._scheduler.waiting)
        return self._stalled or bool(ahead)


def _batch_executor(model: Any) -> Executor:
    from ragkv.runtime.batch_executor import BatchExecutor

    return BatchExecutor(model)


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
