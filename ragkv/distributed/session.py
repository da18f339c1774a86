"""One rank's part in answering together: it meets the others, answers question after question, and meets them again."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from ragkv.distributed.group import Group
from ragkv.distributed.hello import Hello
from ragkv.distributed.meeting import is_over, meet
from ragkv.distributed.rankpart import RankPart
from ragkv.distributed.watch import Watch
from ragkv.errors import RanksError, UsageError
from ragkv.index.answer import AnswerStream
from ragkv.index.task import settle_task

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ragkv.index.ground import Ground

__all__ = ["Session", "meeting_place"]

logger = logging.getLogger(__name__)

_LOOK = 0.05  # seconds between two looks for the next question
_MOST_BYTES = 1 << 20


def meeting_place(timeout: float) -> tuple[Store, int, int]:
    """The store, this rank and the number of ranks, as `torchrun` or the same variables say.

    UsageError without them; RanksError when the store does not answer within `timeout` seconds.
    """
    try:
        rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        address = os.environ["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        raise UsageError(
            "Start the ranks with torchrun --nproc-per-node N -m ragkv.distributed …, or set RANK, WORLD_SIZE, "
            f"MASTER_ADDR and MASTER_PORT ({error})."
        ) from error
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # then torchrun itself holds the store
    try:
        store = TCPStore(
            address, port, None, rank == 0 and not agent, timedelta(seconds=timeout), wait_for_workers=False
        )
    except RuntimeError as error:
        raise RanksError(
            f"Nobody answers at {address}:{port}, where the ranks meet; start rank 0 there, and let its machine accept "
            "connections at that port."
        ) from error
    return store, rank, size


class Session:
    """This rank's `part` of what all answer from, and the ranks with which it answers.

    A collective waits `timeout` seconds, and the ranks wait `patience` seconds for each other while they start
    and load their models. Rank 0 says what is asked (`tell`), the others do the same (`next`).
    """

    def __init__(
        self,
        part: RankPart,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: float = 20.0,
        patience: float = 300.0,
        keep: bool = True,
    ) -> None:
        self.keep = keep
        """Whether it meets the others again when one was lost."""
        self.rank = rank
        self.size = size
        self.part = part
        self._store = store
        self._timeout = timeout
        self._patience = patience
        self._generation = -1
        self._watch: Watch | None = None
        self._ground: Ground | None = None
        self._place: Store | None = None
        self._asked = 0
        self.group: Group | None = None
        """The ranks, once they have met."""

    def join(self) -> None:
        """Meet the others, unless they are together; RanksError when that cannot be."""
        if self._watch is not None:
            why = self._watch.trouble()
            if why is None and not is_over(self._store, self._generation):
                return
            self.leave(why)
            if why is not None and not self.keep:
                raise RanksError(why)
        hello = Hello(same=self.part.facts())
        after = self._generation
        meeting = meet(self._store, self.rank, self.size, hello, timeout=self._patience, after=after)
        self._generation, self._asked = meeting.generation, 0
        self._place = PrefixStore(meeting.prefix, self._store)
        self._watch = Watch(self._place.clone(), self.rank, meeting.hellos)  # type: ignore[attr-defined]
        try:
            self._load(self._watch, self._place)
        except BaseException as error:
            self.leave(str(error))
            raise

    @property
    def together(self) -> bool:
        """Whether it has met the others and not left them."""
        return self._watch is not None

    def leave(self, why: str | None = None) -> None:
        """Take no more part in this generation; the others are told `why`, if there is a reason."""
        watch, group = self._watch, self.group
        self._watch = self.group = self._ground = None
        if watch is not None:
            if why is not None:
                watch.tell(why)
            watch.close()
        if group is not None:
            group.close()

    def tell(self, asked: Mapping[str, Any]) -> None:
        """Rank 0: let the others do this next."""
        assert self._place is not None
        self._place.set(f"asked/{self._asked}", json.dumps(dict(asked)))
        self._asked += 1

    def next(self) -> dict[str, Any]:
        """Other ranks: what rank 0 has them do next, however long that takes; RanksError when nobody will say."""
        assert self._place is not None
        assert self._watch is not None
        key = f"asked/{self._asked}"
        try:
            while not self._place.check([key]):
                if why := self._watch.trouble():
                    raise RanksError(why)
                if is_over(self._store, self._generation):
                    raise RanksError("The ranks meet anew: one of them was started again.")
                time.sleep(_LOOK)
            told = self._place.get(key)
        except RuntimeError as error:
            raise self._watch.after_failure(error) from error
        self._asked += 1
        try:
            if len(told) > _MOST_BYTES:
                raise ValueError("it is too long")
            return dict(json.loads(told))
        except (ValueError, TypeError) as error:
            raise RanksError(
                f"What rank 0 asks cannot be read ({error}); run the same version on all ranks."
            ) from error

    def stream(self, question: str, options: Mapping[str, Any]) -> AnswerStream:
        """An answer by all ranks, which all of them ask for at this time; as `RagKV.stream`."""
        assert self._ground is not None
        return AnswerStream(self._ground, settle_task(self.part.config, question, **options))

    def _load(self, watch: Watch, place: Store) -> None:
        """Load the model, make the group when all have, and agree on what runs at a time."""
        from ragkv.runtime import Runtime

        model, limits = self.part.model, self.part.limits
        self._wait_for_all(watch, place)
        self.group = Group(place, self.rank, self.size, watch, timeout=self._timeout, device=model.device)
        agreed = self.group.gather(torch.tensor([limits.batch_tokens, limits.max_rows, limits.own_tokens])).amin(0)
        batch_tokens, max_rows, own_tokens = agreed.tolist()
        runtime = Runtime(
            model,
            batch_tokens=batch_tokens,
            max_rows=max_rows,
            own_tokens=own_tokens,
            budget=limits.budget,
            ranks=self.group,
        )
        self._ground = self.part.ground(self.group, runtime)

    def _wait_for_all(self, watch: Watch, place: Store) -> None:
        """Until all have loaded their models; who is gone is not waited for."""
        place.set(f"loaded/{self.rank}", "")
        until = time.monotonic() + self._patience
        try:
            while missing := [rank for rank in range(self.size) if not place.check([f"loaded/{rank}"])]:
                if why := watch.trouble():
                    raise RanksError(why)
                if time.monotonic() > until:
                    named = ", ".join(map(str, missing))
                    raise RanksError(
                        f"Rank {named} did not load the model within {self._patience:g} seconds; if that is only slow, "
                        "raise --patience."
                    )
                time.sleep(_LOOK)
        except RuntimeError as error:
            raise watch.after_failure(error) from error
