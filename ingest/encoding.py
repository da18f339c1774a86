"""How an ingest encodes chunks: with what precedes them in their document, and long documents in blocks.

The `context` encoding: text is cut at the edges of chunks, but a pronoun, "the company" or a table under a heading
refer to what came before. With `[encoding] context = N` a chunk is encoded after the prompt's prefix, a line with its
document's title and headings, and up to N tokens that precede it in its document; only its own KV is kept. This is the
offline stage of FusionRAG (arXiv 2601.12904) with the chunk's own document in place of similar chunks, so no KV
contains another document's text. Neither the stored bytes nor the work of a question change.

A long document as blocks (APB): the document's tokens are those of all its chunks, in order. They are cut at multiples
of the block length, whatever the chunks are, so appended text only changes the last block and adds new ones. A document
of one block is stored as an ordinary chunk. A longer one stores all its blocks with the KV that they pass on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ragkv.ingest.parser import HEADING_SEPARATOR
from ragkv.model.prompt import Prompt, Tokens
from ragkv.store import KVIdentity
from ragkv.store.record import PASSED_ON, pack_ids, unpack_ids
from ragkv.types import Chunk, Encoding

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.engines.apb import APBConfig
    from ragkv.model.apb.compressors import Compressor
    from ragkv.model.apb.document import BlockLayout, EncodedBlock
    from ragkv.model.language_model import LanguageModel

Load = Callable[[KVIdentity], "ChunkKV | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """One document: its tokens, how they are cut, the identities of its blocks and of its anchor.

    `owners[h]` is the id of the chunk with the first token of block h, which needs the block's KV. `short`: the
    document has several chunks but too few tokens to be cut, so it is one block.
    """

    ids: tuple[int, ...]
    layout: BlockLayout
    identities: tuple[KVIdentity, ...]
    anchor: KVIdentity | None
    owners: tuple[str, ...]
    short: bool = False

    @property
    def all(self) -> dict[KVIdentity, str]:
        """All records of the document, each with the chunk that needs it."""
        found = dict(zip(self.identities, self.owners, strict=True))
        return found if self.anchor is None else {self.anchor: self.owners[0], **found}


def plan_blocks(
    chunks: Sequence[Chunk], config: APBConfig, compressor: Compressor, *, model: str, prefix_ids: tuple[int, ...]
) -> Blocks:
    """The blocks of a document, given all its chunks, for the model with the fingerprint `model`.

    A block's identity is a hash of everything that it depends on: the prompt's prefix, the lengths, the compressor, the
    tokens of the anchor and of all blocks before it. The number of ranks that encoded it does not matter.
    """
    from ragkv.model.apb.document import BlockLayout, BlockLengths

    ids = tuple(i for chunk in chunks for i in chunk.token_ids)
    lengths = config.lengths(len(ids))
    short = lengths is None
    if lengths is None or len(chunks) == 1:
        lengths = BlockLengths(block=len(ids), anchor=0, passing=0)
    layout = BlockLayout(tokens=len(ids), lengths=lengths, start=len(prefix_ids))
    owners = _owners(chunks, layout)
    if len(chunks) == 1:
        own = KVIdentity(model=model, encoding=Encoding.PREFIXED, prefix_ids=prefix_ids, chunk_ids=ids)
        return Blocks(ids=ids, layout=layout, identities=(own,), anchor=None, owners=owners)
    head = ids[: layout.anchor_head] if layout.blocks > 1 else ()
    digest = hashlib.blake2b(digest_size=32, person=b"ragkv long block")
    cut = (lengths.block, lengths.anchor, lengths.passing) if layout.blocks > 1 or not short else ()
    for field in (pack_ids(cut), compressor.identity().encode(), pack_ids(prefix_ids), pack_ids(head)):
        digest.update(len(field).to_bytes(8, "little") + field)

    def identity(what: bytes, position: int, chunk_ids: tuple[int, ...]) -> KVIdentity:
        saw = digest.copy()
        saw.update(what)
        return KVIdentity(
            model=model,
            encoding=Encoding.LONG,
            prefix_ids=(*unpack_ids(saw.digest()), position),
            chunk_ids=chunk_ids,
        )

    anchor = identity(b"anchor", layout.start, head) if head else None
    identities = []
    for block in range(layout.blocks):
        span = layout.span(block)
        held = ids[span.start : span.stop]
        identities.append(identity(b"block", layout.position(block), held))
        digest.update(pack_ids(held))
    return Blocks(ids=ids, layout=layout, identities=tuple(identities), anchor=anchor, owners=owners, short=short)


def make_blocks(
    blocks: Blocks,
    missing: Sequence[KVIdentity],
    model: LanguageModel,
    compressor: Compressor,
    prefix: ChunkKV | None,
    load: Load,
) -> Iterator[tuple[KVIdentity, ChunkKV]]:
    """Encode the `missing` blocks one after another; `load` returns a stored one or None."""
    if blocks.identities[0].encoding is Encoding.PREFIXED:
        [made] = model.encode([blocks.ids], prefix=prefix)
        yield blocks.identities[0], made
        return
    from ragkv.model.apb.document import LongDocument, SequentialExecutor

    anchor = None if blocks.anchor is None or blocks.anchor in missing else load(blocks.anchor)
    long_document = LongDocument(
        model=model, layout=blocks.layout, ids=blocks.ids, compressor=compressor, prefix=prefix, anchor_kv=anchor
    )
    if blocks.anchor is not None and anchor is None:
        anchor = long_document.anchor()
        assert anchor is not None
        long_document = replace(long_document, anchor_kv=anchor)
        if blocks.anchor in missing:
            yield blocks.anchor, anchor
    wanted = [block for block, identity in enumerate(blocks.identities) if identity in missing]
    last = max(wanted, default=-1)
    known = _Stored(blocks, [block for block in range(last) if block not in wanted], model, load)
    for block, encoded in zip(range(last + 1), SequentialExecutor().run(long_document, known), strict=False):
        if block in wanted:
            yield blocks.identities[block], with_choice(encoded)


def bare(kv: ChunkKV) -> ChunkKV:
    """A stored block without its choice of passed tokens, which no question reads."""
    return replace(kv, states=()) if kv.states else kv


class _Stored(Mapping[int, "EncodedBlock"]):
    """Stored blocks by number, loaded on access; an unreadable one is missing."""

    def __init__(self, blocks: Blocks, there: Sequence[int], model: LanguageModel, load: Load) -> None:
        self._blocks, self._there, self._model, self._load = blocks, frozenset(there), model, load

    def __getitem__(self, block: int) -> EncodedBlock:
        if block not in self._there:
            raise KeyError(block)
        kv = self._load(self._blocks.identities[block])
        found = None if kv is None else stored_block(kv, self._blocks.layout.passed(block), self._model)
        if found is None:
            raise KeyError(block)
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self._there)

    def __len__(self) -> int:
        return len(self._there)


def with_choice(block: EncodedBlock) -> ChunkKV:
    """A block's KV with its choice of passed tokens, in its stored form."""
    import torch

    from ragkv.attention.kv import State

    states = tuple(
        State(layer, PASSED_ON, which.to(torch.int32)) for layer, which in enumerate(block.chosen) if which.numel()
    )
    return replace(block.kv, states=states)


