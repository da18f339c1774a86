"""APB: one long document encoded in blocks (APB §3, Algorithm 2).

`BlockLayout` cuts the document: which block holds which tokens, where they are placed and what they see (§3.2-3.3).
`LongDocument` encodes a block. `BlockForward` is its attention: over prefix and anchor, over what earlier blocks pass
on, and over itself (§3.6, Eq. 2). Keys are rotated for their final positions, so no query is rotated. What is passed on
has no queries and takes part in attention alone. In each layer a block chooses what it passes on, exchanges it, then
attends; so blocks may run one after another (`SequentialExecutor`), or in parallel on several ranks
(`ragkv.ranks`), with the same tensor operations and the same bits.

`document_for_question` is the variant whose anchor holds the question (§3.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ragkv.attention.batch import KVComplete, beside_sink
from ragkv.attention.kv import ChunkKV
from ragkv.attention.partial import LayerCall, PartialAttention, merge_partials
from ragkv.attention.sequence import KVCache
from ragkv.errors import ConfigError
from ragkv.model.apb.compressors import (
    AttentionScore,
    BlockTokens,
    Compressor,
    Heads,
    KeyNorm,
    Random,
    chosen,
    load_heads,
)
from ragkv.model.checkpoint import HEADS

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel

WINDOW_STEP = 256
"""Tokens that read their sliding window at a time."""
MERGE_STEP = 512
"""Tokens that are merged at a time, so that their fp32 values stay in a processor's cache."""


class PassedKV(NamedTuple):
    """C_h, what a block passes on in one layer: keys, values `(kv_heads, p, head_dim)`, positions `(kv_heads, p)`."""

    key: Tensor
    value: Tensor
    positions: Tensor


class PassingExchange(Protocol):
    """How the KV that a block passes on reaches the later ones."""

    def gather_earlier(self, block: int, layer: int, mine: PassedKV) -> Sequence[PassedKV]:
        """Publish what `block` passes on in `layer`; returns what all earlier blocks pass on, first to last (AllGather,
        §3.5).

        Called once for each block and each layer that has keys of its own; a block's layers come in order.
        """


def gathered(key: Tensor, value: Tensor, which: Tensor, position: int) -> PassedKV:
    """The tokens `which` `(kv_heads, p)` of a block that begins at `position`, with their positions."""

    def taken(states: Tensor) -> Tensor:
        return states.gather(1, which[..., None].expand(-1, -1, states.shape[-1]))

    return PassedKV(taken(key), taken(value), which + position)


