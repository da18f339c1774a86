"""What happens in one step: which tokens are read, by one forward pass, and what becomes of their logits."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragkv.attention.across import Ranks
from ragkv.attention.ownkv import OwnKV
from ragkv.attention.row import Row
from ragkv.attention.slab import Slabs
from ragkv.attention.stack import Stack
from ragkv.engines.program import Choose, Greedy, Leave, Read, Until
from ragkv.runtime.job import Job
from ragkv.runtime.pool import Pool
from ragkv.runtime.scheduler import Scheduler
from ragkv.runtime.shared import with_shared
from ragkv.runtime.spread import step_across

if TYPE_CHECKING:
    from ragkv.engines import Engine
    from ragkv.model.language import LanguageModel

__all__ = ["Stepper"]

Pieces = list[tuple[int, Row, Sequence[int]]]

logger = logging.getLogger(__name__)


class Stepper:
    """Runs the programs of all jobs that were let in, a step at a time; for one thread at a time.

    `end(job, error)` is told of each job that is over.
    """

    def __init__(
        self,
        model: weakref.ref[LanguageModel],
        pool: Pool,
        scheduler: Scheduler,
        end: Callable[[Job, BaseException | None], None],
        ranks: Ranks | None = None,
    ) -> None:
        self._reference = model
        self._pool = pool
        self._scheduler = scheduler
        self._end = end
        self._ranks = ranks
        self._slabs = Slabs()
        self.running: list[Job] = []
        """The jobs that were let in and have not ended."""
        self.marks: list[tuple[Job, Row, int, int]] = []
        """Where the rows of the last pass stood before it."""

    @property
    def model(self) -> LanguageModel:
        """The model that it steps; ReferenceError once it is gone."""
        model = self._reference()
        if model is None:
            raise ReferenceError("the runtime's model is gone: hold the model for as long as it is asked")
        return model

    def step(self, admitted: Sequence[Job]) -> bool:
        """Let these in and run one step for all; False when nothing can run."""
        self.running += admitted
        self._begin([job for job in admitted if job.origin is not None])
        for job in admitted:
            if not job.ended:
                self.tell(job, None)
        resumed = self._resume()
        reading = [job for job in self.running if isinstance(job.ask, Read) and not job.paused]
        choosing = any(_chooses(job) and not job.paused for job in self.running)
        if not (admitted or resumed or reading or choosing):
            return False
        takes = self._scheduler.share([job.wants() for job in reading])
        work = [(job, pieces) for job, take in zip(reading, takes, strict=True) if (pieces := job.pieces(take))]
        if work:
            self._forward(work)
        self._deliver([job for job, _ in work if not job.ended])
        return True

    def torn(self) -> list[Job]:
        """The jobs that a step which was broken off left in the middle of something."""
        for job, row, length, position in self.marks:
            job.torn |= (row.own.length, row.position) != (length, position)
        return [job for job in self.running if job.torn or job.ask is None]

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
                job.program, job.origin = with_shared(program, self._pool), None

    def _resume(self) -> bool:
        """Go on with those that wait for another's doing, if it is done; whether there were any."""
        ready = [job for job in self.running if isinstance(job.ask, Until) and job.ask.ready()]
        for job in ready:
            if not job.ended:
                self.tell(job, None)
        return bool(ready)

    def _forward(self, work: Sequence[tuple[Job, Pieces]]) -> None:
        """One forward pass for all; if it fails, one for each job, so that only those fail that must."""
        self._settle(work)
        rows = [row for _, pieces in work for _, row, _ in pieces]
        owners = [job for job, pieces in work for _ in pieces]
        self.marks = [(job, row, row.own.length, row.position) for job, row in zip(owners, rows, strict=True)]
        kept = [[len(row.kept(len(ids))) for _, row, ids in pieces] for _, pieces in work]
        try:
            logits = self._pass(rows, [ids for _, pieces in work for _, _, ids in pieces])
        except Exception as error:
            if len(work) == 1 or self._ranks is not None:  # other ranks would not take the same steps again
                for job, _ in work:
                    self._end(job, error)
            else:
                for each in work:
                    self._forward([each])
            return
        for job, _ in work:
            job.torn = True  # until its program was told
        own = torch.split(logits, [sum(counts) for counts in kept])
        for (job, pieces), counts, scores in zip(work, kept, own, strict=True):
            job.read(pieces, counts, scores)

    def _pass(self, rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> Tensor:
        if self._ranks is None:
            return self.model.step(rows, ids)
        return step_across(self.model, rows, ids, self._ranks)

    def _settle(self, work: Sequence[tuple[Job, Pieces]]) -> None:
        if not self.model.joins:
            return
        settling = [
            row for _, pieces in work for _, row, ids in pieces if len(ids) == 1 and row.own.length and not row.settled
        ]
        fresh = [row for _, pieces in work for _, row, _ in pieces if not row.own.length and not row.settled]
        settling += self._pool.in_common(fresh)
        if settling:
            active = [row for job in self.running if isinstance(job.ask, Read) for row in job.ask.rows]
            try:
                self._pool.settle(settling, active, self.model.rotary, windowed=bool(self.model.windows))
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
                self.tell(job, logits)
                del logits
        self._resume()
        chosen = False
        while choosing := [job for job in self.running if _chooses(job) and not job.paused]:
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
        chosen_here = torch.cat(told)
        everybodys = chosen_here if self._ranks is None else self._ranks.first(chosen_here)  # one rank chooses
        numbers = iter(everybodys.tolist())  # the one wait for the device
        for job, count, won, drawn in kept:
            tokens = [next(numbers) for _ in range(count)]
            winner = next(numbers) if won else None
            sound = bool(next(numbers)) if drawn else True
            if isinstance(job.ask, Greedy):
                self.tell(job, tokens)
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
            self.tell(job, token_id)
        else:
            self._end(job, None)

    def tell(self, job: Job, answer: Any) -> None:
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
            self._end(job, None)
        except Exception as error:
            self._end(job, error)

    def _prepare(self, job: Job, ask: Read) -> None:
        if not ask.rows or not all(ask.ids) or len({id(row) for row in ask.rows}) < len(ask.rows):
            raise ValueError("a Read names each of its rows once, at least one, with at least one token for each")
        last = max(max(row.places(len(ids))) for row, ids in zip(ask.rows, ask.ids, strict=True))
        self.model.require_positions(last + 1)
        running = sum(job.ticket.rows for job in self.running)
        for row, ids in zip(ask.rows, ask.ids, strict=True):
            fresh = not row.own.length and row.own.reserve  # without a reserve one read is all that it takes
            if fresh and job.decoder is not None and not isinstance(row, Stack):
                row.own = self._slabs.place(len(ids), job.decoder.remaining, running)


def _chooses(job: Job) -> bool:
    return isinstance(job.ask, Greedy) or (isinstance(job.ask, Choose) and job.decoder is not None)
