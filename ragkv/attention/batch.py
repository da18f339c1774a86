"""One forward pass over the new tokens of many sequences.

The model sees all new tokens as one sequence `(1, N)`. `Step` maps each of them back to its own sequence and to the
chunks that this sequence reads. `BatchPlan` inverts the loop: for each chunk KV it lists the tokens that see it, so
that one kernel call reads the chunk for all of them. The plan is made on the host once per pass, and layers with
different sliding windows have different lists of reads.

A sequence's own tokens are batched too. `PrefillBatch` pads sequences of similar length that read their first tokens,
because a kernel call per sequence would cost more than its work; the attention is causal, so the padding needs no mask.
`DecodeBatch` serves sequences that take one token each and share an arena block.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ragkv.attention import varlen
from ragkv.attention.in_place import AttentionInPlace, InPlace, decode_takes
from ragkv.attention.kv import ChunkKV, PlacedChunk
from ragkv.attention.pages import PAGE, PagedRead, PagedReads
from ragkv.attention.partial import LayerCall, PartialAttention, flash_takes, merge_partials, merge_partials_of
from ragkv.attention.rope import QueryRotation, QueryRotations, Rotary
from ragkv.attention.sequence import (
    ArenaBlock,
    ArenaKVCache,
    ChunkGroup,
    RecomputedSequence,
    SequenceSlice,
    TokenSequence,
    tokens_of,
)

Tokens = slice | Tensor
"""Some of a step's tokens, in their order: a slice, or their indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRead:
    """One read of a chunk KV for all tokens that see it.

    `offset` is how far the prompts moved the chunk: one number, or for each token an index into the pass's table of
    rotations. No token sees keys before `first`. `mask` `(n, m)` is True where a token sees one of the remaining keys;
    None if all are seen. `group` 0 is ordinary attention; the other groups are merged and weighted first.
    """

    kv: ChunkKV
    tokens: Tokens
    offset: int | Tensor
    temperature: float
    group: int
    first: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """The weight of a group in the softmax of the tokens that see it: it enters as a·lse + b, `(n,)` each."""

    group: int
    tokens: Tokens
    factor: Tensor
    addend: Tensor


class BatchPlan:
    """Which chunks the new tokens of a step read, and in which calls; without those that are read `in_place`."""

    def __init__(
        self, spans: Sequence[SequenceSlice], device: torch.device, *, in_place: InPlace | None = None
    ) -> None:
        self.spans = tuple(spans)
        self.tokens = sum(span.n for span in spans)
        self._device = device
        self._seen = _seen(spans, in_place or InPlace())
        offsets = sorted({chunk.offset for uses in self._seen.values() for _, chunk in uses})
        self._table_row = {offset: row for row, offset in enumerate(offsets)}
        self._reads: dict[int | None, tuple[ChunkRead, ...]] = {}
        self.weights = self._weights()

    @property
    def offsets(self) -> list[int]:
        """The distinct offsets of all placed chunks, ascending: the order of the pass's table of rotations."""
        return list(self._table_row)

    def row(self, offset: int) -> int:
        """The index of an offset in this order."""
        return self._table_row[offset]

    def reads(self, window: int | None) -> tuple[ChunkRead, ...]:
        """The reads of a layer with this sliding window: a token at i sees keys at i-window+1..i."""
        if window not in self._reads:
            found = (self._reading(key, uses, window) for key, uses in self._seen.items())
            self._reads[window] = tuple(read for read in found if read is not None)
        return self._reads[window]

    @property
    def windowed(self) -> bool:
        """Whether a layer with a sliding window reads chunks."""
        return any(found for window, found in self._reads.items() if window is not None)

    def _reading(
        self, key: tuple[int, float, int, int], uses: list[tuple[SequenceSlice, PlacedChunk]], window: int | None
    ) -> ChunkRead | None:
        _, temperature, group, _ = key
        first, masked = 0, False
        if window is not None:
            uses = [(span, chunk) for span, chunk in uses if chunk.end > span.sequence.position - window + 1]
            if not uses:
                return None
            first = max(0, min(span.sequence.position - window + 1 - chunk.start for span, chunk in uses))
            masked = any(span.last - chunk.start - first >= window for span, chunk in uses)
        kv = uses[0][1].kv
        mask = None
        if masked and window is not None:
            # each token's distance from the chunk's first token
            nearest = [(span.sequence.position - chunk.start, span.n) for span, chunk in uses]
            behind = torch.cat([torch.arange(at, at + n) for at, n in nearest]).to(self._device, non_blocking=True)
            mask = behind[:, None] - torch.arange(first, kv.tokens, device=self._device) < window
        offsets = {chunk.offset for _, chunk in uses}
        offset: int | Tensor
        if len(offsets) == 1:
            [offset] = offsets
        else:
            rows = [self._table_row[chunk.offset] for span, chunk in uses for _ in range(span.n)]
            offset = torch.tensor(rows).to(self._device, non_blocking=True)
        return ChunkRead(
            kv=kv,
            tokens=tokens_of([span for span, _ in uses], self._device),
            offset=offset,
            temperature=temperature,
            group=group,
            first=first,
            mask=mask,
        )

    def _weights(self) -> list[Weight]:
        weighted: dict[int, list[tuple[SequenceSlice, tuple[float, float]]]] = {}
        for span in self.spans:
            for group, each in _numbered(span.sequence):
                if group:
                    weighted.setdefault(group, []).append((span, each.weight))
        weights = []
        for group, uses in weighted.items():
            both = [weight for span, weight in uses for _ in range(span.n)]
            pairs = torch.tensor(both, dtype=torch.float32).to(self._device, non_blocking=True)
            tokens = tokens_of([span for span, _ in uses], self._device)
            weights.append(Weight(group=group, tokens=tokens, factor=pairs[:, 0], addend=pairs[:, 1]))
        return weights


