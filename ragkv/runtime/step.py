"""One step of the runtime: collect the programs' requests, run one forward pass, and send them the results.

`Job` is one request: its program, the operation that the program waits for, and the tokens that the caller has not
taken yet. `Stepper` runs all of them.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ragkv.attention.sequence import MOST_TOKENS, TokenSequence
from ragkv.engines.base import Argmax, Forward, Join, Operation, Program, Release, Sample, WaitFor
from ragkv.runtime.decoding import Decoder, Token
from ragkv.runtime.executor import Executor, require_plain
from ragkv.runtime.kv_pool import KVPool
from ragkv.runtime.scheduler import Pace, Scheduler, Ticket
from ragkv.util.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ragkv.runtime.kv_pool import Lease
else:
    torch = LazyModule("torch")

logger = logging.getLogger(__name__)

LEAST_ROOM = 64
"""The smallest room for an answer's tokens after joined chunks."""
AHEAD = 64
"""Generated tokens that may wait for the caller; with more the request pauses, unless others wait for its room."""


class Job:
    """A running request. Only the thread that drives the runtime touches `program` and `operation`.

    If `decoder` is None, the caller chooses the tokens, and the job pauses at each `Sample`.
    """

    def __init__(
        self,
        program: Program,
        ticket: Ticket,
        decoder: Decoder | None,
        *,
        model: object = None,
    ) -> None:
        self.program = program
        self.ticket = ticket
        self.decoder = decoder
        self.owner: object = None
        """The index that asks."""
        self.lease: Lease | None = None
        """The KV that it reads, returned when it ends."""
        self.ahead: float = AHEAD
        self.torn = False
        """Whether it could not continue if the running step were interrupted."""
        self._model = model  # keeps the runtime alive while the job runs
        self.operation: Operation | None = None
        """What the program waits for."""
        self.tokens: deque[Token] = deque()
        self.error: BaseException | None = None
        self.cancelled = False
        self.ended = False
        self.position = 0
        """Position of the next token in the longest sequence."""
        self._left: list[Sequence[int]] = []
        self._no_logits: Tensor
        self._logits: list[list[Tensor]] = []

    @property
    def ready(self) -> bool:
        """Whether the caller need not wait: there is a token, a choice to make, or the end."""
        return bool(self.tokens) or self.ended or (self.decoder is None and isinstance(self.operation, Sample))

    @property
    def paused(self) -> bool:
        """Whether it has nothing to run for now."""
        return len(self.tokens) >= self.ahead or (self.decoder is None and isinstance(self.operation, Sample))

    def wait_for(self, operation: Operation) -> None:
        """Note the operation that the program waits for."""
        if isinstance(operation, Forward):
            self._left = list(operation.ids)
            self._logits = [[] for _ in operation.ids]
        elif not isinstance(operation, Sample | Argmax | WaitFor):
            raise TypeError(f"an engine's program yields operations (ragkv.engines), not {type(operation).__name__}")
        self.operation = operation

    def wants(self) -> list[int]:
        """How many tokens each sequence of its forward pass still has to read."""
        return [len(ids) for ids in self._left]

    def slices(self, takes: Sequence[int]) -> list[tuple[int, TokenSequence, Sequence[int]]]:
        """The next `takes[i]` tokens of sequence i, where that is not 0: (i, sequence, ids)."""
        assert isinstance(self.operation, Forward)
        sequences = self.operation.sequences
        return [(i, sequences[i], self._left[i][:take]) for i, take in enumerate(takes) if take]

    def read(
        self, slices: Sequence[tuple[int, TokenSequence, Sequence[int]]], rows: Sequence[int], logits: Tensor
    ) -> None:
        """Record that these slices were read; `logits` `(sum(rows), vocab)` has `rows` for each of them."""
        self._no_logits = logits[:0] + 0  # a view would keep all of the logits alive
        for (i, _, ids), scores in zip(slices, _split(logits, rows), strict=True):
            self._left[i] = self._left[i][len(ids) :]
            if len(scores) and not self._left[i]:
                self._logits[i].append(scores)
        if len(slices) == len(self._left) == sum(map(len, self._logits)) and not any(self._left):
            self._logits = [[logits]]  # all of it in this step: no copy
        self.position = max(self.position, *(sequence.position for _, sequence, _ in slices))

    def read_whole(self) -> Tensor | None:
        """The logits `(sequences, vocab)` of its forward pass, once every sequence is through."""
        if any(self._left):
            return None
        parts, self._logits = [scores for each in self._logits for scores in each], []
        if not parts:  # its sequences are silent
            return self._no_logits
        if len(parts) > 1 and not any(isinstance(scores, np.ndarray) for scores in parts):
            return torch.cat(parts)
        return parts[0] if len(parts) == 1 else cast("Tensor", np.concatenate(parts))

    def choice(self) -> tuple[Tensor, Tensor | None]:
        """The chosen tokens, one or one per row, on the device; and whether they could be drawn."""
        if isinstance(self.operation, Argmax):
            return self.operation.best(), None
        assert isinstance(self.operation, Sample)
        assert self.decoder is not None
        return self.decoder.choose(self.operation)

    def end(self, error: BaseException | None = None) -> None:
        """End the job; `error` is raised in the caller."""
        if self.ended:
            return
        self.ended, self.error = True, error
        self.operation = self._model = None
        self._left, self._logits = [], []
        try:
            self.program.close()
        except Exception as failure:  # an engine's cleanup must not raise here
            logger.warning("an engine's program failed while it was closed: %s", failure)

    def send(self, answer: Any) -> Operation:
        """Run the program up to its next request; StopIteration when it has ended."""
        return self.program.send(answer)


