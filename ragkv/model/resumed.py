"""A model whose rows resume one state: any causal model of transformers that can go on from its own cache.

What recurrent layers hold after a chunk cannot be merged with what they hold after another, and some attention
cannot be taken apart either. But an expert of PCED is a sequence of its own: it needs no merge, only the cache that
transformers itself had after [prefix, chunk]. So that is what is stored, and transformers' own forward goes on from it:
`full`, `pced` and whatever else reads one sequence are exact on such a model, and no other engine runs on it.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from ragkv.attention.across import Ranks
from ragkv.attention.kv import ChunkKV, Segment
from ragkv.attention.row import Row
from ragkv.attention.stack import Stack
from ragkv.errors import UnsupportedModelError
from ragkv.model.cachetree import CacheTree
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.interface import Seen
from ragkv.model.language import LanguageModel
from ragkv.model.packing import Packing, require_chain
from ragkv.model.sidebyside import OwnState, SideBySide, side_by_side
from ragkv.model.twin import set_windows, spans, twin
from ragkv.types import Need

__all__ = ["ResumedModel", "Ways"]

_CACHES = ("past_key_values", "cache_params", "state")
"""What families call their cache, in a call and in its result."""
_TRIED = (5, 1, 6, 9)
"""After so many tokens a cache is looked at, to learn its form; one token, because that tells the shape of all KV."""
_SLOW_ROWS = 16
"""Chunks that are encoded side by side where tokens are read one by one."""
_APART = 256
"""Rows side by side differ by at most so many tokens, or by half of the longest: padding is read like tokens."""


_Place = tuple[SideBySide, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How this model goes on exactly from a cache, as its proof on load found out.

    `several`: with several tokens at once, not only one by one. `ragged`: rows of unequal length side by side, one
    token each; `ragged_several`: several tokens each. `together`: rows of equal length side by side.
    """

    several: bool = True
    ragged: bool = True
    ragged_several: bool = True
    together: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A row's next tokens, and what came of them."""

    row: Row
    ids: list[int]
    number: int