def _numbered(sequence: TokenSequence) -> Iterator[tuple[int, ChunkGroup]]:
    """The sequence's groups with their numbers: 0 for all ordinary attention, then counted from 1."""
    weighed = 0
    for group in sequence.groups:
        if group.plain:
            yield 0, group
        else:
            weighed += 1
            yield weighed, group


def _seen(
    spans: Sequence[SequenceSlice], in_place: InPlace
) -> dict[tuple[int, float, int, int], list[tuple[SequenceSlice, PlacedChunk]]]:
    """(chunk KV, temperature, group, occurrence) -> its readers. A KV that a sequence reads twice occurs twice."""
    uses: dict[tuple[int, float, int, int], list[tuple[SequenceSlice, PlacedChunk]]] = {}
    for span in spans:
        times: Counter[tuple[int, float, int]] = Counter()
        for number, group in _numbered(span.sequence):
            for chunk in group.segments:
                if not chunk.kv.tokens or in_place.reads(span, chunk.kv):
                    continue
                key = (id(chunk.kv), group.temperature, number)
                uses.setdefault((*key, times[key]), []).append((span, chunk))
                times[key] += 1
    return uses


MOST_TOKENS = 512
"""The longest sequence that shares a call with others."""
PADDING = 1.25
"""The largest padded size of a batch, relative to its tokens."""


class PrefillBatch:
    """Sequences without KV of their own that read their first tokens, as one padded causal batch."""

    def __init__(self, spans: Sequence[SequenceSlice], device: torch.device) -> None:
        self._spans = spans
        self._longest = max(span.n for span in spans)
        self.tokens: Tokens
        """Indices of the tokens in the step, sequence by sequence."""
        self._gather: Tensor | None = None
        ends = [span.start + span.n for span in spans]
        if all(span.n == self._longest for span in spans) and ends[:-1] == [span.start for span in spans[1:]]:
            self.tokens = slice(spans[0].start, ends[-1])
            return
        places = torch.arange(self._longest)
        starts, n = torch.tensor([(span.start, span.n) for span in spans]).T[..., None]
        real = (places < n).flatten().nonzero()[:, 0]
        gather = (starts + places.minimum(n - 1)).flatten()  # (sequences · longest): padding repeats the last token
        result = torch.cat([gather, real, gather[real]]).to(device, non_blocking=True)
        self._gather, self._real, self.tokens = torch.split(result, [len(gather), len(real), len(real)])

    def attend(self, call: LayerCall) -> PartialAttention:
        """Append the new tokens and attend over them; the result covers `tokens`."""
        for span in self._spans:
            _append(span, call)
        query, key, value = (self._padded(states) for states in (call.query, call.key, call.value))
        partial = call.partial(query, key, value, mask="causal")
        out, lse = partial.out.transpose(0, 1).flatten(1, 2), partial.lse.transpose(0, 1).flatten(1, 2)
        if self._gather is not None:
            out, lse = out[:, self._real], lse[:, self._real]
        return PartialAttention(out[None], lse[None])

    def _padded(self, states: Tensor) -> Tensor:
        """`(1, heads, N, head_dim)` as `(sequences, heads, longest, head_dim)`."""
        which = self.tokens if self._gather is None else self._gather
        heads, head_dim = states.shape[1], states.shape[3]
        padded = states[0, :, which].reshape(heads, len(self._spans), self._longest, head_dim)
        return padded.transpose(0, 1)


