"""One rank's session: meet the other ranks, answer question after question, and meet again after a failure.

A rank answers from an index, or without one from whole texts, whose blocks the ranks encode side by side. The module
also defines which settings must be the same on all ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from ragkv.attention.kv import ChunkKV
from ragkv.config import IndexConfig
from ragkv.distributed.group import Handshake, Heartbeat, RankGroup, is_over, meet
from ragkv.distributed.sharding import RankExecutor, ShardedBackend, rank_of
from ragkv.errors import RanksError, UsageError
from ragkv.index.answer import AnswerBackend, AnswerStream, validate_task
from ragkv.index.contexts import Contexts, context_limits
from ragkv.index.index import Index
from ragkv.model.prompt import render
from ragkv.types import Encoding

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ragkv.model.language_model import LanguageModel
    from ragkv.runtime import Runtime, RuntimeLimits

_OWN = {"runtime", "ingest", "kv", "kv_budget", "memory_budget", "codec", "index_factory", "engines", "chunk_tokens"}
"""Settings that may differ between ranks, because they change no answer."""


class RankBackend(Protocol):
    """What one rank answers from: its part of an index, or of whole texts."""

    @property
    def config(self) -> IndexConfig:
        """The configuration, which has the defaults for questions."""

    def facts(self) -> Mapping[str, str]:
        """The facts that must be equal on all ranks, by their names in error messages. This does not load the model."""

    @property
    def model(self) -> LanguageModel:
        """The generation model, loaded at the first use."""

    @property
    def limits(self) -> RuntimeLimits:
        """The limits of what this machine can run at a time."""

    def backend(self, group: RankGroup, runtime: Runtime) -> AnswerBackend:
        """The backend for answers, once the ranks have met; `runtime` runs in step with theirs."""


class IndexRankBackend:
    """An index. With `shards`, each rank has its own; otherwise all have the same one, whose KV is split by hash."""

    def __init__(self, index: Index, *, shards: bool) -> None:
        self._index = index
        self._shards = shards

    @property
    def config(self) -> IndexConfig:
        return self._index.config

    def facts(self) -> Mapping[str, str]:
        index = self._index
        return {
            "model": f"{index.config.model} ({index.fingerprint[:12]})",
            "prompt": repr(index.prompt.facts()),
            **settings_to_compare(index.config),
            "way of sharing": "shards" if self._shards else "one index, split by hash",
        }

    @property
    def model(self) -> LanguageModel:
        return self._index.model

    @property
    def limits(self) -> RuntimeLimits:
        return self._index.run_limits

    def backend(self, group: RankGroup, runtime: Runtime) -> ShardedBackend:
        _ = self._index.runtime  # it counts only the leases of its own pool
        self._index.store.spare(runtime.pool.holds)
        return ShardedBackend(self._index, group, runtime, shards=self._shards)


def settings_to_compare(config: IndexConfig) -> dict[str, str]:
    """The settings that answers depend on, each by its name."""
    return {
        f"setting {name}": json.dumps(value, sort_keys=True, default=str)
        for name, value in asdict(config).items()
        if name not in _OWN and name not in ("model", "prompt")
    }


logger = logging.getLogger(__name__)

_LOOK = 0.05  # seconds between two checks for the next question
_MOST_BYTES = 1 << 20


def meeting_place(timeout: float) -> tuple[Store, int, int]:
    """The store, this rank and the number of ranks, from `torchrun`'s environment variables.

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
            f"No process answers at {address}:{port}, where the ranks meet; start rank 0 there, and let its machine "
            "accept connections at that port."
        ) from error
    return store, rank, size