def stored_block(kv: ChunkKV, most: int, model: LanguageModel) -> EncodedBlock | None:
    """A stored block; None unless it names `most` of its own tokens for every kv head of every layer.

    The store may come from an untrusted source, so the numbers are checked.
    """
    import torch

    from ragkv.model.apb.document import EncodedBlock

    choices = {state.layer: state.value for state in kv.states if state.name == PASSED_ON}
    chosen = []
    for layer, key in enumerate(kv.keys):
        heads = 0 if layer in model.shared else key.shape[0]
        which = choices.get(layer, torch.empty((heads, 0), dtype=torch.int32))
        whole = which.shape == (heads, most if heads else 0) and which.dtype == torch.int32
        if not whole or (which.numel() and not bool(((which >= 0) & (which < kv.tokens)).all())):
            return None
        chosen.append(which.to(key.device, torch.long))
    return EncodedBlock(kv=bare(kv), chosen=tuple(chosen))


def _owners(chunks: Sequence[Chunk], layout: BlockLayout) -> tuple[str, ...]:
    """For each block, the chunk that holds its first token."""
    owners, end, number = [], len(chunks[0].token_ids), 0
    for block in range(layout.blocks):
        while layout.span(block).start >= end:
            number += 1
            end += len(chunks[number].token_ids)
        owners.append(chunks[number].chunk_id)
    return tuple(owners)


