"""A long document as blocks in the store: their identities, which are missing, and how these are made (APB).

A document's tokens are those of all its chunks, in order. It is cut at multiples of a block's length, whatever its
chunks are, so that text which is appended to it changes its last block and adds new ones. The first tokens of a
document of up to one chunk are an ordinary chunk; of a longer one all blocks are stored, with what they pass on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ragkv.store import KVIdentity
from ragkv.store.format.identity import PASSED_ON, pack_ids, unpack_ids
from ragkv.types import Chunk, Encoding

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.engines.apb import APBConfig
    from ragkv.model.apb import Block, Compressor, Layout
    from ragkv.model.language import LanguageModel

__all__ = ["Blocks", "bare", "make_blocks", "plan_blocks", "stored_block", "with_choice"]

Load = Callable[[KVIdentity], "ChunkKV | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """One document: its tokens, how they are cut, the identities of its blocks and of its anchor.

    `owners[h]` is the id of the chunk that holds the first token of block h, and needs the block's KV. `short`: the
    document has several chunks and is one block all the same, as it has too few tokens to be cut.
    """

    ids: tuple[int, ...]
    layout: Layout
    identities: tuple[KVIdentity, ...]
    anchor: KVIdentity | None
    owners: tuple[str, ...]
    short: bool = False

    @property
    def all(self) -> dict[KVIdentity, str]:
        """Everything that is stored for the document, with the chunk that needs it."""
        found = dict(zip(self.identities, self.owners, strict=True))
        return found if self.anchor is None else {self.anchor: self.owners[0], **found}


def plan_blocks(
    chunks: Sequence[Chunk], config: APBConfig, compressor: Compressor, *, model: str, prefix_ids: tuple[int, ...]
) -> Blocks:
    """How a document of these chunks, which are all of it, is stored for the model with the fingerprint `model`.

    A block's identity is a hash of all that it depends on: the prompt's prefix, the lengths, the compressor, the
    anchor's tokens, and those of all blocks before it. On how many machines it was made does not matter.
    """
    from ragkv.model.apb import Layout, Lengths

    ids = tuple(i for chunk in chunks for i in chunk.token_ids)
    lengths = config.lengths(len(ids))
    short = lengths is None
    if lengths is None or len(chunks) == 1:
        lengths = Lengths(block=len(ids), anchor=0, passing=0)
    layout = Layout(tokens=len(ids), lengths=lengths, start=len(prefix_ids))
    owners = _owners(chunks, layout)
    if len(chunks) == 1:
        own = KVIdentity(model=model, encoding=Encoding.PREFIXED, prefix_ids=prefix_ids, chunk_ids=ids)
        return Blocks(ids=ids, layout=layout, identities=(own,), anchor=None, owners=owners)
    head = ids[: layout.anchor_head] if layout.blocks > 1 else ()
    digest = hashlib.blake2b(digest_size=32, person=b"ragkv long block")
    told = (lengths.block, lengths.anchor, lengths.passing) if layout.blocks > 1 or not short else ()
    for field in (pack_ids(told), compressor.identity().encode(), pack_ids(prefix_ids), pack_ids(head)):
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
    """Make the KV of those that are `missing`, one after another; `load` gives what is there, None where it cannot."""
    if blocks.identities[0].encoding is Encoding.PREFIXED:
        [made] = model.encode([blocks.ids], prefix=prefix)
        yield blocks.identities[0], made
        return
    from ragkv.model.apb import Book, Sequential

    anchor = None if blocks.anchor is None or blocks.anchor in missing else load(blocks.anchor)
    book = Book(
        model=model, layout=blocks.layout, ids=blocks.ids, compressor=compressor, prefix=prefix, anchor_kv=anchor
    )
    if blocks.anchor is not None and anchor is None:
        anchor = book.anchor()
        assert anchor is not None
        book = replace(book, anchor_kv=anchor)
        if blocks.anchor in missing:
            yield blocks.anchor, anchor
    wanted = [block for block, identity in enumerate(blocks.identities) if identity in missing]
    last = max(wanted, default=-1)
    known = _Stored(blocks, [block for block in range(last) if block not in wanted], model, load)
    for block, encoded in zip(range(last + 1), Sequential().run(book, known), strict=False):
        if block in wanted:
            yield blocks.identities[block], with_choice(encoded)


def bare(kv: ChunkKV) -> ChunkKV:
    """A stored block without its choice of what it passes on, which no question reads."""
    return replace(kv, states=()) if kv.states else kv


class _Stored(Mapping[int, "Block"]):
    """Blocks that are in the store, each loaded when it is asked for; one that cannot be read is not there."""

    def __init__(self, blocks: Blocks, there: Sequence[int], model: LanguageModel, load: Load) -> None:
        self._blocks, self._there, self._model, self._load = blocks, frozenset(there), model, load

    def __getitem__(self, block: int) -> Block:
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


def with_choice(block: Block) -> ChunkKV:
    """A block's KV together with which of its tokens it passes on, as the store keeps it."""
    import torch

    from ragkv.attention.kv import State

    states = tuple(
        State(layer, PASSED_ON, which.to(torch.int32)) for layer, which in enumerate(block.chosen) if which.numel()
    )
    return replace(block.kv, states=states)


def stored_block(kv: ChunkKV, most: int, model: LanguageModel) -> Block | None:
    """A stored block; None unless it names `most` of its own tokens for every kv head of every layer.

    Whoever made the store may have put any numbers there.
    """
    import torch

    from ragkv.model.apb import Block

    told = {state.layer: state.value for state in kv.states if state.name == PASSED_ON}
    chosen = []
    for layer, key in enumerate(kv.keys):
        heads = 0 if layer in model.shared else key.shape[0]
        which = told.get(layer, torch.empty((heads, 0), dtype=torch.int32))
        whole = which.shape == (heads, most if heads else 0) and which.dtype == torch.int32
        if not whole or (which.numel() and not bool(((which >= 0) & (which < kv.tokens)).all())):
            return None
        chosen.append(which.to(key.device, torch.long))
    return Block(kv=bare(kv), chosen=tuple(chosen))


def _owners(chunks: Sequence[Chunk], layout: Layout) -> tuple[str, ...]:
    """For each block, the chunk that holds its first token."""
    owners, end, at = [], len(chunks[0].token_ids), 0
    for block in range(layout.blocks):
        while layout.span(block).start >= end:
            at += 1
            end += len(chunks[at].token_ids)
        owners.append(chunks[at].chunk_id)
    return tuple(owners)
