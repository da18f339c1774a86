"""`StatefulModel`: any causal model of transformers that can be resumed from its own cache.

The state of recurrent layers after one chunk cannot be merged with that after another, and some attention cannot be
split either. But an expert of PCED is a single sequence: it only needs the cache that transformers itself had after
[prefix, chunk]. So that cache is stored, and transformers' own forward continues from it: `full`, `pced` and every
other engine that reads one sequence are exact on such a model; no other engine runs on it.

A family's cache may be a `DynamicCache` of attention and recurrent layers, a class of its own, or a plain list: in any
case a tree of tensors and numbers. `CacheLayout` finds out once, on load, how each tensor depends on tokens and on
batch rows. `CachePacking` maps the tensors to a `ChunkKV`: those that grow with the tokens become a layer's KV, of
the chunk's own tokens alone, the others its states. `BatchedCache` holds several sequences in one batch for a forward
pass; sequences that step together stay together, and shorter ones are padded on the left and masked.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ragkv.attention.kv import ChunkKV, PlacedChunk, State
from ragkv.attention.sequence import KVCache, TokenSequence
from ragkv.errors import UnsupportedModelError
from ragkv.model.attention_hook import LayerMask
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.language_model import (
    LanguageModel,
    Run,
    bound_time_steps,
    in_float32,
    set_windows,
    shallow_copy,
    spans,
)
from ragkv.types import Capability

_PLAIN = (str, bytes, type, torch.dtype, torch.device, torch.Size)
_DEPTH = 6

Path = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTensor:
    """One tensor of a cache. `rows` is its batch dimension.

    `tokens` is the dimension that grows by one with every token; None for a state, whose size does not depend on
    tokens.
    """

    path: Path
    rows: int
    tokens: int | None

    @property
    def name(self) -> str:
        """The path as one string."""
        return _name(self.path)


class CacheLayout:
    """The structure of one model's cache.

    `leaves` are its tensors, in a fixed order; the cache of a sequence is a list of tensors in this order, with one
    batch row each.
    """

    def __init__(self, skeleton: Any, leaves: Sequence[CacheTensor], counts: Sequence[Path]) -> None:
        self._skeleton = skeleton
        self.leaves = tuple(leaves)
        self._counts = tuple(counts)

    @classmethod
    def of(cls, first: tuple[int, Any], longer: Sequence[tuple[int, Any]], wider: Any) -> CacheLayout:
        """Find the layout from caches of one sequence after (n, cache) tokens, and one of two sequences after as many
        as `first`.

        Raises UnsupportedModelError if they are inconsistent.
        """
        n, cache = first
        tensors, numbers = _parts(cache)
        others = [(length - n, *_parts(other)) for length, other in longer]
        two, _ = _parts(wider)
        forms = {
            (*values, *more) for values, more in ((tensors, numbers), _parts(wider), *(other[1:] for other in others))
        }
        if len(forms) > 1:
            raise UnsupportedModelError("the layout of its cache changes with the number of tokens")
        leaves, counts = [], []
        for path, tensor in tensors.items():
            leaf = _leaf(path, tensor, [(more, values[path]) for more, values, _ in others], two[path])
            if leaf is not None:
                leaves.append(leaf)
            elif not all(torch.equal(tensor, values[path]) for _, values, _ in others):
                raise UnsupportedModelError(
                    f"its cache shares between sequences a tensor that changes with their tokens ({_name(path)})"
                )
        for path, number in numbers.items():
            if number == n and all(values[path] == n + more for more, _, values in others):
                counts.append(path)
            elif any(values[path] != number for _, _, values in others):
                raise UnsupportedModelError(
                    f"a counter in its cache follows a rule that ragkv does not know ({_name(path)})"
                )
        placeholder = torch.empty(0)
        memo: dict[int, Any] = {id(tensors[leaf.path]): placeholder for leaf in leaves}  # their values are not stored
        return cls(copy.deepcopy(cache, memo), leaves, counts)

    def read(self, cache: Any) -> list[Tensor]:
        """The tensors of a cache of this layout, not copied."""
        tensors, _ = _parts(cache)
        return [tensors[leaf.path] for leaf in self.leaves]

    def make(self, tensors: Sequence[Tensor], tokens: int) -> Any:
        """A cache of these tensors after `tokens` tokens. A forward pass may write into the states."""
        cache = copy.deepcopy(self._skeleton)
        for leaf, tensor in zip(self.leaves, tensors, strict=True):
            _put(cache, leaf.path, tensor)
        for path in self._counts:
            _put(cache, path, tokens)
        return cache


def _parts(cache: Any) -> tuple[dict[Path, Tensor], dict[Path, int | float]]:
    """Every tensor and every number in a cache, with its path, in a fixed order."""
    found = list(_walk(cache, (), set()))
    tensors = {path: value for path, value in found if isinstance(value, Tensor)}
    return tensors, {path: value for path, value in found if not isinstance(value, Tensor)}


def _walk(value: Any, path: Path, above: set[int]) -> Iterator[tuple[Path, Tensor | int | float]]:
    if isinstance(value, Tensor | int | float):
        yield path, value
        return
    if value is None or isinstance(value, _PLAIN) or id(value) in above or len(path) > _DEPTH:
        return
    inside = above | {id(value)}
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, ("item", index)), inside)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, (*path, ("item", key)), inside)
    elif hasattr(value, "__dict__"):
        for name in sorted(vars(value)):
            yield from _walk(vars(value)[name], (*path, ("attribute", name)), inside)


def _put(cache: Any, path: Path, value: Any) -> None:
    for kind, key in path[:-1]:
        cache = getattr(cache, key) if kind == "attribute" else cache[key]
    kind, key = path[-1]
    if kind == "attribute":
        setattr(cache, key, value)
    else:
        cache[key] = value


def _leaf(path: Path, value: Tensor, along: Sequence[tuple[int, Tensor]], two: Tensor) -> CacheTensor | None:
    """How a tensor depends on batch rows and tokens; None if it depends on neither."""
    dims = range(value.ndim)
    if any(other.ndim != value.ndim for _, other in along) or two.ndim != value.ndim:
        raise UnsupportedModelError(f"the layout of its cache changes with the number of tokens ({_name(path)})")
    grown = {d for more, other in along for d in dims if other.shape[d] != value.shape[d]}
    wide = [d for d in dims if two.shape[d] != value.shape[d]]
    if len(wide) > 1 or any(two.shape[d] != 2 * value.shape[d] for d in wide):
        raise UnsupportedModelError(f"its cache batches sequences in a way that ragkv does not know ({_name(path)})")
    if not grown:
        return CacheTensor(path=path, rows=wide[0], tokens=None) if wide else None
    [tokens, *rest] = sorted(grown)
    steady = all(other.shape[tokens] == value.shape[tokens] + more for more, other in along)
    if rest or not wide or not steady:
        raise UnsupportedModelError(f"its cache grows by a rule that ragkv does not know ({_name(path)})")
    return CacheTensor(path=path, rows=wide[0], tokens=tokens)


def _name(path: Path) -> str:
    return ".".join(str(key) for _, key in path)


@dataclass(slots=True)
class _Layer:
    """Indices of the leaves that are a layer's keys and values."""

    owner: str = ""
    kv: list[int] = field(default_factory=list)