LINE_TOKENS = 64
"""The most tokens of the line with title and headings."""


def seen_before(
    chunk: Chunk, before: Iterable[Chunk], title: str | None, window: int, prompt: Prompt, tokens: Tokens
) -> tuple[int, ...]:
    """The tokens of its document that a chunk sees: the line, then the last `window` tokens before it.

    `before` are the preceding chunks of its document, nearest first; it takes as many as the window needs. The tokens
    are those of a prompt with these chunks one after another, so a chunk that is read behind them is exact. If chunks
    overlap, only the text before the overlap counts. If the window begins at the start of the document, the line omits
    headings that the chunk sees in the text.
    """
    parts: list[tuple[int, ...]] = []
    texts, size, start, first = [chunk.text], 0, chunk.start, chunk.ordinal
    for other in before:
        first = other.ordinal
        if other.start < start:
            ids = other.token_ids if other.end <= start else tokens.encode(other.text[: start - other.start])
            parts.append(ids)
            texts.append(other.text)
            size, start = size + len(ids), other.start
        if size >= window:
            break
    whole = first == 0 and size <= window
    text = "\n".join(texts) if whole else ""
    names = dict.fromkeys(name for name in (title, *(chunk.heading or "").split(HEADING_SEPARATOR)) if name)
    line = HEADING_SEPARATOR.join(name for name in names if name not in text)
    ids = tuple(i for part in reversed(parts) for i in part)[-window:]
    return (*(prompt.chunk_ids(tokens, line)[:LINE_TOKENS] if line else ()), *ids)


def chunk_identity(
    model: str,
    encoding: Encoding,
    prefix_ids: tuple[int, ...],
    chunk_ids: tuple[int, ...],
    seen: tuple[int, ...] = (),
) -> KVIdentity:
    """The key of a chunk's KV. `prefix_ids` are the prompt's, `seen` those of the chunk's document in `context`.

    A chunk that nothing precedes has the key of a `prefixed` one.
    """
    if encoding is Encoding.CONTEXT and not seen:
        encoding = Encoding.PREFIXED
    before = () if encoding is Encoding.STANDALONE else prefix_ids + seen
    return KVIdentity(model=model, encoding=encoding, prefix_ids=before, chunk_ids=chunk_ids)


class Encoder(Protocol):
    """The part of a model that encodes chunks; an ingest loads it only when there is something to encode."""

    tokens: Tokens

    def encode(self, chunks: Sequence[Sequence[int]], *, prefix: ChunkKV | None = None) -> list[ChunkKV]: ...


def encode_in_context(
    model: Encoder, identities: Sequence[KVIdentity], prefix: ChunkKV | None
) -> Iterator[tuple[KVIdentity, ChunkKV]]:
    """Encode chunks after what they see. A chunk that sees exactly its predecessor and all before shares its pass."""
    start = 0 if prefix is None else prefix.tokens
    runs: list[list[KVIdentity]] = []
    for identity in identities:
        last = runs[-1][-1] if runs else None
        if last is not None and identity.prefix_ids == last.prefix_ids + last.chunk_ids:
            runs[-1].append(identity)
        else:
            runs.append([identity])
    rows = [(run[-1].prefix_ids + run[-1].chunk_ids)[start:] for run in runs]
    for run, kv in zip(runs, model.encode(rows, prefix=prefix), strict=True):
        for identity in run:
            at = identity.position - start
            yield identity, kv.part(at, at + len(identity.chunk_ids))


def encoded_tokens(identity: KVIdentity) -> int:
    """An upper bound of the tokens in a chunk's pass, without the prompt's prefix."""
    seen = len(identity.prefix_ids) if identity.encoding is Encoding.CONTEXT else 0
    return seen + identity.tokens