def prefill_batches(
    spans: Iterable[SequenceSlice], window: int | None, device: torch.device
) -> tuple[list[PrefillBatch], list[SequenceSlice]]:
    """The slices to read together, longest first, and the remaining ones."""
    apart: list[SequenceSlice] = []
    others: list[SequenceSlice] = []
    for span in spans:
        short = 1 < span.n <= (MOST_TOKENS if window is None else min(window, MOST_TOKENS))
        placed = isinstance(span.sequence, RecomputedSequence)
        together = short and not span.sequence.cache.length and not placed
        (apart if together else others).append(span)
    batches: list[list[SequenceSlice]] = []
    tokens = 0
    for span in sorted(apart, key=lambda each: (-each.n, each.start)):
        if batches and batches[-1][0].n * (len(batches[-1]) + 1) <= PADDING * (tokens + span.n):
            batches[-1].append(span)
            tokens += span.n
        else:
            batches.append([span])
            tokens = span.n
    alone = {span.start for batch in batches if len(batch) == 1 for span in batch}
    others += [span for span in apart if span.start in alone]
    return [PrefillBatch(batch, device) for batch in batches if len(batch) > 1], others


class DecodeBatch:
    """Sequences that take a single token each and keep their KV in one arena block.

    `fixed`: it is used again for later tokens, after `advance`; then `packed` says whether that is possible.
    """

    def __init__(
        self,
        block: ArenaBlock,
        spans: Sequence[SequenceSlice],
        slots: Sequence[int],
        device: torch.device,
        *,
        fixed: bool = False,
    ) -> None:
        self._block, self._fixed = block, fixed
        self.packed = False
        order = sorted(range(len(slots)), key=lambda i: slots[i])
        starts = [spans[i].start for i in order]
        result = torch.tensor([[slots[i] for i in order], [spans[i].sequence.cache.length for i in order], starts])
        self._slots, self._places, tokens = result.to(device, non_blocking=True)
        self._height = max(slots) + 1
        self._whole = len(slots) == self._height
        self.tokens: Tokens = (
            slice(starts[0], starts[-1] + 1) if starts == list(range(starts[0], starts[0] + len(starts))) else tokens
        )
        """Indices of the tokens in the step, in the order of the slots."""
        lengths = [0] * self._height
        for span, slot in zip(spans, slots, strict=True):
            lengths[slot] = span.sequence.cache.length + 1
        self._lengths = lengths
        self._masks: dict[int | None, Tensor | None] = {}
        self._ends: tuple[Tensor, Tensor, Tensor] | None = None
        self._device = device

    def attend(self, call: LayerCall) -> PartialAttention:
        """Write the new tokens and attend over each sequence's own KV; as `PrefillBatch.attend`."""
        block = self._block
        block.make(call.layer, call.key, call.value)
        new_keys, new_values, queries = (
            t[0, :, self.tokens].transpose(0, 1) for t in (call.key, call.value, call.query)
        )
        block.write(call.layer, self._slots, self._places, new_keys, new_values)
        longest = max(self._lengths)
        keys, values = (t[call.layer][: self._height, :, :longest] for t in (block.keys, block.values))
        if varlen.takes(queries, keys, values, softcap=call.softcap):
            return self._packed(call, queries, block.capacity if self._fixed else longest)
        if not self._whole:  # slots in between without a token are computed too, and dropped
            spread = queries.new_zeros((self._height, *queries.shape[1:]))
            spread[self._slots] = queries
            queries = spread
        partial = call.partial(queries[:, :, None], keys, values, mask=self._mask(call.window))
        out, lse = partial.out[:, :, 0], partial.lse[:, :, 0]
        if not self._whole:
            out, lse = out[self._slots], lse[self._slots]
        return PartialAttention(out.transpose(0, 1)[None], lse.transpose(0, 1)[None])

    def _packed(self, call: LayerCall, queries: Tensor, longest: int) -> PartialAttention:
        """The same in one launch without a mask: one packed sequence per slot, of the length of its KV."""
        if self._ends is None:
            takes = [int(length > 0) for length in self._lengths]  # a slot in between takes no token
            starts = [self._block.capacity] * self._height
            taken, starts_at = (varlen.bounds(lengths, self._device) for lengths in (takes, starts))
            self._ends = taken, starts_at, varlen.bounds(self._lengths, self._device).diff()
            self.packed = True
        taken, starts_at, used = self._ends
        held = self._block.keys[call.layer], self._block.values[call.layer]
        keys, values = (t[: self._height].transpose(1, 2).flatten(0, 1) for t in held)
        out, lse = varlen.packed(
            queries,
            keys,
            values,
            (taken, starts_at),
            (1, longest),
            scale=call.scale,
            causal=True,
            window=call.window,
            used=used,
        )
        return PartialAttention(out.transpose(0, 1)[None], lse[None])

    def advance(self) -> None:
        """Count the last tokens; each sequence takes another one."""
        assert self._ends is not None
        self._places.add_(1)
        self._ends[2].add_(self._ends[0].diff())

    def _mask(self, window: int | None) -> Tensor | None:
        """`(slots, 1, m)`, True where a slot's single token sees; None when all see all."""
        if window not in self._masks:
            longest = max(self._lengths)
            firsts = [0 if window is None else max(0, length - window) for length in self._lengths]
            if min(self._lengths) == longest and not any(firsts):
                self._masks[window] = None
            else:
                # a slot without a token sees one key, to avoid NaN
                bounds = torch.tensor([firsts, [max(length, 1) for length in self._lengths]])
                first, end = bounds.to(self._device, non_blocking=True)[:, :, None, None]
                places = torch.arange(longest, device=self._device)
                self._masks[window] = (places >= first) & (places < end)
        return self._masks[window]