class ResumedModel(LanguageModel):
    """A loaded model that reads each row on from one cache. `because`: why its chunks cannot be merged or moved."""

    joins = False

    def __init__(self, model: Any, tokenizer: Any, checkpoint: Checkpoint, *, because: str) -> None:
        self._hold(model, tokenizer, checkpoint)
        self._model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")
        self.lacks = dict.fromkeys(Need, because)
        self.windows = spans(self._model)
        self.ways = Ways()
        self._learn()

    def _learn(self) -> None:
        """Find out how the model is asked to go on, and what its cache is made of."""
        known = inspect.signature(self._model.forward).parameters
        name = next((name for name in _CACHES if name in known), None)
        if name is None:
            raise UnsupportedModelError("its forward pass takes no cache")
        self._cache_name = name
        self._known = frozenset(known)
        self._of_its_own = False
        ids = [[(7 * i + j) % 61 + 3 for i in range(_TRIED[-1])] for j in range(2)]
        with torch.inference_mode():
            made = self._call(torch.tensor(ids[:1]), None, [0])[1]
            self._of_its_own = type(made) is not DynamicCache
            first, *longer = ((n, self._call(torch.tensor([ids[0][:n]]), self._fresh(), [0])[1]) for n in _TRIED)
            wider = self._call(torch.tensor([each[: first[0]] for each in ids]), self._fresh(), [0, 0])[1]
        self.tree = CacheTree.of(first, longer, wider)
        if not self.tree.leaves:
            raise UnsupportedModelError("its cache holds nothing")
        self.packing = Packing(self.tree, self.tree.read(first[1]), layers=self.layers, dtype=self.dtype)

    @torch.inference_mode()
    def step(
        self,
        rows: Sequence[Row],
        ids: Sequence[Sequence[int]],
        *,
        every: bool = False,
        seen: list[Seen] | None = None,
        ranks: Ranks | None = None,
    ) -> Tensor:
        """As `LanguageModel.step`; rows go side by side where that is exact (`ways`).

        Its rows read one chunk at most, so that there is nothing to merge with other `ranks`.
        """
        pieces = [_Piece(row, list(each), at) for at, (row, each) in enumerate(zip(rows, ids, strict=True))]
        held = [self._held(piece.row) for piece in pieces]
        logits: list[Tensor | None] = [None] * len(pieces)
        now: list[_Place | None] = [None] * len(pieces)
        for group in self._groups(pieces, held):
            before = [place for piece in group if (place := held[piece.number]) is not None]
            found, after = self._read(before, [piece.ids for piece in group], every=every)
            for index, (piece, each) in enumerate(zip(group, found, strict=True)):
                logits[piece.number], now[piece.number] = each, (after, index)
        for piece, place in zip(pieces, now, strict=True):  # all passes are over: from here on nothing fails
            assert place is not None
            own = OwnState()
            own.held, own.index = place
            own.length = piece.row.own.length + len(piece.ids)
            piece.row.own = own
            piece.row.position += len(piece.ids)
        wanted = (each for piece, each in zip(pieces, logits, strict=True) if every or not piece.row.silent)
        kept = [each for each in wanted if each is not None]
        return torch.cat(kept).float() if kept else torch.empty((0, 0))

    def encode_each(
        self, chunks: Sequence[Sequence[int]], *, prefix: ChunkKV | None = None, batch_tokens: int = 2048
    ) -> Iterator[ChunkKV]:
        """As `LanguageModel.encode_each`; what goes on token by token alone does so with many chunks side by side."""
        if any(not ids for ids in chunks):
            raise ValueError("a chunk without tokens has no KV")
        start = 0 if prefix is None else prefix.tokens
        seen = () if prefix is None else (Segment(kv=prefix, start=0),)
        most = 1 if self.ways.several or not seen else _SLOW_ROWS
        for batch in (chunks[i : i + most] for i in range(0, len(chunks), most)):
            rows = [Row.for_kv(seen, position=start) for _ in batch]
            if most == 1:
                self.step(rows, batch)
            else:
                for at in range(max(map(len, batch))):
                    live = [(row, [ids[at]]) for row, ids in zip(rows, batch, strict=True) if at < len(ids)]
                    self.step([row for row, _ in live], [ids for _, ids in live])
            for row in rows:
                yield row.own.chunk_kv(encoded_at=start)

    @contextmanager
    def plain(self, implementation: str = "sdpa") -> Iterator[Any]:
        """transformers' own model, whose attention this is."""
        with torch.inference_mode():
            yield self._model

    def with_ways(self, ways: Ways) -> ResumedModel:
        """This model, going on in these ways: for the proof on load."""
        other = copy.copy(self)
        other._companions, other.ways = {}, ways
        return other

    def with_windows(self, sizes: Mapping[int, int]) -> ResumedModel:
        """As `LanguageModel.with_windows`."""
        other = copy.copy(self)
        other._companions, other._model = {}, twin(self._model)
        set_windows(other._model, sizes)
        other._learn()
        return other

    def _held(self, row: Row) -> _Place | None:
        """Where the row's cache is; None for a row that has read nothing and sees nothing."""
        if isinstance(row, Stack):
            raise UnsupportedModelError("a row of several questions cannot resume one state")
        if isinstance(row.own, OwnState) and row.own.held is not None:
            return row.own.held, row.own.index
        if not all(group.plain for group in row.groups):
            raise UnsupportedModelError("a row that weighs what it reads cannot resume one state")
        segments = row.segments
        require_chain(segments, row.position)
        if not segments:
            return None
        tensors = self.packing.unpack([segment.kv for segment in segments])
        return SideBySide(self.tree, self.packing, tensors, (row.position,)), 0

    def _groups(self, pieces: Sequence[_Piece], held: Sequence[_Place | None]) -> Iterator[list[_Piece]]:
        """The pieces that go side by side: as many tokens each, after about as many, in the order of these."""

        def length(piece: _Piece) -> int:
            place = held[piece.number]
            return 0 if place is None else place[0].lengths[place[1]]

        def key(piece: _Piece) -> tuple[int, int]:
            n, before = len(piece.ids), length(piece)
            ragged = self.ways.ragged and (n == 1 or not self.ways.several or self.ways.ragged_several)
            return n, 0 if not before else 1 if ragged else 1 + before

        ordered = sorted(pieces, key=lambda piece: (*key(piece), length(piece)))
        for _, same in itertools.groupby(ordered, key):
            group: list[_Piece] = []
            for piece in same:
                longer = length(piece) - length(group[0]) if group else 0
                if group and (not self.ways.together or longer > max(_APART, length(piece) // 2)):
                    yield group
                    group = []
                group.append(piece)
            yield group

    def _read(
        self, before: Sequence[_Place], ids: Sequence[Sequence[int]], *, every: bool
    ) -> tuple[list[Tensor], SideBySide]:
        """As many new tokens `ids` of rows, all of them with a cache or none: each row's logits, and their caches."""
        held = side_by_side(before) if before else None
        tokens = torch.tensor([list(each) for each in ids])
        found = []
        runs = [tokens] if self.ways.several or held is None else torch.split(tokens, 1, 1)
        for run in runs:
            logits, held = self._forward(held, run, every=every)
            found.append(logits if every else logits[:, -1:])
        assert held is not None
        whole = torch.cat(found, 1) if every else found[-1]
        return list(whole), held

    def _forward(self, held: SideBySide | None, tokens: Tensor, *, every: bool) -> tuple[Tensor, SideBySide]:
        n = tokens.shape[1]
        if held is None:
            lengths = (0,) * len(tokens)
            logits, cache = self._call(tokens, self._fresh(), lengths, every=every)
        else:
            lengths = held.lengths
            cache = self.tree.make(held.resumable(), held.longest)
            logits, cache = self._call(tokens, cache, lengths, every=every, visible=held.visible(n))
        after = tuple(length + n for length in lengths)
        return logits, SideBySide(self.tree, self.packing, self.tree.read(cache), after)

    def _call(
        self,
        tokens: Tensor,
        cache: Any,
        starts: Sequence[int],
        *,
        every: bool = True,
        visible: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """transformers' forward of `tokens` `(rows, n)` from `starts` on: logits, and the cache after them."""
        options: dict[str, Any] = {"use_cache": True, self._cache_name: cache}
        if "position_ids" in self._known:
            options["position_ids"] = self._there(torch.tensor(starts)[:, None] + torch.arange(tokens.shape[1]))
        if visible is not None:
            options["attention_mask"] = self._there(visible)
        if "logits_to_keep" in self._known and not every:
            options["logits_to_keep"] = 1
        out = self._model(input_ids=self._there(tokens), **options)
        if out.get(self._cache_name) is None:
            raise UnsupportedModelError("its forward pass gives no cache back")
        return out.logits, out[self._cache_name]

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _fresh(self) -> Any:
        """An empty cache; None where the family makes one of its own kind.

        Windows are the masks' concern: what they hide is kept, so that a cache grows by the tokens that it has read.
        """
        if self._of_its_own:
            return None
        cache = DynamicCache(config=self._model.config)
        for at, layer in enumerate(cache.layers):
            if type(layer) is DynamicSlidingWindowLayer:
                cache.layers[at] = DynamicLayer()
            elif type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
                cache.layers[at] = LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
        return cache