class CachePacking:
    """Where each leaf of a layout goes in the `ChunkKV` of a model with `layers` layers.

    Raises UnsupportedModelError for a cache that cannot be stored.
    """

    def __init__(self, tree: CacheLayout, sample: Sequence[Tensor], *, layers: int, dtype: torch.dtype) -> None:
        self._tree = tree
        self._dtype = dtype
        self._devices = [tensor.device for tensor in sample]  # a model may be split over several
        self._layers = [_Layer() for _ in range(layers)]
        self._states: list[tuple[int, str, int]] = []
        for number, (leaf, tensor) in enumerate(zip(tree.leaves, sample, strict=True)):
            layer = next((key for kind, key in leaf.path if kind == "item" and type(key) is int), 0)
            if leaf.tokens is None:
                self._states.append((min(layer, layers - 1), leaf.name, number))
            elif (leaf.rows, leaf.tokens, tensor.ndim) not in ((0, 2, 4), (0, 1, 3)):
                raise UnsupportedModelError(f"its cache grows along a dimension that ragkv does not know ({leaf.name})")
            elif tensor.dtype != dtype:
                raise UnsupportedModelError(f"its cache grows in another dtype than the model's ({leaf.name})")
            else:
                self._seat(leaf, layer, number, tensor, sample)
        self._states.sort()

    def _seat(self, leaf: CacheTensor, at: int, number: int, tensor: Tensor, sample: Sequence[Tensor]) -> None:
        """Assign a leaf to its layer: as keys, or as values with as many heads; else to an extra layer at the end."""
        owner = leaf.name.rpartition(".")[0]
        layer = self._layers[at] if at < len(self._layers) else _Layer(owner="?")
        if not layer.kv and not layer.owner:
            layer.owner, layer.kv = owner, [number]
        elif layer.owner == owner and len(layer.kv) == 1 and _heads(sample[layer.kv[0]]) == _heads(tensor):
            layer.kv.append(number)
        else:
            self._layers.append(_Layer(owner=owner, kv=[number]))

    def pack(self, tensors: Sequence[Tensor], tokens: int, encoded_at: int) -> ChunkKV:
        """A chunk's KV from one sequence's tensors; growing tensors hold the chunk's own tokens."""
        keys, values = [], []
        devices = {layer: self._devices[number] for layer, _, number in self._states}
        for at, layer in enumerate(self._layers):
            nothing = torch.empty((0, tokens, 0), dtype=self._dtype, device=devices.get(at, self._devices[0]))
            kv = [tensors[number] for number in layer.kv]
            kv = [t[0] if t.ndim == 4 else t for t in kv]  # (kv_heads, tokens, head_dim)
            keys.append(kv[0] if kv else nothing)
            values.append(kv[1] if len(kv) == 2 else keys[-1][..., :0])
        states = tuple(State(layer, name, tensors[number]) for layer, name, number in self._states)
        return ChunkKV(keys=tuple(keys), values=tuple(values), encoded_at=encoded_at, states=states)

    def unpack(self, chain: Sequence[ChunkKV]) -> list[Tensor]:
        """One sequence's tensors after these chunks, each of which was encoded after those before it."""
        tensors: list[Tensor | None] = [None] * len(self._tree.leaves)
        for at, layer in enumerate(self._layers):
            for number, held in zip(layer.kv, ("keys", "values"), strict=False):
                parts = [getattr(kv, held)[at].to(self._devices[number]) for kv in chain]
                whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
                tensors[number] = whole[None] if self._tree.leaves[number].tokens == 2 else whole
        for state, (layer_at, name, number) in zip(chain[-1].states, self._states, strict=True):
            if (state.layer, state.name) != (layer_at, name):
                raise ValueError(f"the KV has the state {state.name!r} where this model has {name!r}")
            tensors[number] = state.value.to(self._devices[number])
        return [tensor for tensor in tensors if tensor is not None]