def decode_batches(
    spans: Sequence[SequenceSlice], device: torch.device, *, fixed: bool = False
) -> tuple[list[DecodeBatch], list[SequenceSlice]]:
    """The slices to read together, and the remaining ones; with `fixed`, all of them in `fixed` batches."""
    by_block: dict[int, list[tuple[SequenceSlice, ArenaBlock, int]]] = {}
    for span in spans:
        cache = span.sequence.cache
        place = cache.lies_in() if fixed or isinstance(cache, ArenaKVCache) else None
        if span.n == 1 and place and cache.length < place[0].capacity:
            by_block.setdefault(id(place[0].keys), []).append((span, *place))
    batches = []
    together: set[int] = set()
    for uses in by_block.values():
        slots = [slot for _, _, slot in uses]
        if fixed or (len(uses) > 1 and 2 * len(uses) > max(slots)):  # else most of what is read is unused
            batches.append(DecodeBatch(uses[0][1], [span for span, _, _ in uses], slots, device, fixed=fixed))
            together.update(span.start for span, _, _ in uses)
    return batches, [span for span in spans if span.start not in together]


class KVComplete(Exception):  # noqa: N818 - no error
    """Raised to end a pass early, when everything that it is for has been computed."""


class Step:
    """The new tokens of some sequences, each sequence at most once, and the attention of a forward pass over them.

    `counts[i]` tokens belong to `sequences[i]`. Their keys and values are appended to the sequences' own KV, but the
    tokens only count after `commit`. A `fixed` step, of sequences that take one token each, represents their next
    tokens after `advance`, if it `repeats`. With `last`, the index of the last layer that has keys of its own, the pass
    computes only keys and values: that layer raises `KVComplete` as soon as it has them. For sequences that all run
    `until` a layer, that layer raises it. `shared` maps each layer that reads another layer's keys to that layer.
    """

    def __init__(
        self,
        sequences: Sequence[TokenSequence],
        counts: Sequence[int],
        rotary: Rotary,
        device: torch.device,
        *,
        last: int | None = None,
        shared: Mapping[int, int] | None = None,
        fixed: bool = False,
    ) -> None:
        ends = list(itertools.accumulate(counts))
        self.spans = [
            SequenceSlice(sequence=sequence, start=end - n, n=n)
            for sequence, n, end in zip(sequences, counts, ends, strict=True)
        ]
        self._last = last
        self._shared = shared or {}
        self._rotary = rotary
        self._fixed = fixed
        self._plans: dict[tuple[torch.device, tuple[torch.dtype, bool, bool] | None], _DevicePlan] = {}
        self._in_place: dict[tuple[torch.dtype, bool, bool], InPlace] = {}
        self._single, self._many = 1 in counts, max(counts, default=0) > 1
        if device.type != "cpu":
            self._plans[device, None] = _DevicePlan(self.spans, rotary, device, fixed=fixed)

    @property
    def positions(self) -> list[int]:
        """The position of every new token."""
        return [position for span in self.spans for position in span.sequence.places(span.n)]

    @property
    def kept(self) -> list[int]:
        """Indices of the new tokens whose logits are wanted: the last token of each sequence."""
        return [span.start + index for span in self.spans for index in span.sequence.kept(span.n)]

    def commit(self) -> None:
        """Count the new tokens: all layers have them."""
        for span in self.spans:
            span.sequence.cache.commit(span.n)
            span.sequence.cache.shared = self._shared
            span.sequence.position += span.n

    @property
    def repeats(self) -> bool:
        """Whether the same kernels can compute the next tokens; known after all layers' attention."""
        return len(self._plans) == 1 and all(plan.repeats for plan in self._plans.values())

    def advance(self) -> None:
        """Replace the new tokens by those that follow the ones that were `commit`ted; happens only on the device."""
        for plan in self._plans.values():
            plan.advance()

    def attend(self, call: LayerCall) -> Tensor:
        """One layer's attention of the new tokens over their contexts and their own tokens.

        The call's tensors are `(1, heads, N, head_dim)`, rotated by the model for `positions`. Returns
        `(1, q_heads, N, head_dim)` in the query's dtype.
        """
        layer, query = call.layer, call.query
        if layer in self._shared:  # the layer that it shares with has written them already
            call = replace(call, layer=self._shared[layer])
        if layer == self._last:
            for span in self.spans:
                _append(span, call)
            self._observe(layer, call)
            raise KVComplete
        device_plan = self._plan_for(call)
        own, apart = device_plan.own(call)
        self._observe(layer, call)
        plan = device_plan.plan
        packs, reads = device_plan.packs(call)
        if not packs and not reads and not apart:
            return beside_sink(call.sink, own).to(query.dtype)
        rotation = device_plan.rotations.of(query, layer)
        whole = slice(0, plan.tokens)
        groups: dict[int, list[tuple[Tokens, PartialAttention]]] = {0: [(whole, own)]}
        for number, tokens, partial in apart:
            groups.setdefault(number, []).append((tokens, partial))
        for pack in packs:
            groups.setdefault(pack.group, []).extend(pack.attend(call, rotation))
        for read in reads:
            groups.setdefault(read.group, []).append((read.tokens, _read(read, call, rotation)))
        for weight in plan.weights:
            if weight.group in groups:  # otherwise the window excludes all its chunks
                group = merge_partials_of(groups.pop(weight.group), plan.tokens)
                entering = group.lse[..., weight.tokens] * weight.factor + weight.addend
                groups[0].append((weight.tokens, PartialAttention(group.out[:, :, weight.tokens], entering)))
        return beside_sink(call.sink, merge_partials_of(groups[0], plan.tokens)).to(query.dtype)

    def _observe(self, layer: int, call: LayerCall) -> None:
        for span in self.spans:
            if span.sequence.until is not None:
                span.sequence.observe(layer, call, span.tokens)

    def _plan_for(self, call: LayerCall) -> _DevicePlan:
        """The plan for all layers that are computed like this one; made for the first of them."""
        device, in_place, kind = call.query.device, None, None
        tensors = call.query, call.key, call.value
        if not self._fixed and not varlen.takes(*tensors):
            single = self._single and decode_takes(call)
            many = self._many and flash_takes(*tensors, call.softcap)
            kind = call.key.dtype, single, many
            if kind not in self._in_place:
                self._in_place[kind] = InPlace.of(self.spans, call.key.dtype, single=single, many=many)
            in_place = self._in_place[kind]
            if not in_place.spans:
                in_place = kind = None
        which = device, kind
        if which not in self._plans:
            self._plans[which] = _DevicePlan(self.spans, self._rotary, device, fixed=self._fixed, in_place=in_place)
        return self._plans[which]