class AnchorAttention:
    """Causal attention of a token sequence at `position` that also sees `before`: KV placed where it was encoded."""

    def __init__(self, model: LanguageModel, before: Sequence[ChunkKV], position: int) -> None:
        self._before = before
        self._position = position
        self._last = model.last_own
        self._shared = model.shared
        self.cache = KVCache(reserve=0)

    def attend(self, call: LayerCall) -> Tensor:
        """As `ragkv.attention.batch.Step.attend`, on tensors `(1, heads, n, head_dim)`."""
        held = self._shared.get(call.layer, call.layer)
        if held == call.layer:
            self.cache.append(call.layer, call.key, call.value)
            self.layer_known(call)
        if call.layer == self._last:
            raise KVComplete
        part = _with_context(_own_partial(call), call, *self._seen(held, call.key), position=self._position)
        return beside_sink(call.sink, part).to(call.query.dtype)

    def layer_known(self, call: LayerCall) -> None:
        """Called when a layer with keys of its own has computed them."""

    def passed(self, layer: int) -> Sequence[PassedKV]:
        """What earlier blocks pass on in this layer."""
        return ()

    def done(self, tokens: int) -> ChunkKV:
        """The KV of all tokens, after the pass."""
        self.cache.commit(tokens)
        self.cache.shared = self._shared
        return self.cache.chunk_kv(encoded_at=self._position)

    def _seen(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values `(1, kv_heads, m, head_dim)` that all tokens see, and the keys' positions `(kv_heads, m)`."""
        heads = like.shape[1]
        places = [
            torch.arange(kv.encoded_at, kv.encoded_at + kv.tokens, device=like.device).expand(heads, -1)
            for kv in self._before
        ]
        seen = [PassedKV(kv.keys[layer], kv.values[layer], at) for kv, at in zip(self._before, places, strict=True)]
        seen += self.passed(layer)
        if not seen:
            nothing = like[0, :, :0]
            return nothing[None], nothing[None], torch.empty((heads, 0), dtype=torch.long, device=like.device)
        keys, values, positions = (torch.cat(each, 1) for each in zip(*seen, strict=True))
        return keys[None], values[None], positions


class BlockForward(AnchorAttention):
    """The attention of one block; `compressor` chooses at most `most` of its `candidates` per kv head to pass on."""

    def __init__(
        self,
        model: LanguageModel,
        block: int,
        before: Sequence[ChunkKV],
        position: int,
        exchange: PassingExchange,
        compressor: Compressor,
        *,
        candidates: range,
        most: int,
    ) -> None:
        super().__init__(model, before, position)
        self._block = block
        self._exchange = exchange
        self._compressor = compressor
        self._candidates = candidates
        self._most = most
        self._rotary = model.rotary
        self._passed: dict[int, Sequence[PassedKV]] = {}
        self.chosen: dict[int, Tensor] = {}
        """Layer -> the block's tokens that are passed on, `(kv_heads, p)`."""

    def layer_known(self, call: LayerCall) -> None:
        which = torch.empty((call.key.shape[1], 0), dtype=torch.long, device=call.key.device)
        if self._most:
            which = chosen(self._compressor, self._local(call), self._most) + self._candidates.start
        self.chosen[call.layer] = which
        kept = gathered(call.key[0], call.value[0], which, self._position)
        self._passed[call.layer] = self._exchange.gather_earlier(self._block, call.layer, kept)

    def passed(self, layer: int) -> Sequence[PassedKV]:
        return self._passed[layer]

    def _local(self, call: LayerCall) -> BlockTokens:
        layer, which = call.layer, slice(self._candidates.start, self._candidates.stop)
        q, k, v = call.query[:, :, which], call.key[:, :, which], call.value[:, :, which]
        position = self._position + which.start

        def unrotated() -> tuple[Tensor, Tensor]:
            back = -torch.arange(position, position + k.shape[2], device=k.device)[None]
            return self._rotary.rotate(q, layer, back)[0], self._rotary.rotate(k, layer, back)[0]

        return BlockTokens(
            layer=layer, position=position, query=q[0], key=k[0], value=v[0], scale=call.scale, unrotated=unrotated
        )


def _own_partial(call: LayerCall) -> PartialAttention:
    """Causal attention of a sequence over itself."""
    query, key, value, window = call.query, call.key, call.value, call.window
    n = key.shape[2]
    if window is None or n <= window:
        return call.partial(query, key, value, mask="causal")
    parts = []
    for start in range(0, n, WINDOW_STEP):
        end, first = min(start + WINDOW_STEP, n), max(0, start - window + 1)
        behind = torch.arange(start, end, device=key.device)[:, None] - torch.arange(first, end, device=key.device)
        mask = (behind >= 0) & (behind < window)
        parts.append(call.partial(query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], mask=mask))
    return PartialAttention(torch.cat([p.out for p in parts], 2), torch.cat([p.lse for p in parts], 2))


def _with_context(
    own: PartialAttention, call: LayerCall, keys: Tensor, values: Tensor, positions: Tensor, *, position: int
) -> PartialAttention:
    """`own` merged with what all tokens see; with a sliding window, only with keys near enough to each token."""
    query, window = call.query, call.window
    if window is None:
        return _merged(call.partial(query, keys, values), own) if keys.shape[2] else own
    heads, n = keys.shape[1], query.shape[2]
    near = (positions > position - window).any(0)
    if not bool(near.any()):
        return own
    keys, values, positions = keys[:, :, near], values[:, :, near], positions[:, near]
    reach = min(n, int(positions.max()) + window - position)  # tokens from here on see none of these keys
    if reach < 1:
        return own
    behind = torch.arange(position, position + reach, device=keys.device)[:, None] - positions[:, None, :]
    # (kv_heads, g, reach, head_dim): a mask for each kv head
    grouped = query[0, :, :reach].reshape(heads, -1, reach, query.shape[-1])
    part = call.partial(grouped, keys[0, :, None], values[0, :, None], mask=behind < window)
    seen = PartialAttention(part.out.flatten(0, 1)[None], part.lse.flatten(0, 1)[None])
    merged = merge_partials([seen, PartialAttention(own.out[:, :, :reach], own.lse[:, :, :reach])])
    if reach == n:
        return merged
    return PartialAttention(
        torch.cat([merged.out, own.out[:, :, reach:].float()], 2), torch.cat([merged.lse, own.lse[:, :, reach:]], 2)
    )