def require_chain(chunks: Sequence[PlacedChunk], position: int) -> None:
    """ValueError unless each chunk is placed where it was encoded, right after those before it, up to `position`."""
    end = 0
    for chunk in chunks:
        if chunk.start != end or chunk.offset:
            raise ValueError(
                "a sequence of this model resumes one state: it reads a prefix, and what was encoded right after it"
            )
        end = chunk.end
    if end != position:
        raise ValueError(f"the sequence's next token is at {position}, but what it reads ends at {end}")


def _heads(tensor: Tensor) -> int:
    return tensor.shape[1] if tensor.ndim == 4 else 1


@dataclass(frozen=True, slots=True, eq=False)
class BatchedCache:
    """Several sequences' caches: `tensors`, one for each leaf; batch row i has read `lengths[i]` tokens."""

    tree: CacheLayout
    packing: CachePacking
    tensors: Sequence[Tensor]
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def row(self, index: int, *, last: int | None = None) -> list[Tensor]:
        """One sequence's tensors, not copied; those that grow hold only the `last` tokens."""
        tokens = self.lengths[index] if last is None else last
        tensors = []
        for leaf, tensor in zip(self.tree.leaves, self.tensors, strict=True):
            one = tensor.narrow(leaf.rows, index, 1)
            if leaf.tokens is not None:
                one = one.narrow(leaf.tokens, one.shape[leaf.tokens] - tokens, tokens)
            tensors.append(one)
        return tensors

    def resumable(self) -> list[Tensor]:
        """The tensors for a forward pass; those that it may write into are copied, so a failed pass changes nothing."""
        return [t.clone() if leaf.tokens is None else t for leaf, t in zip(self.tree.leaves, self.tensors, strict=True)]

    def visible(self, more: int) -> Tensor | None:
        """The mask `(rows, tokens)` over all and `more` new ones, 0 for padding; None where nothing is padded."""
        if min(self.lengths) == self.longest or all(leaf.tokens is None for leaf in self.tree.leaves):
            return None
        first = self.longest - torch.tensor(self.lengths)
        return (torch.arange(self.longest + more) >= first[:, None]).long()