class _DevicePlan:
    """A step on one device: its planned reads, its rotated queries and its masks."""

    def __init__(
        self,
        spans: Sequence[SequenceSlice],
        rotary: Rotary,
        device: torch.device,
        *,
        fixed: bool,
        in_place: InPlace | None = None,
    ) -> None:
        self.plan = BatchPlan(spans, device, in_place=in_place)
        self.rotations = QueryRotations(rotary, self.plan.offsets, device)
        self._in_place = [] if in_place is None else AttentionInPlace.of(in_place, rotary)
        others = [span for span in spans if in_place is None or span.start not in in_place.starts]
        self._decode, self._alone = decode_batches(others, device, fixed=fixed)
        self._device = device
        self._prefill: dict[int | None, tuple[list[PrefillBatch], list[SequenceSlice]]] = {}
        self._packs: dict[int | None, tuple[list[PagedReads], list[ChunkRead]]] = {}

    @property
    def repeats(self) -> bool:
        """As `Step.repeats`: not with windows that move over chunks, or masks made for one length."""
        return not self._alone and all(batch.packed for batch in self._decode) and not self.plan.windowed

    def advance(self) -> None:
        """As `Step.advance`."""
        for batch in self._decode:
            batch.advance()

    def packs(self, call: LayerCall) -> tuple[list[PagedReads], Sequence[ChunkRead]]:
        """The layer's reads that are one launch each, and the remaining ones. A packed launch reads one block."""
        if not varlen.takes(call.query, call.key, call.value, softcap=call.softcap):
            return [], self.plan.reads(call.window)
        if call.window not in self._packs:
            by_pack: dict[tuple[int, float, int], list[ChunkRead]] = {}
            others: list[ChunkRead] = []
            for read in self.plan.reads(call.window):
                if read.kv.pages is None or read.first or read.mask is not None:
                    others.append(read)
                else:
                    by_pack.setdefault((id(read.kv.pages.block), read.temperature, read.group), []).append(read)
            self._packs[call.window] = [self._pack(reads) for reads in by_pack.values()], others
        return self._packs[call.window]

    def _pack(self, reads: Sequence[ChunkRead]) -> PagedReads:
        paged = []
        for read in reads:
            pages, tokens = read.kv.pages, read.tokens
            assert pages is not None
            count = tokens.stop - tokens.start if isinstance(tokens, slice) else len(tokens)
            row = self.plan.row(read.offset) if isinstance(read.offset, int) else read.offset
            split = varlen.split_length(read.kv.tokens, len(reads) * read.kv.keys[0].shape[0], count)
            for start in range(0, read.kv.tokens, split):
                first_key, keys = PAGE * pages.first + start, min(split, read.kv.tokens - start)
                paged.append(
                    PagedRead(block=pages.block, first_key=first_key, keys=keys, tokens=tokens, count=count, row=row)
                )
        return PagedReads(paged, reads[0].temperature, reads[0].group, self._device)

    def own(self, call: LayerCall) -> tuple[PartialAttention, list[tuple[int, Tokens, PartialAttention]]]:
        """Attention of every new token over its own sequence's tokens; if all its KV is read in place, also over the
        chunks of ordinary attention. Its weighted groups are then the second result, as (number, tokens, partial).
        """
        if call.window not in self._prefill:
            self._prefill[call.window] = prefill_batches(self._alone, call.window, self._device)
        prefill, alone = self._prefill[call.window]
        partials: list[tuple[Tokens, PartialAttention]] = [(batch.tokens, batch.attend(call)) for batch in prefill]
        partials += [(batch.tokens, batch.attend(call)) for batch in self._decode]
        for span in alone:
            if isinstance(span.sequence, RecomputedSequence):
                partial = _recomputed_partial(span.sequence, span, call)
            else:
                partial = _own_partial(span, call)
            partials.append((span.tokens, partial))
        apart: list[tuple[int, Tokens, PartialAttention]] = []
        for each in self._in_place:
            (_, _, whole), *more = each.attend(call)
            partials.append((each.tokens, whole))
            apart += more
        return _merge_by_token(partials, call.query), apart