class Session:
    """This rank's `part`, and the group of ranks with which it answers.

    A collective waits `timeout` seconds, and the ranks wait `patience` seconds for each other while they start
    and load their models. Rank 0 announces each question (`notify`), and the others answer the same one (`next`).
    """

    def __init__(
        self,
        part: RankBackend,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: float = 20.0,
        patience: float = 300.0,
        keep: bool = True,
    ) -> None:
        self.keep = keep
        """Whether to meet again after a rank was lost."""
        self.rank = rank
        self.size = size
        self.part = part
        self._store = store
        self._timeout = timeout
        self._patience = patience
        self._generation = -1
        self._heartbeat: Heartbeat | None = None
        self._backend: AnswerBackend | None = None
        self._place: Store | None = None
        self._asked = 0
        self.group: RankGroup | None = None
        """The ranks, once they have met."""

    def join(self) -> None:
        """Meet the others, unless this has been done; RanksError if that fails."""
        if self._heartbeat is not None:
            why = self._heartbeat.trouble()
            if why is None and not is_over(self._store, self._generation):
                return
            self.leave(why)
            if why is not None and not self.keep:
                raise RanksError(why)
        handshake = Handshake(same=self.part.facts())
        rendezvous = meet(self._store, self.rank, self.size, handshake, timeout=self._patience)
        self._generation, self._asked = rendezvous.generation, 0
        self._place = PrefixStore(rendezvous.prefix, self._store)
        self._heartbeat = Heartbeat(self._place.clone(), self.rank, rendezvous.handshakes)  # type: ignore[attr-defined]
        try:
            self._load(self._heartbeat, self._place)
        except BaseException as error:
            self.leave(str(error))
            raise

    @property
    def together(self) -> bool:
        """Whether this rank has met the others and not left them."""
        return self._heartbeat is not None

    def leave(self, why: str | None = None) -> None:
        """Leave this generation, and tell the others `why`, if there is a reason.

        Rank 0, which may hold the store, waits until the others have left too, `timeout` seconds at most.
        """
        watch, group = self._heartbeat, self.group
        self._heartbeat = self.group = self._backend = None
        if watch is not None:
            if why is not None:
                watch.notify(why)
            if self.rank == 0:
                watch.wait_for_others(self._timeout)
            watch.close()
        if group is not None:
            group.close()

    def notify(self, asked: Mapping[str, Any]) -> None:
        """Rank 0: tell the others what to do next."""
        assert self._place is not None
        self._place.set(f"asked/{self._asked}", json.dumps(dict(asked)))
        self._asked += 1

    def next(self) -> dict[str, Any]:
        """Other ranks: wait, without a limit, for what rank 0 wants next; RanksError if rank 0 is lost."""
        assert self._place is not None
        assert self._heartbeat is not None
        key = f"asked/{self._asked}"
        try:
            while not self._place.check([key]):
                if why := self._heartbeat.trouble():
                    raise RanksError(why)
                if is_over(self._store, self._generation):
                    raise RanksError("The ranks meet again: one of them was restarted.")
                time.sleep(_LOOK)
            content = self._place.get(key)
        except RuntimeError as error:
            raise self._heartbeat.after_failure(error) from error
        self._asked += 1
        try:
            if len(content) > _MOST_BYTES:
                raise ValueError("it is too long")
            return dict(json.loads(content))
        except (ValueError, TypeError) as error:
            raise RanksError(
                f"What rank 0 asks cannot be read ({error}); run the same version on all ranks."
            ) from error

    def stream(self, question: str, options: Mapping[str, Any]) -> AnswerStream:
        """An answer by all ranks, each of which must call this; as `RagKV.stream`."""
        assert self._backend is not None
        return AnswerStream(self._backend, validate_task(self.part.config, question, **options))

    def _load(self, watch: Heartbeat, place: Store) -> None:
        """Load the model, make the group once all ranks have theirs, and agree on common limits."""
        from ragkv.runtime import Runtime

        model, limits = self.part.model, self.part.limits
        self._wait_for_all(watch, place)
        self.group = RankGroup(place, self.rank, self.size, watch, timeout=self._timeout, device=model.device)
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
        self._backend = self.part.backend(self.group, runtime)

    def _wait_for_all(self, watch: Heartbeat, place: Store) -> None:
        """Wait until all other live ranks have loaded their models."""
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


class RankContexts(Contexts):
    """`Contexts` spread over the ranks: each holds the blocks that it encodes, and the short texts that hash to it."""

    def __init__(
        self,
        model: LanguageModel,
        texts: Sequence[tuple[str, str]],
        config: IndexConfig,
        *,
        group: RankGroup,
        runtime: Runtime,
    ) -> None:
        super().__init__(model, texts, config)
        self.runtime = runtime
        self._executor = RankExecutor(group)
        self._group = group

    def _kv(self, encoding: Encoding, ids: tuple[int, ...]) -> ChunkKV:
        if encoding is Encoding.STANDALONE and ids == self._prefix_ids:
            return super()._kv(encoding, ids)  # everybody's
        owner = rank_of(repr(ids), self._group.size)
        if owner == self._group.rank:
            return replace(super()._kv(encoding, ids), owner=owner)
        packet = self._packet if encoding is Encoding.PACKET else None
        prefixed = encoding is not Encoding.STANDALONE if packet is None else packet.prefixed
        at, tokens = len(self._prefix_ids) if prefixed else 0, len(ids) + (0 if packet is None else packet.tokens)
        return ChunkKV.elsewhere(owner=owner, layers=self.model.layers, tokens=tokens, encoded_at=at)


class ContextRankBackend:
    """The same texts on all ranks (`ragkv.distributed.session.RankBackend`)."""

    def __init__(self, model: LanguageModel, texts: Sequence[tuple[str, str]], config: IndexConfig) -> None:
        self.model = model
        self.config = config
        self._texts = texts

    def facts(self) -> Mapping[str, str]:
        checkpoint, revision = self.model.checkpoint, self.model.revision
        fingerprint = checkpoint.fingerprint(self.config.dtype, None if checkpoint.local else revision)
        return {
            "model": f"{self.config.model} ({fingerprint[:12]})",
            "prompt": repr(render(self.config.prompt, self.model.tokens).facts()),
            **settings_to_compare(self.config),
            "text": hashlib.blake2b(repr([text for _, text in self._texts]).encode(), digest_size=8).hexdigest(),
        }

    @property
    def limits(self) -> RuntimeLimits:
        return context_limits(self.model, self.config)

    def backend(self, group: RankGroup, runtime: Runtime) -> RankContexts:
        return RankContexts(self.model, self._texts, self.config, group=group, runtime=runtime)