class StateCache(KVCache):
    """A sequence's cache as a row of a `BatchedCache`. `length` is the number of tokens that it has read itself."""

    __slots__ = ("held", "index")

    def __init__(self, held: BatchedCache, index: int, length: int) -> None:
        super().__init__(reserve=0)
        self.held, self.index, self.length = held, index, length

    def chunk_kv(self, *, encoded_at: int = 0) -> ChunkKV:
        own = self.held.row(self.index, last=self.length)
        return self.held.packing.pack([t.clone() for t in own], self.length, encoded_at)


def batch_caches(places: Sequence[tuple[BatchedCache, int]]) -> BatchedCache:
    """These sequences together, in this order; nothing is copied if they already are."""
    first = places[0][0]
    tree = first.tree
    if all(held is first for held, _ in places) and [index for _, index in places] == list(range(len(first.lengths))):
        return first
    rows = [held.row(index) for held, index in places]
    lengths = tuple(held.lengths[index] for held, index in places)
    longest = max(lengths)
    tensors = [
        torch.cat([_padded(leaf, each[number], longest) for each in rows], leaf.rows)
        for number, leaf in enumerate(tree.leaves)
    ]
    return BatchedCache(tree, first.packing, tensors, lengths)


def _padded(leaf: CacheTensor, tensor: Tensor, tokens: int) -> Tensor:
    """Pad with zeros on the left; a NaN would get through any mask."""
    if leaf.tokens is None or tensor.shape[leaf.tokens] == tokens:
        return tensor
    shape = list(tensor.shape)
    shape[leaf.tokens] = tokens - shape[leaf.tokens]
    return torch.cat([tensor.new_zeros(shape), tensor], leaf.tokens)


_CACHES = ("past_key_values", "cache_params", "state")
"""The names of the cache in a family's forward call and in its result."""
_TRIED = (5, 1, 6, 9)
"""The layout is learned from caches after these numbers of tokens; one token gives the shape of all KV."""
_SLOW_ROWS = 16
"""The batch size for encoding chunks where tokens are read one by one."""
_APART = 256
"""Batched sequences differ by at most this many tokens, or by half of the longest: padding costs as much as tokens."""