def _append(span: SequenceSlice, call: LayerCall) -> tuple[Tensor, Tensor]:
    """Add a sequence's new tokens to its own KV, and return all its keys and values of the layer."""
    return span.sequence.append(call, span.tokens)


def _read(read: ChunkRead, call: LayerCall, rotation: QueryRotation | None) -> PartialAttention:
    """The partial attention over one chunk, for all tokens that see it."""
    if rotation is None or (isinstance(read.offset, int) and read.offset == 0):
        query = call.query[:, :, read.tokens]
    else:
        query = rotation.by(read.offset, read.tokens)
    key, value = read.kv.keys[call.layer][None], read.kv.values[call.layer][None]
    if read.first:
        key, value = key[:, :, read.first :], value[:, :, read.first :]
    return call.partial(query, key, value, temperature=read.temperature, mask=read.mask)


def _own_partial(span: SequenceSlice, call: LayerCall) -> PartialAttention:
    """Causal attention of a sequence's new tokens over all its own tokens."""
    keys, values = _append(span, call)
    query, window, n, m = call.query[:, :, span.tokens], call.window, span.n, keys.shape[2]
    if varlen.takes(query, keys, values, softcap=call.softcap):
        return PartialAttention(*varlen.causal(query, keys, values, scale=call.scale, window=window))
    if n == 1:
        first = 0 if window is None else max(0, m - window)
        return call.partial(query, keys[:, :, first:], values[:, :, first:])
    if window is None or m <= window:
        new = call.partial(query, call.key[:, :, span.tokens], call.value[:, :, span.tokens], mask="causal")
        if n == m:
            return new
        before = call.partial(query, keys[:, :, : m - n], values[:, :, : m - n])
        return merge_partials([before, new])
    first = max(0, m - n - window + 1)
    behind = torch.arange(m - n, m, device=query.device)[:, None] - torch.arange(first, m, device=query.device)
    return call.partial(query, keys[:, :, first:], values[:, :, first:], mask=(behind >= 0) & (behind < window))