def _merged(seen: PartialAttention, own: PartialAttention) -> PartialAttention:
    """`merge_partials` of the two, a slice of the tokens at a time."""
    tokens = own.lse.shape[-1]
    if tokens <= 2 * MERGE_STEP:
        return merge_partials([seen, own])
    out = torch.empty_like(own.out, dtype=torch.float32)
    lse = torch.empty_like(own.lse)
    for start in range(0, tokens, MERGE_STEP):
        at = slice(start, start + MERGE_STEP)
        pair = [PartialAttention(part.out[:, :, at], part.lse[:, :, at]) for part in (seen, own)]
        merged = merge_partials(pair)
        out[:, :, at], lse[:, :, at] = merged.out, merged.lse
    return PartialAttention(out, lse)


K = 1024
PLAIN_BELOW = 32 * K
"""Documents with fewer tokens use plain attention, which is exact: APB gains less on them (APB, Limitations)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLengths:
    """l_b, l_a and l_p: the tokens of a block, of an anchor (the document's head), and of what a block passes on.

    ConfigError for an anchor or a passing length that is longer than a block.
    """

    block: int
    anchor: int
    passing: int

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ConfigError(f"apb: a block holds at least 1 token, not {self.block}.")
        for name, value in (("anchor", self.anchor), ("passing", self.passing)):
            if not 0 <= value <= self.block:
                raise ConfigError(
                    f"apb: the {name} length must be from 0 to that of a block ({self.block} tokens), not {value}."
                )


TABLE = {
    32 * K: BlockLengths(block=4 * K, anchor=K, passing=K // 2),
    64 * K: BlockLengths(block=8 * K, anchor=2 * K, passing=K),
    128 * K: BlockLengths(block=16 * K, anchor=4 * K, passing=2 * K),
    256 * K: BlockLengths(block=32 * K, anchor=8 * K, passing=4 * K),
    512 * K: BlockLengths(block=64 * K, anchor=8 * K, passing=8 * K),
}
"""The paper's hyper-parameters by the length of the document in tokens (APB, Appendix B)."""


def lengths_for(tokens: int) -> BlockLengths | None:
    """The paper's lengths for a document of `tokens` tokens; None where plain attention is the better choice."""
    if tokens < PLAIN_BELOW:
        return None
    return TABLE[next((length for length in TABLE if tokens <= length), max(TABLE))]


def star(block: int) -> BlockLengths:
    """Star Attention: the whole first block is the anchor, and nothing is passed on."""
    return BlockLengths(block=block, anchor=block, passing=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """A document of `tokens` tokens in blocks, from position `start` on, which is the length of the prompt's prefix.

    Every block sees the prefix. The anchor is the `question`'s tokens, if any, and the document's first tokens; it is
    placed from `start` on, while blocks keep their positions in the document. Only the last block may be shorter.
    """

    tokens: int
    lengths: BlockLengths
    start: int = 0
    question: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError("a document without tokens has no blocks")

    @property
    def blocks(self) -> int:
        """H, the number of blocks."""
        return -(-self.tokens // self.lengths.block)

    @property
    def end(self) -> int:
        """Position after the document, where a question begins."""
        return self.start + self.tokens

    @property
    def anchor_head(self) -> int:
        """How many of the document's first tokens are in the anchor."""
        return min(self.lengths.anchor, self.tokens)

    @property
    def anchor(self) -> int:
        """Tokens of the anchor, which all blocks but the first see."""
        return self.question + self.anchor_head

    def span(self, block: int) -> range:
        """The document's tokens in a block, counted from 0."""
        first = block * self.lengths.block
        return range(first, min(first + self.lengths.block, self.tokens))

    def position(self, block: int) -> int:
        """The position of the block's first token."""
        return self.start + block * self.lengths.block

    def candidates(self, block: int) -> range:
        """The block's tokens, from 0, that it may pass on: not those that all others already see in the anchor."""
        return range(self.anchor_head if block == 0 else 0, len(self.span(block)))

    def passed(self, block: int) -> int:
        """The number of tokens that a block passes on, per layer and kv head."""
        return min(self.lengths.passing, len(self.candidates(block)))

    def passing(self, block: int) -> int:
        """The number of tokens that a block receives from all earlier blocks."""
        return sum(self.passed(before) for before in range(block))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedBlock:
    """An encoded block: its KV, and layer -> the tokens that it passes on, `(kv_heads, p)`.

    A layer that reads another's keys passes nothing on.
    """

    kv: ChunkKV
    chosen: tuple[Tensor, ...]

    def kept(self, layer: int) -> PassedKV:
        """C_h in this layer, taken from the block's own KV."""
        return gathered(self.kv.keys[layer], self.kv.values[layer], self.chosen[layer], self.kv.encoded_at)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LongDocument:
    """A document's tokens, its layout, and the model and compressor that encode it.

    `prefix` is the KV of the `layout.start` tokens before the document; the anchor begins with `question_ids`.
    `anchor_kv` is the anchor's KV if it is known already.
    """

    model: LanguageModel
    layout: BlockLayout
    ids: tuple[int, ...]
    compressor: Compressor
    prefix: ChunkKV | None = None
    question_ids: tuple[int, ...] = ()
    anchor_kv: ChunkKV | None = None

    def __post_init__(self) -> None:
        prefix = 0 if self.prefix is None else self.prefix.tokens
        if (self.layout.tokens, self.layout.start, self.layout.question) != (
            len(self.ids),
            prefix,
            len(self.question_ids),
        ):
            raise ValueError("the layout is of another document, prefix or question")

    def anchor(self) -> ChunkKV | None:
        """The anchor's KV, which sees the prefix and itself: an ordinary chunk after the prefix, the same for all
        blocks.

        None if no block sees it. Every process that runs blocks computes it, in the same way.
        """
        head = (*self.question_ids, *self.ids[: self.layout.anchor_head])
        if self.anchor_kv is not None or self.layout.blocks < 2 or not head:
            return self.anchor_kv
        [made] = self.model.encode([head], prefix=self.prefix)
        return made

    def encode(self, block: int, anchor: ChunkKV | None, exchange: PassingExchange) -> EncodedBlock:
        """Encode one block; `exchange` sends and receives what is passed on, once per layer."""
        layout, model = self.layout, self.model
        seen = (self.prefix, anchor if block else None)
        span = layout.span(block)
        forward = BlockForward(
            model,
            block,
            [kv for kv in seen if kv is not None],
            layout.position(block),
            exchange,
            self.compressor,
            candidates=layout.candidates(block),
            most=layout.passed(block),
        )
        model.through(self.ids[span.start : span.stop], layout.position(block), forward)
        nothing = torch.empty((0, layout.passed(block)), dtype=torch.long)
        chosen = tuple(forward.chosen.get(layer, nothing) for layer in range(model.layers))
        return EncodedBlock(kv=forward.done(len(span)), chosen=chosen)


class _QueryRecorder(AnchorAttention):
    """Records the queries of every layer."""

    def __init__(self, model: LanguageModel, before: Sequence[ChunkKV], position: int) -> None:
        super().__init__(model, before, position)
        self.queries: dict[int, Tensor] = {}

    def layer_known(self, call: LayerCall) -> None:
        self.queries[call.layer] = call.query


def query_aware_compressor(
    model: LanguageModel, question_ids: tuple[int, ...], prefix: ChunkKV | None, *, position: int
) -> AttentionScore:
    """The compressor that scores by this question at `position`; costs one short pass over prefix and question."""
    start = 0 if prefix is None else prefix.tokens
    recorder = _QueryRecorder(model, [] if prefix is None else [prefix], start)
    model.through(question_ids, start, recorder)
    rotated = {}
    for layer, query in recorder.queries.items():
        further = torch.full((1, query.shape[2]), position - start, device=query.device)
        rotated[layer] = model.rotary.rotate(query, layer, further)[0]
    return AttentionScore(rotated, " ".join(map(str, question_ids)))


def compressor_for(
    name: str,
    model: LanguageModel,
    *,
    question_ids: tuple[int, ...] = (),
    prefix: ChunkKV | None = None,
    position: int = 0,
) -> Compressor:
    """The compressor called `name` (`ragkv.engines.apb.APBConfig`); the question, if any, will be at `position`.

    ConfigError for the attention of a question if there is none, ModelLoadError for heads that do not fit.
    """
    beside = model.checkpoint.local and Path(model.checkpoint.location, HEADS).exists()
    if name == "heads" or (name == "auto" and beside):
        return model.companion(_heads)
    if name == "attention" and not question_ids:
        raise ConfigError(
            'apb: compressor = "attention" needs the question, and stored blocks are made without one; use '
            'key-norm or heads, or ask about the file itself with "ragkv query --context".'
        )
    if name == "random":
        return Random()
    if name == "key-norm" or not question_ids:
        return KeyNorm()
    return query_aware_compressor(model, question_ids, prefix, position=position)


def _heads(model: LanguageModel) -> Heads:
    return load_heads(Path(model.checkpoint.location, HEADS), model)


class BlockExecutor(Protocol):
    """Runs blocks. The results are the same bits on any hardware layout."""

    def run(self, long_document: LongDocument) -> Iterator[EncodedBlock]:
        """All blocks of the document in order."""


class SequentialExchange:
    """The exchange of blocks that run one after another: it keeps what is passed on for later blocks."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], PassedKV] = {}

    def gather_earlier(self, block: int, layer: int, mine: PassedKV) -> Sequence[PassedKV]:
        self._kept[block, layer] = mine
        return [self._kept[before, layer] for before in range(block)]

    def provide(self, block: int, made: EncodedBlock, layers: Sequence[int]) -> None:
        """Add what an encoded block passes on."""
        for layer in layers:
            self._kept[block, layer] = made.kept(layer)


class SequentialExecutor:
    """One process, block after block: a block needs only those before it (the paper's single-host case)."""

    def run(
        self, long_document: LongDocument, known: Mapping[int, EncodedBlock] | None = None
    ) -> Iterator[EncodedBlock]:
        """The blocks in order; `known` ones are not encoded again."""
        known = known or {}
        exchange = SequentialExchange()
        layers = [layer for layer in range(long_document.model.layers) if layer not in long_document.model.shared]
        anchor: ChunkKV | None = None
        for block in range(long_document.layout.blocks):
            encoded = known.get(block)
            if encoded is not None:
                exchange.provide(block, encoded, layers)
            else:
                anchor = long_document.anchor() if anchor is None and block else anchor
                encoded = long_document.encode(block, anchor, exchange)
            yield encoded


class BlockSettings(Protocol):
    """The part of `ragkv.engines.apb.APBConfig` that encoding needs."""

    @property
    def compressor(self) -> str: ...

    @property
    def preset(self) -> str: ...

    @property
    def question(self) -> bool: ...

    def lengths(self, tokens: int) -> BlockLengths | None: ...


def document_for_question(
    model: LanguageModel,
    settings: BlockSettings,
    ids: tuple[int, ...],
    question_ids: tuple[int, ...],
    prefix: ChunkKV | None,
) -> LongDocument | None:
    """The text `ids` after `prefix`, cut and compressed by `settings`; None if one block holds it."""
    lengths = settings.lengths(len(ids))
    if lengths is None or len(ids) <= lengths.block:
        return None
    start = 0 if prefix is None else prefix.tokens
    compressor = compressor_for(
        settings.compressor, model, question_ids=question_ids, prefix=prefix, position=start + len(ids)
    )
    head = question_ids if settings.question and settings.preset == "apb" else ()
    layout = BlockLayout(tokens=len(ids), lengths=lengths, start=start, question=len(head))
    return LongDocument(model=model, layout=layout, ids=ids, compressor=compressor, prefix=prefix, question_ids=head)
