"""What a rank answers from, and what has to be alike on all ranks for that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from ragkv.config import IndexConfig
from ragkv.distributed.group import Group
from ragkv.distributed.shardground import ShardGround
from ragkv.index.ground import Ground
from ragkv.index.index import Index

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel
    from ragkv.runtime import Limits, Runtime

__all__ = ["IndexPart", "RankPart", "setting_facts"]

_OWN = {"runtime", "ingest", "kv", "kv_budget", "memory_budget", "codec", "index_factory", "engines", "chunk_tokens"}
"""Settings that may differ from rank to rank: they change no answer."""


class RankPart(Protocol):
    """A rank's part of what all answer from."""

    @property
    def config(self) -> IndexConfig:
        """What questions leave open."""

    def facts(self) -> Mapping[str, str]:
        """What has to be equal on all ranks, by what it is called in a sentence; the model is not loaded for it."""

    @property
    def model(self) -> LanguageModel:
        """The generation model, loaded at the first use."""

    @property
    def limits(self) -> Limits:
        """How much this machine can run at a time."""

    def ground(self, group: Group, runtime: Runtime) -> Ground:
        """What answers stand on, once the ranks have met; `runtime` takes its steps with theirs."""


class IndexPart:
    """An index: with `shards`, one of which each rank has its own; else one that all have, split by hash."""

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
            **setting_facts(index.config),
            "way of sharing": "shards" if self._shards else "one index, split by hash",
        }

    @property
    def model(self) -> LanguageModel:
        return self._index.model

    @property
    def limits(self) -> Limits:
        return self._index.run_limits

    def ground(self, group: Group, runtime: Runtime) -> ShardGround:
        _ = self._index.runtime  # it would take its own pool's leases for all there are
        self._index.store.spare(runtime.pool.holds)
        return ShardGround(self._index, group, runtime, shards=self._shards)


def setting_facts(config: IndexConfig) -> dict[str, str]:
    """The settings that answers depend on, each by its name."""
    return {
        f"setting {name}": json.dumps(value, sort_keys=True, default=str)
        for name, value in asdict(config).items()
        if name not in _OWN and name not in ("model", "prompt")
    }