Slices = list[tuple[int, TokenSequence, Sequence[int]]]


class Stepper:
    """Runs the programs of all admitted jobs, a step at a time, in one thread at a time.

    `end(job, error)` is called for each job that is over.
    """

    def __init__(
        self,
        executor: Executor,
        pool: KVPool,
        scheduler: Scheduler,
        end: Callable[[Job, BaseException | None], None],
    ) -> None:
        self._executor = executor
        self._pool = pool
        self._scheduler = scheduler
        self._end = end
        self._pace = Pace()
        self.running: list[Job] = []
        """The jobs that were admitted and have not ended."""
        self.marks: list[tuple[Job, TokenSequence, int, int]] = []
        """The state of the last pass's sequences before it."""

    def step(self, admitted: Sequence[Job]) -> bool:
        """Admit these jobs and run one step for all; False if nothing can run."""
        self.running += admitted
        for job in admitted:
            if not job.ended:
                self.advance(job, None)
        advanced = self._advance_waiting()
        reading = [job for job in self.running if isinstance(job.operation, Forward) and not job.paused]
        choosing = any(_chooses(job) and not job.paused for job in self.running)
        if not (admitted or advanced or reading or choosing):
            return False
        takes = self._scheduler.share([job.wants() for job in reading], self._pace.tokens)
        start = perf_counter()
        work = [(job, slices) for job, take in zip(reading, takes, strict=True) if (slices := job.slices(take))]
        if work:
            self._forward(work)
        self._deliver([job for job, _ in work if not job.ended])
        if work:
            self._pace.took(perf_counter() - start, takes)
        return True

    def torn(self) -> list[Job]:
        """The jobs that an interrupted step left in the middle of something."""
        for job, sequence, length, position in self.marks:
            job.torn |= (sequence.cache.length, sequence.position) != (length, position)
        return [job for job in self.running if job.torn or job.operation is None]

    def _advance_waiting(self) -> bool:
        """Advance the programs that wait for another one, if that is done; returns whether there were any."""
        ready = [job for job in self.running if isinstance(job.operation, WaitFor) and job.operation.ready()]
        for job in ready:
            if not job.ended:
                self.advance(job, None)
        return bool(ready)

    def _forward(self, work: Sequence[tuple[Job, Slices]]) -> None:
        """One forward pass for all jobs; if it fails, one per job, so that only the faulty ones fail."""
        sequences = [sequence for _, slices in work for _, sequence, _ in slices]
        owners = [job for job, slices in work for _ in slices]
        self.marks = [
            (job, sequence, sequence.cache.length, sequence.position)
            for job, sequence in zip(owners, sequences, strict=True)
        ]
        wanted = [[len(sequence.kept(len(ids))) for _, sequence, ids in slices] for _, slices in work]
        ids = [ids for _, slices in work for _, _, ids in slices]
        operations = [job.operation for job in self.running if isinstance(job.operation, Forward)]
        try:
            self._executor.lay_out(
                sequences, ids, [sequence for forward in operations for sequence in forward.sequences]
            )
            logits = self._executor.forward(sequences, ids)
        except Exception as error:
            if len(work) == 1:
                self._end(work[0][0], error)
            else:
                logger.warning("a pass for %d requests failed, and is repeated for each: %s", len(work), error)
                for forward in work:
                    self._forward([forward])
            return
        for job, _ in work:
            job.torn = True  # until its program got the result
        own = _split(logits, [sum(counts) for counts in wanted])
        for (job, slices), counts, scores in zip(work, wanted, own, strict=True):
            job.read(slices, counts, scores)

    def _deliver(self, jobs: Sequence[Job]) -> None:
        """Send the programs their logits, choose all tokens that they request, synchronise once, and send those."""
        for job in jobs:
            logits = job.read_whole()
            if logits is None:
                job.torn = False
            else:
                self.advance(job, logits)
                del logits
        self._advance_waiting()
        while choosing := [job for job in self.running if _chooses(job) and not job.paused]:
            self._choose(choosing)

    def _choose(self, jobs: Sequence[Job]) -> None:
        result: list[Tensor] = []
        chosen_by: list[tuple[Job, int, bool, bool]] = []  # (job, tokens, is there a winner, was it drawn)
        for job in jobs:
            job.torn = True
            try:
                chosen, finite = job.choice()
                winners = job.operation.winners if isinstance(job.operation, Sample) else None
                transfers = [chosen, None if winners is None else winners.index_select(0, chosen.reshape(1)), finite]
                result += [t for t in transfers if t is not None]
            except Exception as error:
                self._end(job, error)
                continue
            chosen_by.append((job, math.prod(chosen.shape), winners is not None, finite is not None))
        if not chosen_by:
            return
        numbers = iter(self._fetched(result))
        for job, count, won, drawn in chosen_by:
            tokens = [next(numbers) for _ in range(count)]
            winner = next(numbers) if won else None
            sound = bool(next(numbers)) if drawn else True
            if isinstance(job.operation, Argmax):
                self.advance(job, tokens)
            else:
                self._take(job, tokens[0], winner, finite=sound)

    def _fetched(self, results: Sequence[Tensor]) -> list[int]:
        """The whole numbers in all of these, by the only synchronisation with the device."""
        if not any(isinstance(result, np.ndarray | np.generic) for result in results):
            device = self._executor.traits.device
            flat: list[int] = torch.cat([result.reshape(-1).to(device, torch.long) for result in results]).tolist()
            return flat
        return [int(number) for result in results for number in np.ravel(result)]

    def _take(self, job: Job, token_id: int, winner: int | None, *, finite: bool) -> None:
        assert isinstance(job.operation, Sample)
        assert job.decoder is not None
        most = self._executor.model.max_positions
        try:
            token = job.decoder.take(
                job.operation,
                token_id,
                None if winner is None else job.operation.owners[winner],
                finite=finite,
                full=most is not None and job.position >= most,
            )
        except Exception as error:
            self._end(job, error)
            return
        job.tokens.append(token)
        if token.finish_reason is None:
            self.advance(job, token_id)
        else:
            self._end(job, None)

    def advance(self, job: Job, result: Any) -> None:
        """Send the program a result and run it up to an operation that has to wait."""
        job.torn = True
        try:
            operation = job.send(result)
            while isinstance(operation, Release | Join):
                if isinstance(operation, Join):
                    operation = job.send(self._copied(job, operation))
                    continue
                self._executor.release(operation.sequences)
                operation = job.send(None)
            if isinstance(operation, Forward):
                self._prepare(job, operation)
            job.wait_for(operation)
            job.torn = False
        except StopIteration:
            self._end(job, None)
        except Exception as error:
            self._end(job, error)

    def _copied(self, job: Job, join: Join) -> Any:
        return self._executor.copied(join.segments, reserve=join.tokens + max(_remaining(job), LEAST_ROOM))

    def _prepare(self, job: Job, forward: Forward) -> None:
        if (
            not forward.sequences
            or not all(forward.ids)
            or len(set(map(id, forward.sequences))) < len(forward.sequences)
        ):
            raise ValueError(
                "a Forward names each of its sequences once, at least one, with at least one token for each"
            )
        require_plain(self._executor, forward.sequences)
        running = sum(job.ticket.sequences for job in self.running)
        self._executor.reserve(forward.sequences, forward.ids, answer=_remaining(job), running=running)


def _split(logits: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Runs of so many rows, of a tensor or an array."""
    return [logits[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]


def _remaining(job: Job) -> int:
    """Tokens of the answer to make room for; a guess if the caller chooses them."""
    return LEAST_ROOM if job.decoder is None else min(job.decoder.remaining, MOST_TOKENS)


def _chooses(job: Job) -> bool:
    return isinstance(job.operation, Argmax) or (isinstance(job.operation, Sample) and job.decoder is not None)
