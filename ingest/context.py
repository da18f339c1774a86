"""What a chunk sees of its own document while it is prefilled: the `context` encoding.

Text breaks at the edges of chunks: a pronoun, "the company", a table under a heading mean something that stands before.
With `[encoding] context = N` a chunk is encoded after the prompt's prefix, a line with its document's title and its
headings, and up to N tokens that stand before it in its document; only its own rows are kept. This is the offline stage
of FusionRAG (arXiv 2601.12904) with the chunk's own document in place of similar chunks, so that no KV contains another
document's text. Neither the stored bytes nor the work of a question change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from ragkv.ingest.parser import HEADING_SEPARATOR
from ragkv.model.prompt import Prompt, Tokens
from ragkv.store import KVIdentity
from ragkv.types import Chunk, Encoding

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.model.packet import Packet

LINE_TOKENS = 64
"""The most tokens of the line with title and headings."""


def seen_before(
    chunk: Chunk, before: Iterable[Chunk], title: str | None, window: int, prompt: Prompt, tokens: Tokens
) -> tuple[int, ...]:
    """The tokens of its document that a chunk sees: the line, then the last `window` tokens before it.

    `before` are the chunks before it in its document, the nearest first; as many are taken as the window needs. They
    are the tokens of a prompt with these chunks one after another, so a chunk that is read behind them is exact. Of a
    chunk that overlaps what stands after it, only the text before that counts. Where the window begins at the start of
    the document, the line leaves out what stands in the text that the chunk sees.
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
    packet: Packet | None = None,
) -> KVIdentity:
    """The key of a chunk's KV. `prefix_ids` are the prompt's, `seen` those of the chunk's document in `context`, and
    `packet` is the one around it in `packet`.

    A chunk of which nothing stands before it is a `prefixed` one.
    """
    if encoding is Encoding.CONTEXT and not seen:
        encoding = Encoding.PREFIXED
    before = () if encoding is Encoding.STANDALONE else prefix_ids + seen
    if encoding is Encoding.PACKET and packet is not None:
        before = packet.words(prefix_ids)
    return KVIdentity(model=model, encoding=encoding, prefix_ids=before, chunk_ids=chunk_ids)


class Encoder(Protocol):
    """The part of a model that encodes chunks; an ingest loads it only when there is something to encode."""

    tokens: Tokens

    def encode(
        self, chunks: Sequence[Sequence[int]], *, prefix: ChunkKV | None = None, packet: Packet | None = None
    ) -> list[ChunkKV]: ...


def encode_in_context(
    model: Encoder, identities: Sequence[KVIdentity], prefix: ChunkKV | None
) -> Iterator[tuple[KVIdentity, ChunkKV]]:
    """Chunks after what they see. One that sees exactly what the one before it saw, and that one, shares its pass."""
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
    """The tokens that a pass reads for a chunk besides the prompt's prefix, at most."""
    seen = len(identity.prefix_ids) if identity.encoding is Encoding.CONTEXT else 0
    return seen + identity.tokens
