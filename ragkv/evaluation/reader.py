"""Make requests with KV in memory, so that an index can be judged without writing to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ragkv.attention.kv import ChunkKV
from ragkv.engines import ContextChunk, Engine, Request
from ragkv.model.apb import Sequential
from ragkv.model.apb.questionbook import book_for_question
from ragkv.store import Codec, KVIdentity
from ragkv.store.format.encode import encode_record
from ragkv.store.format.record import Manifest
from ragkv.store.format.tensor import decode_record
from ragkv.types import Encoding

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel
    from ragkv.model.prompt import Prompt

__all__ = ["HeldKV", "Reader", "Recoded", "bit_equal", "round_trip"]

HOLD_BYTES = 1 << 30  # KV kept for the next questions, which often retrieve the same chunks

Lookup = Callable[[KVIdentity], "ChunkKV | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recoded:
    """A request whose KV went through a codec, whether every bit survived, and the bytes of payloads and tensors."""

    request: Request
    exact: bool
    stored_bytes: int
    raw_bytes: int


class HeldKV:
    """A cache of KV in memory that drops the least recently used first. Several readers may share one."""

    def __init__(self, most_bytes: int = HOLD_BYTES) -> None:
        self._most = most_bytes
        self._kvs: OrderedDict[KVIdentity, ChunkKV] = OrderedDict()
        self._nbytes = 0

    def get(self, identity: KVIdentity) -> ChunkKV | None:
        if identity in self._kvs:
            self._kvs.move_to_end(identity)
        return self._kvs.get(identity)

    def put(self, identity: KVIdentity, kv: ChunkKV) -> None:
        self._kvs[identity] = kv
        self._nbytes += kv.nbytes
        while self._nbytes > self._most:
            _, gone = self._kvs.popitem(last=False)
            self._nbytes -= gone.nbytes


class Reader:
    """Makes the request of a question for any engine and codec, without writing anything.

    `lookup` finds KV that exists already (the store's `get_kv`). Other KV is encoded and held in memory.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: Prompt,
        *,
        fingerprint: str,
        lookup: Lookup | None = None,
        held: HeldKV | None = None,
    ) -> None:
        self.model = model
        self.prompt = prompt
        self._prefix_ids = prompt.prefix_ids(model.tokens)
        self.fingerprint = fingerprint
        self._lookup = lookup
        self._held = HeldKV() if held is None else held

    def request(self, engine: Engine, question: str, chunks: Sequence[ContextChunk], *, whole: bool = False) -> Request:
        """The request that `engine` starts from. `chunks` are in ascending relevance.

        If they are `whole` texts, an engine that reads whole documents gets them in blocks encoded for the question, as
        from `ragkv query --context`.
        """
        chunks = chunks if engine.most_chunks is None else chunks[-engine.most_chunks :]
        request = Request(
            prefix_ids=self._prefix_ids,
            chunks=tuple(chunks),
            suffix_ids=self.prompt.suffix_ids(self.model.tokens, question),
            question=question,
            prompt=self.prompt,
        )
        if engine.encoding is None:
            return request
        if whole and engine.whole_documents:
            filled = [block for chunk in chunks for block in self._blocks(engine, question, chunk)]
        else:
            filled = self._alone(engine.encoding, chunks)
        return replace(request, prefix=self.prefix(), chunks=tuple(filled))

    def _alone(self, encoding: Encoding, chunks: Sequence[ContextChunk]) -> list[ContextChunk]:
        kvs = self.kv([self._identity(encoding, chunk.token_ids) for chunk in chunks])
        return [replace(chunk, kv=kv) for chunk, kv in zip(chunks, kvs, strict=True)]

    def _blocks(self, engine: Engine, question: str, text: ContextChunk) -> list[ContextChunk]:
        """The blocks of a text, or the text if it is no longer than one. They are of this question, so none is held."""
        assert engine.encoding is not None
        ids, asked = text.token_ids, self.prompt.chunk_ids(self.model.tokens, question)
        book = book_for_question(self.model, engine.config, ids, asked, self.prefix())
        if book is None:
            return self._alone(engine.encoding, [text])
        found = []
        for number, block in enumerate(Sequential().run(book)):
            span = book.layout.span(number)
            part = ids[span.start : span.stop]
            kv = self._stored(self._identity(engine.encoding, part), block.kv)
            found.append(ContextChunk(token_ids=part, score=text.score, kv=kv))
        return found

    def _stored(self, identity: KVIdentity, kv: ChunkKV) -> ChunkKV:
        """The KV of a block as it comes back from where it is kept."""
        return kv

    def recoded(self, engine: Engine, request: Request, codec: Codec) -> Recoded:
        """The request with all of its KV encoded and decoded with `codec`, as a store would do."""
        if engine.encoding is None:
            raise ValueError("an engine without stored KV has nothing to encode")
        exact, stored, raw = True, 0, 0

        def through(encoding: Encoding, ids: tuple[int, ...], kv: ChunkKV) -> ChunkKV:
            nonlocal exact, stored, raw
            back, nbytes = round_trip(kv, self._identity(encoding, ids), codec)
            exact = exact and bit_equal(kv, back)
            stored, raw = stored + nbytes, raw + kv.nbytes
            return back.to(self.model.place)

        chunks = [replace(c, kv=through(engine.encoding, c.token_ids, c.stored())) for c in request.chunks]
        prefix = request.prefix
        if prefix is not None:
            prefix = through(Encoding.STANDALONE, request.prefix_ids, prefix)
        changed = replace(request, prefix=prefix, chunks=tuple(chunks))
        return Recoded(request=changed, exact=exact, stored_bytes=stored, raw_bytes=raw)

    def prefix(self) -> ChunkKV | None:
        """The KV of the prefix, or None for an empty prefix."""
        if not self._prefix_ids:
            return None
        [found] = self.kv([self._identity(Encoding.STANDALONE, self._prefix_ids)])
        return found

    def kv(self, identities: Sequence[KVIdentity]) -> list[ChunkKV]:
        """The KV of each identity on the model's device, whether it is held, found or encoded now."""
        found = {identity: self._find(identity) for identity in dict.fromkeys(identities)}
        for encoding in (Encoding.STANDALONE, Encoding.PREFIXED):
            lost = [i for i, kv in found.items() if kv is None and i.encoding is encoding]
            if not lost:
                continue
            prefix = self.prefix() if encoding is Encoding.PREFIXED else None
            encoded = self.model.encode([identity.chunk_ids for identity in lost], prefix=prefix)
            found.update(zip(lost, encoded, strict=True))
            for identity, made in zip(lost, encoded, strict=True):
                self._held.put(identity, made)
        return [kv for identity in identities if (kv := found[identity]) is not None]

    def _find(self, identity: KVIdentity) -> ChunkKV | None:
        kv = self._held.get(identity)
        if kv is None and self._lookup is not None:
            kv = self._lookup(identity)
        return None if kv is None else kv.to(self.model.place)

    def _identity(self, encoding: Encoding, ids: tuple[int, ...]) -> KVIdentity:
        return KVIdentity(
            model=self.fingerprint,
            encoding=encoding,
            prefix_ids=self._prefix_ids if encoding is Encoding.PREFIXED else (),
            chunk_ids=ids,
        )


def round_trip(kv: ChunkKV, identity: KVIdentity, codec: Codec) -> tuple[ChunkKV, int]:
    """The KV that a store with `codec` would return for `kv`, and the bytes that it would store."""
    record = encode_record(kv, identity, codec)
    back = decode_record(Manifest.parse(record.manifest), lambda index: record.segments[index])
    return back, record.stored_bytes


def bit_equal(one: ChunkKV, other: ChunkKV) -> bool:
    """Whether all bits are equal, including those of NaNs."""
    pairs = zip(_tensors(one), _tensors(other), strict=True)
    return all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _tensors(kv: ChunkKV) -> tuple[torch.Tensor, ...]:
    return (*kv.keys, *kv.values, *(state.value for state in kv.states))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().flatten().view(torch.uint8)
