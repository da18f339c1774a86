"""Whole texts that several ranks answer from without an index: the blocks of a long one are encoded side by side."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ragkv.attention.kv import ChunkKV
from ragkv.config import IndexConfig
from ragkv.distributed.group import Group
from ragkv.distributed.lockstep import Lockstep
from ragkv.distributed.rankpart import setting_facts
from ragkv.distributed.shardbooks import rank_of
from ragkv.index.contexts import Contexts, context_limits
from ragkv.model.prompt import render
from ragkv.types import Encoding

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel
    from ragkv.runtime import Limits, Runtime

__all__ = ["ContextPart", "RankContexts"]


class RankContexts(Contexts):
    """`Contexts` of which each rank holds some: the blocks that it encodes, and the short texts that hash to it."""

    def __init__(
        self,
        model: LanguageModel,
        texts: Sequence[tuple[str, str]],
        config: IndexConfig,
        *,
        group: Group,
        runtime: Runtime,
    ) -> None:
        super().__init__(model, texts, config)
        self.runtime = runtime
        self._executor = Lockstep(group)
        self._group = group

    def _kv(self, encoding: Encoding, ids: tuple[int, ...]) -> ChunkKV:
        if encoding is Encoding.STANDALONE and ids == self._prefix_ids:
            return super()._kv(encoding, ids)  # everybody's
        owner = rank_of(repr(ids), self._group.size)
        if owner == self._group.rank:
            return replace(super()._kv(encoding, ids), owner=owner)
        at = 0 if encoding is Encoding.STANDALONE else len(self._prefix_ids)
        return ChunkKV.elsewhere(owner=owner, layers=self.model.layers, tokens=len(ids), encoded_at=at)


class ContextPart:
    """The same texts on all ranks (`ragkv.distributed.rankpart.RankPart`)."""

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
            **setting_facts(self.config),
            "text": hashlib.blake2b(repr([text for _, text in self._texts]).encode(), digest_size=8).hexdigest(),
        }

    @property
    def limits(self) -> Limits:
        return context_limits(self.model, self.config)

    def ground(self, group: Group, runtime: Runtime) -> RankContexts:
        return RankContexts(self.model, self._texts, self.config, group=group, runtime=runtime)
