"""Where engines meet the model: the rows of all requests, step by step.

There is no thread of its own. Whoever waits for a token drives: one of the waiting threads runs the next step for all
requests, the others sleep until it is over, and when the one that drove has what it wanted, another takes its place.
So threads and tasks that ask at the same time are answered in one batch, a single request runs in its own thread, and
nothing is left running when nobody asks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragkv.attention.kv import OwnKV
from ragkv.attention.row import Row
from ragkv.engines.program import Choose, Greedy, Leave, Read
from ragkv.errors import AnswerInterruptedError
from ragkv.runtime.decoder import Decoder, Generation, Token
from ragkv.runtime.job import Job
from ragkv.runtime.pool import Lease, Pool
from ragkv.runtime.scheduler import Scheduler, Ticket
from ragkv.runtime.shared import Wait, with_shared

if TYPE_CHECKING:
    from ragkv.engines import Engine, Request
    from ragkv.model.language import LanguageModel

__all__ = ["Runtime", "Stream", "runtime_of"]

Pieces = list[tuple[int, Row, Sequence[int]]]


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
        self.model = model
        self.pool = Pool(budget)
        self._scheduler = Scheduler(batch_tokens=batch_tokens, max_rows=max_rows, own_tokens=own_tokens, strict=strict)
        self._changed = threading.Condition(threading.Lock())
        self._returned: deque[Lease] = deque()
        self._driving = False
        self._jobs: dict[Ticket, Job] = {}  # submitted and not ended
        self._running: list[Job] = []  # let in

    def submit(self, engine: Engine, request: Request, generation: Generation | None, *, owner: object = None) -> Job:
        """Start a request; `generation` None: whoever asked chooses its tokens (`Stream`).

        Raises UsageError for a request that can never run.
        """
        limit = 0 if generation is None else generation.max_new_tokens
        demand = engine.demand(request, limit)
        reads = frozenset(id(chunk.kv) for chunk in request.chunks if chunk.kv is not None)
        ticket = Ticket(rows=demand.rows, tokens=demand.tokens, reads=reads)
        decoder = None if generation is None else Decoder(self.model, generation)
        program = with_shared(engine.program(request, self.model), self.pool)
        job = Job(program, ticket, decoder, owner)
        with self._locked():
            self._scheduler.submit(ticket)
            self._jobs[ticket] = job
        return job

    def wait(self, job: Job) -> None:
        """Return when the job is `ready`, driving the runtime if nobody does."""
        while True:
            with self._locked():
                while not job.ready and self._driving:
                    self._changed.wait()
                if job.ready:
                    return
                self._driving = True
            self._drive()

    def advance(self) -> bool:
        """Run one step for all, or wait for the one that runs; False when there is nothing to do."""
        with self._locked():
            if self._driving:
                self._changed.wait()
                return True
            self._driving = True
        return self._drive()

    def answer(self, job: Job, token_id: int) -> None:
        """Give a job that pauses at a `Choose` its token; for jobs whose tokens whoever asked chooses."""
        with self._locked():
            while self._driving:
                self._changed.wait()
            self._driving = True
        try:
            self._run(job, token_id)
        finally:
            with self._changed:
                self._driving = False
                self._clear()
        self.wait(job)

    def tokens(self, job: Job) -> Generator[Token]:
        """The answer's tokens as they come; closing the iterator early cancels the rest."""
        try:
            while True:
                self.wait(job)
                if job.cancelled or not job.tokens:
                    if job.error is not None:
                        raise job.error
                    return
                token = job.tokens.popleft()
                yield token
                if token.finish_reason is not None:
                    return
        finally:
            self.cancel(job)

    def decode(self, engine: Engine, request: Request, generation: Generation) -> Generator[Token]:
        """One request's tokens, from its question on."""
        return self.tokens(self.submit(engine, request, generation))

    def cancel(self, job: Job) -> None:
        """End the job before its next step; nothing happens to one that has ended. Never waits."""
        job.cancelled = True
        self._post()

    def close(self, owner: object, error: BaseException) -> None:
        """End all jobs of `owner` with `error`, and wait until no step reads anything of theirs."""
        with self._locked():
            for job in list(self._jobs.values()):
                if job.owner is owner and not job.cancelled:
                    job.cancelled, job.error = True, error
            while self._driving:
                self._changed.wait()

    def lease(self, sizes: Mapping[Hashable, int]) -> Lease:
        """Take KV for a request, waiting until others give theirs back as long as that can happen."""
        while True:
            with self._locked():
                if self.pool.fits(sizes) or not any(not job.paused for job in self._jobs.values()):
                    return self.pool.lease(sizes)
            self.advance()

    def try_lease(self, sizes: Mapping[Hashable, int]) -> Lease | None:
        """`lease` where it can be had now."""
        with self._locked():
            return self.pool.lease(sizes) if self.pool.fits(sizes) else None

    def release(self, lease: Lease) -> None:
        """Give KV back. Never waits."""
        self._returned.append(lease)
        self._post()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; what was cancelled or given back meanwhile is gone on entering and on leaving."""
        with self._changed:
            self._clear()
            yield
            self._clear()

    def _post(self) -> None:
        """Clear now, unless the lock is held: then whoever holds it clears.

        A generator that is collected may come here inside a `with` of this very thread, so it must not wait.
        """
        if self._changed.acquire(blocking=False):
            try:
                self._clear()
            finally:
                self._changed.release()

    def _clear(self) -> None:
        """Under the lock: take back leases, and end cancelled jobs unless a step is running that may read them."""
        while self._returned:
            self.pool.release(self._returned.popleft())
        if not self._driving:
            for job in [job for job in self._jobs.values() if job.cancelled]:
                self._end(job, job.error)
        self._changed.notify_all()

    def _drive(self) -> bool:
        """One step, by the thread that has set `_driving`."""
        worked = False
        try:
            worked = self._step()
        finally:
            with self._changed:
                self._driving = False
                self._clear()
        return worked

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        job.end(error)
        self._scheduler.leave(job.ticket)
        self._jobs.pop(job.ticket, None)
        if job in self._running:
            self._running.remove(job)

    @torch.inference_mode()
    def _step(self) -> bool:
        with self._changed:
            for job in [job for job in self._jobs.values() if job.cancelled]:
                self._end(job, job.error)
            admitted = [self._jobs[ticket] for ticket in self._scheduler.admit()]
            self._running += admitted
        for job in admitted:
            self._run(job, None)
        for job in [job for job in self._running if isinstance(job.ask, Wait) and self.pool.landed(job.ask.key)]:
            self._run(job, None)
        reading = [job for job in self._running if isinstance(job.ask, Read) and not job.paused]
        takes = self._scheduler.share([job.wants() for job in reading])
        work = [(job, pieces) for job, take in zip(reading, takes, strict=True) if (pieces := job.pieces(take))]
        try:
            for job, pieces, logits in self._forward(work) if work else ():
                job.read(pieces, logits)
            return self._deliver([job for job, _ in work if not job.ended]) or bool(work or admitted)
        except BaseException:
            # what was read cannot be taken back: these jobs would read it twice
            for job, _ in work:
                self._end(job, AnswerInterruptedError("The answer was interrupted while it was generated."))
            raise

    def _forward(self, work: Sequence[tuple[Job, Pieces]]) -> Iterator[tuple[Job, Pieces, Tensor]]:
        """One forward pass for all; if it fails, one for each job, so that only those fail that must."""
        self._settle(work)
        try:
            rows = [row for _, pieces in work for _, row, _ in pieces]
            logits = self.model.step(rows, [ids for _, pieces in work for _, _, ids in pieces])
        except Exception as error:
            if len(work) == 1:
                self._end(work[0][0], error)
                return
            for each in work:
                yield from self._forward([each])
            return
        at = 0
        for job, pieces in work:
            yield job, pieces, logits[at : at + len(pieces)]
            at += len(pieces)

    def _settle(self, work: Sequence[tuple[Job, Pieces]]) -> None:
        settling = [
            row for _, pieces in work for _, row, ids in pieces if len(ids) == 1 and row.own.length and not row.settled
        ]
        if settling:
            active = [row for job in self._running if isinstance(job.ask, Read) for row in job.ask.rows]
            self.pool.settle(settling, active, self.model.rotary, windowed=bool(self.model.windows))
            for row in settling:
                row.settled = True

    def _deliver(self, jobs: Sequence[Job]) -> bool:
        """Send the programs their logits, choose all tokens that they ask for, wait once, and send those."""
        for job in jobs:
            logits = job.read_whole()
            if logits is not None:
                self._run(job, logits)
                del logits
        chosen = False
        while choosing := [job for job in self._running if _chooses(job) and not job.paused]:
            self._choose(choosing)
            chosen = True
        return chosen

    def _choose(self, jobs: Sequence[Job]) -> None:
        told: list[Tensor] = []
        kept: list[tuple[Job, int, bool, bool]] = []  # (job, tokens, is there a winner, was it drawn)
        for job in jobs:
            try:
                chosen, finite = job.choice()
            except Exception as error:
                self._end(job, error)
                continue
            winners = job.ask.winners if isinstance(job.ask, Choose) else None
            told.append(chosen.reshape(-1))
            if winners is not None:
                told.append(winners.gather(0, chosen.reshape(1)))
            if finite is not None:
                told.append(finite.reshape(1).to(chosen.dtype))
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
        try:
            ask = job.send(answer)
            while isinstance(ask, Leave):
                for row in ask.rows:
                    row.own = OwnKV()
                ask = job.send(None)
            if isinstance(ask, Read):
                self._prepare(job, ask)
            job.begin(ask)
        except StopIteration:
            self._end(job)
        except Exception as error:
            self._end(job, error)

    def _prepare(self, job: Job, ask: Read) -> None:
        self.model.require_positions(max(row.position + len(ids) for row, ids in zip(ask.rows, ask.ids, strict=True)))
        for row in ask.rows:
            if not row.own.length and job.decoder is not None:
                row.own.reserve = min(job.decoder.remaining, 1024)


def _chooses(job: Job) -> bool:
    return isinstance(job.ask, Greedy) or (isinstance(job.ask, Choose) and job.decoder is not None)


class Stream:
    """A request led by hand: read the scores, then give it a token, whichever it is.

    `scores` are those of the next token, `(vocab,)` in fp32. For those who measure or compare; answers are generated by
    `Runtime.decode`.
    """

    def __init__(self, runtime: Runtime, engine: Engine, request: Request) -> None:
        self._runtime = runtime
        self._job = runtime.submit(engine, request, None)
        runtime.wait(self._job)
        self._choice()

    def __del__(self) -> None:
        if hasattr(self, "_job"):  # it was not refused
            self._runtime.cancel(self._job)

    @property
    def scores(self) -> Tensor:
        return self._choice().scores

    @property
    def position(self) -> int:
        """Where the next token will stand, in the row that is furthest."""
        return self._job.position

    def advance(self, token_id: int) -> None:
        """Append a token and compute the next scores."""
        self._choice()
        self._runtime.answer(self._job, token_id)
        self._choice()

    def best(self) -> int:
        """The greedy choice; the lowest id among equals."""
        return int(self._choice().best())

    def winner(self, token_id: int) -> int | None:
        """Index into `Request.chunks` of the expert that proposes `token_id`; None where there are no experts."""
        choice = self._choice()
        return None if choice.winners is None else choice.owners[int(choice.winners[token_id])]

    def _choice(self) -> Choose:
        if self._job.error is not None:
            raise self._job.error
        assert isinstance(self._job.ask, Choose)
        return self._job.ask


def runtime_of(model: LanguageModel) -> Runtime:
    """The one runtime of a model, so that all who ask the same model are answered together."""
    return model.companion(Runtime)
