"""One rank's session: meet the other ranks, and answer question after question.

A rank answers from an index, or without one from whole texts, whose blocks the ranks encode side by side. The module
also defines which settings must be the same on all ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from ragkv.attention.kv import ChunkKV
from ragkv.config import IndexConfig
from ragkv.distributed.group import BoundedStore, Handshake, Peers, RankGroup, answered, wait_for
from ragkv.distributed.sharding import RankExecutor, ShardedBackend, rank_of
from ragkv.errors import RanksError, UsageError
from ragkv.index.answer import AnswerBackend, AnswerStream, validate_task
from ragkv.index.contexts import Contexts
from ragkv.index.index import Index, runtime_limits
from ragkv.model.prompt import render
from ragkv.runtime import Runtime, RuntimeLimits
from ragkv.types import Encoding
from ragkv.util.plugins import join_ray

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ragkv.model.language_model import LanguageModel

_OWN = {"runtime", "ingest", "kv", "kv_budget", "memory_budget", "codec", "index_factory", "engines", "chunk_tokens"}
"""Settings that may differ between ranks, because they do not change answers."""


class IndexRankBackend:
    """An index. With `shards`, each rank has its own; otherwise all have the same one, whose KV is split by hash."""

    def __init__(self, index: Index, *, shards: bool) -> None:
        self._index = index
        self._shards = shards
        self.config = index.config

    def facts(self) -> Mapping[str, str]:
        """The facts that must be equal on all ranks, by their names in error messages. This does not load the model."""
        index = self._index
        return {
            "model": f"{index.config.model} ({index.fingerprint[:12]})",
            "prompt": repr(index.prompt.facts()),
            **settings_to_compare(index.config),
            "way of sharing": "shards" if self._shards else "one index, split by hash",
        }

    @property
    def model(self) -> LanguageModel:
        """The generation model, loaded at the first use."""
        return self._index.model

    @property
    def limits(self) -> RuntimeLimits:
        """The limits of what this machine can run at a time."""
        return runtime_limits(self._index.model, self._index.config, self._index.limits)

    def backend(self, group: RankGroup, runtime: Runtime) -> ShardedBackend:
        """The backend for answers, once the ranks have met; `runtime` runs in step with theirs."""
        _ = self._index.runtime  # it only counts the leases of its own pool
        self._index.store.spare(runtime.pool.holds)
        return ShardedBackend(self._index, group, runtime, shards=self._shards)


def settings_to_compare(config: IndexConfig) -> dict[str, str]:
    """The settings that answers depend on, each by its name."""
    return {
        f"setting {name}": json.dumps(value, sort_keys=True, default=str)
        for name, value in asdict(config).items()
        if name not in _OWN and name not in ("model", "prompt")
    }


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
        limit, holds = timedelta(seconds=timeout), rank == 0 and not agent
        store = answered(lambda: TCPStore(address, port, None, holds, limit, wait_for_workers=False), timeout)
    except (RuntimeError, TimeoutError) as error:
        if "EADDRINUSE" in str(error):
            raise RanksError(
                f"Port {port} is in use by another process; start all ranks with another MASTER_PORT."
            ) from error
        raise RanksError(
            f"No process answers at {address}:{port}, where the ranks meet; start rank 0 there, and let its machine "
            "accept connections at that port."
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives ranks that torchrun starts again
    return PrefixStore(f"ragkv/{attempt}", store), rank, size


def on_ray(address: str, ranks: int, command: Sequence[str], *, patience: float) -> tuple[int, str, str]:
    """Run a command as ranks on the Ray cluster at `address`, each in a bundle of a placement group.

    They meet in a store of this process. Returns rank 0's exit code, stdout and stderr. UsageError for no cluster, and
    when it has no room for the ranks within `patience` seconds; RanksError when rank 0 is lost.
    """
    ray = join_ray(address, logging_level=logging.ERROR)
    try:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        have = ray.cluster_resources()
        need = {"CPU": max(1, int(have.get("CPU", 1)) // ranks), "GPU": int(have.get("GPU", 0) >= ranks)}
        group = ray.util.placement_group([need] * ranks, strategy="SPREAD")
        if not group.wait(patience):
            raise UsageError(f"The Ray cluster has no room for {ranks} ranks ({need} each): name fewer with --ranks.")
        store = TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
        meeting = {"MASTER_ADDR": ray.util.get_node_ip_address(), "MASTER_PORT": store.port, "WORLD_SIZE": ranks}
        meeting |= {"TORCHELASTIC_USE_AGENT_STORE": True, "OMP_NUM_THREADS": need["CPU"], "LOCAL_RANK": 0}

        here = Path.cwd()

        def run(rank: int) -> tuple[int, str, str]:
            env = os.environ | {name: str(value) for name, value in {**meeting, "RANK": rank}.items()}
            done = subprocess.run(
                command,
                env=env,
                cwd=here if here.is_dir() else None,
                stdin=subprocess.DEVNULL,
                capture_output=True,
            )
            return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

        started = [
            ray.remote(run)
            .options(
                num_cpus=need["CPU"],
                num_gpus=need["GPU"],
                max_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            .remote(rank)
            for rank in range(ranks)
        ]
        found: tuple[int, str, str] = ray.get(started[0])
        return found
    except ray.exceptions.RayError as error:
        raise RanksError(f"Ray has lost rank 0 ({str(error).strip().splitlines()[0]}); ask again.") from error
    finally:
        ray.shutdown()


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
    ) -> None:
        self.rank = rank
        self.size = size
        self.part = part
        self._store = store
        self._meeting = BoundedStore(store, timeout)
        self._timeout = timeout
        self._patience = patience
        self._peers: Peers | None = None
        self._backend: AnswerBackend | None = None
        self._asked = 0
        self.group: RankGroup | None = None
        """The ranks, once they have met."""

    def join(self) -> None:
        """Meet the others, and load the model; RanksError if that fails."""
        handshake = Handshake(same=self.part.facts())
        self._peers = peers = Peers.meet(self._meeting, self.rank, self.size, handshake, timeout=self._patience)
        try:
            model, limits = self.part.model, self.part.limits
            peers.wait_until_loaded(self._patience)
            self.group = RankGroup(self._store, self.rank, self.size, peers, timeout=self._timeout, device=model.device)
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
        except BaseException as error:
            self.leave(str(error))
            raise

    def leave(self, why: str | None = None) -> None:
        """Leave the group, and report the reason `why`, if there is one; rank 0 waits until the others have left."""
        peers, group = self._peers, self.group
        self._peers = self.group = self._backend = None
        if peers is not None:
            if why is not None:
                peers.notify(why)
            peers.leave(self._timeout)
        if group is not None:
            group.close()

    def notify(self, asked: Mapping[str, Any]) -> None:
        """Rank 0: announce the next question to the others."""
        self._meeting.set(f"asked/{self._asked}", json.dumps(dict(asked)))
        self._asked += 1

    def next(self) -> dict[str, Any]:
        """Other ranks: wait, without a limit, for rank 0's next question; RanksError if rank 0 is lost."""
        assert self._peers is not None
        key = f"asked/{self._asked}"
        try:
            wait_for(self._meeting, [key], math.inf, self._peers.check)
            content = self._meeting.get(key)
        except RuntimeError as error:
            raise self._peers.after_failure(error) from error
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
        """An answer by all ranks, each of which must call this; like `RagKV.stream`."""
        assert self._backend is not None
        return AnswerStream(self._backend, validate_task(self.part.config, question, **options))


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
            return super()._kv(encoding, ids)  # every rank has it
        owner = rank_of(repr(ids), self._group.size)
        if owner == self._group.rank:
            return replace(super()._kv(encoding, ids), owner=owner)
        packet = self._packet if encoding is Encoding.PACKET else None
        prefixed = encoding is not Encoding.STANDALONE if packet is None else packet.prefixed
        at, tokens = len(self._prefix_ids) if prefixed else 0, len(ids) + (0 if packet is None else packet.tokens)
        return ChunkKV.elsewhere(owner=owner, layers=self.model.layers, tokens=tokens, encoded_at=at)


class ContextRankBackend:
    """The same texts on all ranks; otherwise like `IndexRankBackend`."""

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
        return runtime_limits(self.model, self.config)

    def backend(self, group: RankGroup, runtime: Runtime) -> RankContexts:
        return RankContexts(self.model, self._texts, self.config, group=group, runtime=runtime)


RankBackend = IndexRankBackend | ContextRankBackend
"""The source of one rank's answers: its part of an index, or of whole texts."""