ROWS = 256
"""Recomputed tokens whose keys are read in one call, without a mask for the keys that all of them see."""


def _recomputed_partial(sequence: RecomputedSequence, span: SequenceSlice, call: LayerCall) -> PartialAttention:
    """Attention of recomputed tokens over the context, each up to its own position."""
    keys, values = _append(span, call)
    token_places, places = sequence.places(span.n), sequence.index(span.n, keys.device)
    all_keys, partials = torch.arange(keys.shape[2], device=keys.device), []
    for start in range(0, span.n, ROWS):
        some = slice(start, min(start + ROWS, span.n))
        query = call.query[:, :, span.start + some.start : span.start + some.stop]
        # all of them see the keys before `common`, and none those from `end` on
        common, end = token_places[start] + 1, token_places[some.stop - 1] + 1
        first = common if call.window is None else max(0, common - call.window)
        behind = places[some, None] - all_keys[first:end]
        seen = behind >= 0 if call.window is None else (behind >= 0) & (behind < call.window)
        partial = call.partial(query, keys[:, :, first:end], values[:, :, first:end], mask=seen)
        if call.window is None:
            partial = merge_partials([call.partial(query, keys[:, :, :first], values[:, :, :first]), partial])
        partials.append(partial)
    return PartialAttention(
        torch.cat([each.out for each in partials], 2), torch.cat([each.lse for each in partials], 2)
    )


def _merge_by_token(partials: Sequence[tuple[Tokens, PartialAttention]], query: Tensor) -> PartialAttention:
    """Merge partial attentions of disjoint tokens into one of all tokens, in the widest of their types."""
    if len(partials) == 1 and isinstance(partials[0][0], slice):
        return partials[0][1]
    batch, q_heads, tokens, _ = query.shape
    dtype = functools.reduce(torch.promote_types, (partial.out.dtype for _, partial in partials))
    out = query.new_empty((batch, q_heads, tokens, partials[0][1].out.shape[-1]), dtype=dtype)
    lse = query.new_empty((batch, q_heads, tokens), dtype=torch.float32)
    for which, partial in partials:
        out[:, :, which], lse[:, :, which] = partial.out.to(dtype), partial.lse
    return PartialAttention(out, lse)


def beside_sink(sink: Tensor | None, partial: PartialAttention) -> Tensor:
    """The output after a sink has taken its share of the softmax: a partial attention of lse `sink` and output 0."""
    if sink is None:
        return partial.out
    share = torch.sigmoid(partial.lse - sink.float()[:, None])  # (batch, q_heads, n)
    return partial.out.float() * share[..., None]