_Place = tuple[BatchedCache, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions:
    """How this model resumes exactly from a cache, as its self-check found out.

    `several`: with several tokens at once, not only one by one. `ragged`: sequences of different lengths in one batch,
    one token each; `ragged_several`: several tokens each. `together`: sequences of equal length in one batch.
    """

    several: bool = True
    ragged: bool = True
    ragged_several: bool = True
    together: bool = True


class StatefulModel(LanguageModel):
    """A loaded model that continues each sequence from its cache; `because`: why chunks cannot be merged or moved."""

    joins = False

    def __init__(self, model: Any, tokenizer: Any, checkpoint: Checkpoint, *, because: str) -> None:
        self._hold(model, tokenizer, checkpoint)
        self._model.set_attn_implementation("sdpa" if getattr(model, "_supports_sdpa", False) else "eager")
        self.missing_capabilities = dict.fromkeys(Capability, because)
        self.windows = spans(self._model)
        self.resume_options = ResumeOptions()
        self._learn()

    def _learn(self) -> None:
        """Find out how the model takes its cache, and the cache's layout."""
        from transformers import DynamicCache

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
        self.tree = CacheLayout.of(first, longer, wider)
        if not self.tree.leaves:
            raise UnsupportedModelError("its cache holds nothing")
        self.packing = CachePacking(self.tree, self.tree.read(first[1]), layers=self.layers, dtype=self.dtype)

    @torch.inference_mode()
    def step(
        self,
        sequences: Sequence[TokenSequence],
        ids: Sequence[Sequence[int]],
        *,
        every: bool = False,
        seen: list[LayerMask] | None = None,
        run: Run | None = None,
    ) -> Tensor:
        """As `LanguageModel.step`; sequences are batched where that is exact (`resume_options`).

        `run` never applies.
        """
        held = [self._held(sequence) for sequence in sequences]
        read: dict[int, tuple[Tensor, BatchedCache, int]] = {}
        for group in self._groups([len(each) for each in ids], held):
            before = [place for number in group if (place := held[number]) is not None]
            results, after = self._read(before, [ids[number] for number in group], every=every)
            read |= {
                number: (logits, after, index)
                for index, (number, logits) in enumerate(zip(group, results, strict=True))
            }
        outputs = []
        for number, sequence in enumerate(sequences):  # all passes are over: from here on nothing fails
            logits, after, index = read[number]
            sequence.cache = StateCache(after, index, sequence.cache.length + len(ids[number]))
            sequence.position += len(ids[number])
            if every or not sequence.silent:
                outputs.append(logits)
        return torch.cat(outputs).float() if outputs else torch.empty((0, 0))

    def encode_each(self, chunks: Sequence[Sequence[int]], *, prefix: ChunkKV | None = None) -> Iterator[ChunkKV]:
        """As `LanguageModel.encode_each`; a model that resumes token by token encodes many chunks in one batch."""
        if any(not ids for ids in chunks):
            raise ValueError("a chunk without tokens has no KV")
        start = 0 if prefix is None else prefix.tokens
        seen = () if prefix is None else (PlacedChunk(kv=prefix, start=0),)
        most = 1 if self.resume_options.several or not seen else _SLOW_ROWS
        for batch in (chunks[i : i + most] for i in range(0, len(chunks), most)):
            sequences = [TokenSequence.for_kv(seen, position=start) for _ in batch]
            if most == 1:
                self.step(sequences, batch)
            else:
                for at in range(max(map(len, batch))):
                    live = [
                        (sequence, [ids[at]]) for sequence, ids in zip(sequences, batch, strict=True) if at < len(ids)
                    ]
                    self.step([sequence for sequence, _ in live], [ids for _, ids in live])
            for sequence in sequences:
                yield sequence.cache.chunk_kv(encoded_at=start)

    @contextmanager
    def plain(self, implementation: str = "sdpa") -> Iterator[Any]:
        """transformers' own model and attention, which is what this model runs."""
        with torch.inference_mode():
            yield self._model

    def with_resume_options(self, options: ResumeOptions) -> StatefulModel:
        """This model with other options for resuming: for the self-check."""
        other = copy.copy(self)
        other._companions, other.resume_options = {}, options
        return other

    def in_float32(self) -> StatefulModel:
        """This model in float32, for the self-check."""
        other = copy.copy(self)
        other._companions, other._model, other.dtype = {}, in_float32(self._model), torch.float32
        other._learn()
        return other

    def with_windows(self, sizes: Mapping[int, int]) -> StatefulModel:
        """As `LanguageModel.with_windows`; bounds of time steps are narrowed too."""
        other = copy.copy(self)
        other._companions, other._model = {}, shallow_copy(self._model)
        set_windows(other._model, sizes)
        if bound_time_steps(other._model) or sizes:
            other._learn()
        return other

    def _held(self, sequence: TokenSequence) -> _Place | None:
        """The sequence's cache; None if it has read nothing and sees nothing."""
        if isinstance(sequence.cache, StateCache):
            return sequence.cache.held, sequence.cache.index
        if not all(group.plain for group in sequence.groups):
            raise UnsupportedModelError("a sequence that weights its segments cannot resume from a state")
        chunks = sequence.segments
        require_chain(chunks, sequence.position)
        if not chunks:
            return None
        tensors = self.packing.unpack([chunk.kv for chunk in chunks])
        return BatchedCache(self.tree, self.packing, tensors, (sequence.position,)), 0

    def _groups(self, counts: Sequence[int], held: Sequence[_Place | None]) -> Iterator[list[int]]:
        """Indices of the sequences that share a batch: as many new tokens, similar lengths, order preserved."""
        lengths = [0 if place is None else place[0].lengths[place[1]] for place in held]
        options = self.resume_options

        def key(index: int) -> tuple[int, int]:
            n, before = counts[index], lengths[index]
            ragged = options.ragged and (n == 1 or not options.several or options.ragged_several)
            return n, 0 if not before else 1 if ragged else 1 + before

        ordered = sorted(range(len(counts)), key=lambda index: (*key(index), lengths[index]))
        for _, same in itertools.groupby(ordered, key):
            group: list[int] = []
            for index in same:
                longer = lengths[index] - lengths[group[0]] if group else 0
                if group and (not options.together or longer > max(_APART, lengths[index] // 2)):
                    yield group
                    group = []
                group.append(index)
            yield group

    def _read(
        self, before: Sequence[_Place], ids: Sequence[Sequence[int]], *, every: bool
    ) -> tuple[list[Tensor], BatchedCache]:
        """Read equally many new tokens `ids` for sequences that all have a cache or none: their logits and caches."""
        held = batch_caches(before) if before else None
        tokens = torch.tensor([list(each) for each in ids])
        parts = []
        runs = [tokens] if self.resume_options.several or held is None else torch.split(tokens, 1, 1)
        for run in runs:
            logits, held = self._forward(held, run, every=every)
            parts.append(logits if every else logits[:, -1:])
        assert held is not None
        whole = torch.cat(parts, 1) if every else parts[-1]
        return list(whole), held

    def _forward(self, held: BatchedCache | None, tokens: Tensor, *, every: bool) -> tuple[Tensor, BatchedCache]:
        n = tokens.shape[1]
        if held is None:
            lengths = (0,) * len(tokens)
            logits, cache = self._call(tokens, self._fresh(), lengths, every=every)
        else:
            lengths = held.lengths
            cache = self.tree.make(held.resumable(), held.longest)
            logits, cache = self._call(tokens, cache, lengths, every=every, visible=held.visible(n))
        after = tuple(length + n for length in lengths)
        return logits, BatchedCache(self.tree, self.packing, self.tree.read(cache), after)

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
            raise UnsupportedModelError("its forward pass returns no cache")
        return out.logits, out[self._cache_name]

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _fresh(self) -> Any:
        """An empty cache; None if the family makes its own class.

        It has no windows: it keeps tokens that the masks hide, so that its length is the number of tokens read.
        """
        if self._of_its_own:
            return None
        from transformers import cache_utils as kinds

        cache = kinds.DynamicCache(config=self._model.config)
        for index, layer in enumerate(cache.layers):
            if type(layer) is kinds.DynamicSlidingWindowLayer:
                cache.layers[index] = kinds.DynamicLayer()
            elif type(layer) is kinds.LinearAttentionAndSlidingWindowAttentionLayer:
                states = layer.number_of_states
                cache.layers[index] = kinds.LinearAttentionAndFullAttentionLayer(number_of_states=states)
        return cache
