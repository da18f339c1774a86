"""Answer from documents that are spread over several ranks, with the results that one index of them all would give.

Search: every rank searches its own documents, and all ranks get the best of all. Statistics of the whole corpus (how
rare a word is, the range of scores that a fusion scales) are computed from the numbers of all ranks.

Long documents (APB §3.5): rank r encodes block t·ranks + r in round t. In every layer each rank gathers the KV that the
blocks of the round pass on; a block sees that of earlier blocks, in this round and in all before. The tensor operations
are those of `SequentialExecutor`, and so are the results, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragkv.attention.batch import Ranks
from ragkv.attention.kv import ChunkKV
from ragkv.config import Mode
from ragkv.distributed.group import RankGroup
from ragkv.engines import ContextChunk, Engine, Request
from ragkv.errors import RagkvError, RanksError, RetrievalError, UsageError
from ragkv.index.answer import AnswerTask, IndexBackend
from ragkv.index.index import Index
from ragkv.index.kv_loader import After, DocumentBlocks, KVLoader, Prefetch, each_document, given_blocks, planned
from ragkv.index.search import Finder, Found, Searcher
from ragkv.ingest.encoding import Blocks, make_blocks, stored_block, with_choice
from ragkv.model.apb.document import EncodedBlock, LongDocument, PassedKV, compressor_for
from ragkv.retrievers import BM25, Hit, Reranker, VectorSearch
from ragkv.retrievers.arrays import IdSet
from ragkv.retrievers.base import best_hits
from ragkv.retrievers.bm25 import CorpusStatistics
from ragkv.store import KVIdentity
from ragkv.types import Chunk, Document, Encoding, KVUse, ScoredChunk, box_from_json

if TYPE_CHECKING:
    from ragkv.model.apb.compressors import Compressor
    from ragkv.runtime import Runtime

Among = Collection[str] | IdSet | None


class ShardedSearch(Finder):
    """Searches all ranks' indexes. All ranks must ask the same questions in the same order."""

    def __init__(self, index: Index, group: RankGroup) -> None:
        super().__init__(index)
        self._group = group
        self._known: dict[str, tuple[Chunk, str]] = {}
        self.owners: dict[str, int] = {}
        """The rank of each chunk that the last question found; the lowest one, if several ranks have it."""

    def searcher(self, mode: Mode, *, rerank: bool) -> _ShardSearcher:
        """A searcher over the indexes of all ranks."""
        parts, group = self._parts(mode, rerank=rerank), self._group
        parts["indexes"] = {
            name: (_SharedWords if name == "bm25" else _Vectors)(group, index)
            for name, index in parts["indexes"].items()
        }
        parts["reranker"] = None if parts["reranker"] is None else _SharedRerankers(group, parts["reranker"])
        parts["texts"] = lambda ids: {each: self._known[each][0].text for each in ids if each in self._known}
        return _ShardSearcher(group, **parts)

    def _among(self, where: Sequence[str], only: Callable[[Document, Chunk], bool] | None) -> IdSet | None:
        """The chunks of this rank that meet the conditions; UsageError if no document of any rank does."""
        refusal: UsageError | None = None
        among: IdSet | None = None
        try:
            among = super()._among(where, only)
        except UsageError as error:
            refusal, among = error, IdSet.of([])
        refusals = gathered(self._group, None if refusal is None else str(refusal))
        if all(refusals):
            raise refusal or UsageError(refusals[0])
        return among

    def _fetch(self, found: Sequence[Found]) -> Mapping[str, tuple[Chunk, str]]:
        """Get the found chunks from the ranks that have them."""
        wanted = {each.chunk_id for each in found}
        own = super()._fetch(found)
        here = [each.scored(*own[each.chunk_id]) for each in found if each.chunk_id in own]
        self._known, self.owners = {}, {}
        for rank, packed in enumerate(gathered(self._group, [asdict(each) for each in here])):
            for each in _unpacked(packed, rank):
                if each.chunk.chunk_id in wanted:
                    self.owners.setdefault(each.chunk.chunk_id, rank)
                    self._known.setdefault(each.chunk.chunk_id, (each.chunk, each.source))
        return self._known


class _ShardSearcher(Searcher):
    """A searcher in which each rank scores its own candidates, so that ColBERT vectors are not sent."""

    def __init__(self, group: RankGroup, **parts: Any) -> None:
        super().__init__(**parts)
        self._group = group

    def _late(self, asked: Mapping[str, Any], hits: Sequence[Hit]) -> list[Found]:
        mine = {each.chunk_id: each for each in super()._late(asked, hits)}
        scores = _joined(self._group, {chunk_id: each.retrieval_score for chunk_id, each in mine.items()})
        return self._judged_late(hits, scores)


class _Vectors:
    """An index of vectors that is spread over all ranks."""

    def __init__(self, group: RankGroup, part: VectorSearch[Any]) -> None:
        self._group = group
        self._part = part

    def search(self, query: Any, k: int, *, among: Among = None) -> list[Hit]:
        return _best(self._group, self._part.search(query, k, among=among), k)


class _SharedWords:
    """A BM25 index that is spread over all ranks."""

    def __init__(self, group: RankGroup, part: BM25) -> None:
        self._group = group
        self._part = part

    def search(self, question: str, k: int, *, among: Among = None) -> list[Hit]:
        parts = gathered(self._group, asdict(self._part.statistics(question)))
        whole = reduce(add, (CorpusStatistics(**part) for part in parts))
        return _best(self._group, self._part.search_part(question, k, whole, among=among), k)


class _SharedRerankers:
    """The reranker; each rank scores some of the candidates."""

    def __init__(self, group: RankGroup, reranker: Reranker) -> None:
        self._group = group
        self._reranker = reranker

    def score(self, question: str, texts: Sequence[str]) -> list[float]:
        rank, size = self._group.rank, self._group.size
        mine = list(texts[rank::size])
        parts = gathered(self._group, self._reranker.score(question, mine) if mine else [])
        logits = [0.0] * len(texts)
        for each, scores in enumerate(parts):
            logits[each::size] = scores
        return logits


def gathered(group: RankGroup, mine: Any) -> list[Any]:
    """The JSON values of all ranks, in their order."""
    sent = json.dumps(mine, ensure_ascii=True).encode()
    try:
        return [json.loads(each) for each in group.gather_bytes(sent)]
    except ValueError as error:
        raise RanksError("A rank sent what is no JSON; run the same version of ragkv on all ranks.") from error


def _unpacked(packed: Any, rank: int) -> list[ScoredChunk]:
    """The scored chunks from the fields that rank `rank` has sent."""
    try:
        return [ScoredChunk(**{**fields, "chunk": _chunk(fields["chunk"])}) for fields in packed]
    except (TypeError, ValueError, KeyError) as error:
        raise RanksError(
            f"The chunks of rank {rank} cannot be read ({error}); run the same version of ragkv on all ranks."
        ) from error


def _chunk(fields: Mapping[str, Any]) -> Chunk:
    token_ids = tuple(map(int, fields["token_ids"]))
    return Chunk(**{**fields, "token_ids": token_ids, "box": box_from_json(fields["box"])})


def _best(group: RankGroup, mine: Sequence[Hit], k: int) -> list[Hit]:
    """The best `k` hits of all ranks. A chunk that several ranks have counts once, with its better score."""
    scores = _joined(group, {hit.chunk_id: hit.score for hit in mine})
    return best_hits((Hit(chunk_id=chunk_id, score=score) for chunk_id, score in scores.items()), k)


def _joined(group: RankGroup, mine: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in gathered(group, mine):
        for chunk_id, score in part.items():
            found[chunk_id] = max(score, found.get(chunk_id, score))
    return found


class RankExecutor:
    """An `Executor` that spreads blocks over the ranks: block h runs on rank h mod `ranks.size`.

    All ranks run the same documents in the same order. `passed` counts the bytes of keys and values that this rank has
    sent to the others.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.passed = 0

    def run(
        self, long_document: LongDocument, known: Mapping[int, EncodedBlock] | None = None
    ) -> Iterator[EncodedBlock]:
        """All blocks in order; those of other ranks as `ChunkKV.elsewhere`. Of the `known`, only its own are read."""
        ranks, blocks = self.ranks, long_document.layout.blocks
        mine = {h: made for h, made in (known or {}).items() if h % ranks.size == ranks.rank}
        there = torch.zeros(blocks, dtype=torch.uint8)
        there[list(mine)] = 1
        todo = ranks.gather(there).amax(0) == 0  # blocks that their own rank does not have
        exchange = _Round(self, long_document)
        own = [h for h in range(ranks.rank, blocks, ranks.size) if todo[h]]
        anchor = long_document.anchor() if own else None
        for first in range(0, blocks, ranks.size):
            exchange.first = first
            h = first + ranks.rank
            made = mine.get(h)
            if h < blocks and made is None:
                made = long_document.encode(h, anchor, exchange)
            elif todo[first:].any():  # else no block of this or a later round is encoded: nothing to exchange
                exchange.attend(made)
            for block in range(first, min(first + ranks.size, blocks)):
                yield self._block(long_document, block, made)

    def _block(self, long_document: LongDocument, block: int, made: EncodedBlock | None) -> EncodedBlock:
        owner = block % self.ranks.size
        if owner == self.ranks.rank:
            assert made is not None
            return replace(made, kv=replace(made.kv, owner=owner))
        layout = long_document.layout
        kv = ChunkKV.elsewhere(
            owner=owner,
            layers=long_document.model.layers,
            tokens=len(layout.span(block)),
            encoded_at=layout.position(block),
        )
        return EncodedBlock(kv=kv, chosen=())


class _Round:
    """The exchange of blocks that run at the same time."""

    def __init__(self, executor: RankExecutor, long_document: LongDocument) -> None:
        self._executor = executor
        self._ranks = executor.ranks
        self._layout = long_document.layout
        self._model = long_document.model
        self._kept: dict[tuple[int, int], PassedKV] = {}
        self.first = 0
        """The first block of this round."""

    def gather_earlier(self, block: int, layer: int, mine: PassedKV) -> Sequence[PassedKV]:
        self._gather(layer, mine)
        return [self._kept[before, layer] for before in range(block)]

    def attend(self, made: EncodedBlock | None) -> None:
        """Take part in a round without encoding: with a known block, or with none."""
        for layer in range(self._model.layers):
            if layer not in self._model.shared:
                self._gather(layer, None if made is None else made.kept(layer))

    def _gather(self, layer: int, mine: PassedKV | None) -> None:
        """One all-gather of [K|V], `(kv_heads, l_p, key_dim + value_dim)`, and of positions in layers with a window."""
        shape, most = self._model.kv_shape, self._layout.lengths.passing
        heads, key_dim, value_dim = shape.layers[layer]
        both = torch.zeros(
            (heads, most, key_dim + value_dim), dtype=getattr(torch, shape.dtype), device=self._model.device
        )
        places = torch.zeros((heads, most), dtype=torch.int64, device=self._model.device)
        if mine is not None:
            count = mine.key.shape[1]
            both[:, :count] = torch.cat([mine.key, mine.value], -1)
            places[:, :count] = mine.positions
            self._executor.passed += both.nbytes
        found = self._ranks.gather(both)
        where = self._ranks.gather(places) if self._model.windows else places.expand(self._ranks.size, -1, -1)
        for rank in range(self._ranks.size):
            block = self.first + rank
            if block < self._layout.blocks:
                self._keep(block, layer, found[rank], where[rank], key_dim)

    def _keep(self, block: int, layer: int, both: Tensor, places: Tensor, key_dim: int) -> None:
        count = self._layout.passed(block)
        key, value = both[:, :count, :key_dim], both[:, :count, key_dim:]
        self._kept[block, layer] = PassedKV(key.contiguous(), value.contiguous(), places[:, :count])


def rank_of(name: str, size: int) -> int:
    """The rank that holds this name's KV, by a hash; it only depends on `size`, the number of ranks."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()) % size


def _summary(one: DocumentBlocks) -> list[Any]:
    """A document's summary for the other ranks: its best chunk, and the position and tokens of each block."""
    blocks = [[each.stored().encoded_at, list(each.token_ids)] for each in one.given]
    return [one.best.chunk.chunk_id, blocks]


class ShardedBackend(IndexBackend):
    """An index on several ranks: each has its own documents (`shards`), or holds the KV of some chunks.

    All ranks ask the same questions in the same order. `index` is the one on this rank; `runtime` runs in step with
    those of the other ranks.
    """

    def __init__(self, index: Index, group: RankGroup, runtime: Runtime, *, shards: bool) -> None:
        self._shards = ShardedSearch(index, group) if shards else None
        super().__init__(index, self._shards or Finder(index), KVLoader(index))
        self._group = group
        self._runtime = runtime
        self._owners: dict[str, int] = {}
        self._question = ""
        self._prefixes: dict[tuple[int, ...], ChunkKV] = {}
        self.sizes = self._sizes_here
        self.prefetch = lambda encoding, chunks: None  # the owners of chunks are only known after the search

    @property
    def runtime(self) -> Runtime:
        return self._runtime

    def find(self, task: AnswerTask, on_candidates: Callable[[list[ScoredChunk]], None]) -> list[ScoredChunk]:
        if task.query.question != self._question:  # else its chunks are read together with those of earlier searches
            self._question, self._owners = task.query.question, {}
        if self._shards is not None:
            found = super().find(task, on_candidates)
            self._owners |= {s.chunk.chunk_id: self._shards.owners.get(s.chunk.chunk_id, 0) for s in found}
            return found
        found = self._first_finds(task, on_candidates)
        self._owners |= {s.chunk.chunk_id: rank_of(s.chunk.chunk_id, self._group.size) for s in found}
        return found

    def _first_finds(self, task: AnswerTask, on_candidates: Callable[[list[ScoredChunk]], None]) -> list[ScoredChunk]:
        """The chunks that rank 0 finds, because the others' copies of the index may differ in a document."""
        mine: list[Any] | str = []
        error: RagkvError | None = None
        if self._group.rank == 0:
            try:
                mine = [asdict(each) for each in super().find(task, on_candidates)]
            except RagkvError as failure:
                mine, error = str(failure), failure
        first = gathered(self._group, mine)[0]
        if isinstance(first, str):
            raise error or RetrievalError(first)
        return _unpacked(first, 0)

    def request(
        self, task: AnswerTask, scored: Sequence[ScoredChunk], prefetch: Prefetch | None, after: After
    ) -> tuple[Request, KVUse]:
        index = self._index
        index.require_known_tokens(scored)
        prefix = None if task.engine.encoding is None else self._prefix(after)
        if not task.engine.whole_documents:
            given, use = self._chunks(task, scored, after)
        elif self._shards is not None:
            given, use = self._sharded(task.engine, scored, after)
        else:
            given, use = self._split(task.engine, scored, after)
        request = Request(
            prefix_ids=index.prefix_ids,
            prefix=prefix,
            chunks=tuple(given),
            suffix_ids=task.suffix_ids(index.prompt, index.model.tokens),
            question=task.query.question,
            prompt=index.prompt,
        )
        numbers = asdict(use)
        whole = self._group.gather(torch.tensor([*numbers.values()])).sum(0).tolist()
        return request, KVUse(**dict(zip(numbers, whole, strict=True)))

    def _chunks(
        self, task: AnswerTask, scored: Sequence[ScoredChunk], after: After
    ) -> tuple[list[ContextChunk], KVUse]:
        """Each chunk, with its KV if it is on this rank; and the use of the KV that this rank has loaded."""
        encoding, mine = task.engine.reads, self._mine(scored)
        kvs, use = self._kv_loader.chunks(encoding, mine, keep=task.query.keep, after=after)
        here = {s.chunk.chunk_id: kv for s, kv in zip(mine, kvs, strict=True)}
        packet = None if encoding is None else self._kv_loader.packet(encoding)
        alone = encoding is Encoding.STANDALONE if packet is None else not packet.prefixed
        starts = [0 if alone else len(self._index.prefix_ids)] * len(scored)
        if encoding is Encoding.CONTEXT and scored:  # only the rank that has a chunk knows what it saw
            own = [here.get(s.chunk.chunk_id) for s in scored]
            starts = self._group.gather(torch.tensor([kv.encoded_at if kv else 0 for kv in own])).sum(0).tolist()
        return [
            ContextChunk(token_ids=s.chunk.token_ids, score=s.score, kv=self._kv(encoding, s, here, start))
            for s, start in zip(scored, starts, strict=True)
        ], use

    def _kv(
        self,
        encoding: Encoding | None,
        scored: ScoredChunk,
        here: Mapping[str, ChunkKV | None],
        start: int,
    ) -> ChunkKV | None:
        """A chunk's KV, or if another rank has it, a placeholder with the position `start` of its encoding."""
        chunk_id, tokens = scored.chunk.chunk_id, len(scored.chunk.token_ids)
        if encoding is None or not tokens:
            return None
        owner = self._owners[chunk_id]
        if (kv := here.get(chunk_id)) is not None:
            return replace(kv, owner=owner)
        packet = self._kv_loader.packet(encoding)
        vectors = 0 if packet is None else packet.tokens
        return self._elsewhere(owner, tokens + vectors, start)

    def _prefix(self, after: After) -> ChunkKV | None:
        """The prefix's KV. Rank 0 sends its own once, so that all ranks have the same bits."""
        ids = self._index.prefix_ids
        if not ids:
            return None
        if ids not in self._prefixes:
            kv = self._kv_loader.prefix(after)
            assert kv is not None
            self._prefixes = {
                ids: replace(
                    kv,
                    keys=tuple(self._group.first(key) for key in kv.keys),
                    values=tuple(self._group.first(value) for value in kv.values),
                )
            }
        return self._prefixes[ids]

    def _mine(self, scored: Sequence[ScoredChunk]) -> list[ScoredChunk]:
        return [s for s in scored if self._owners[s.chunk.chunk_id] == self._group.rank and s.chunk.token_ids]

    def _sizes_here(
        self, encoding: Encoding | None, scored: Sequence[ScoredChunk], *, whole: bool = False
    ) -> dict[Hashable, int]:
        if not whole or self._shards is not None:
            return self._kv_loader.sizes(encoding, self._mine(scored), whole=whole)
        return {
            what: -(-size // self._group.size)
            for what, size in self._kv_loader.sizes(encoding, scored, whole=True).items()
        }

    def _sharded(self, engine: Engine, scored: Sequence[ScoredChunk], after: After) -> tuple[list[ContextChunk], KVUse]:
        """The documents of the chunks of an index with shards, the best last.

        UsageError on all ranks when one rank's document cannot be read as a whole.
        """
        found: list[DocumentBlocks] = []
        failure: UsageError | None = None
        try:
            found = list(each_document(self._index, self._kv_loader, engine, self._mine(scored), after))
        except UsageError as error:  # the other ranks are waiting for the exchange below
            failure = error
        summaries = gathered(self._group, [_summary(one) for one in found] if failure is None else str(failure))
        if failures := [each for each in summaries if isinstance(each, str)]:
            raise failure or UsageError(failures[0])
        here = {one.best.chunk.chunk_id: one for one in found}
        there = [(rank, summary) for rank, each in enumerate(summaries) for summary in each]
        places = {each.chunk.chunk_id: place for place, each in enumerate(scored)}
        given: list[ContextChunk] = []
        try:
            for rank, (best, blocks) in sorted(there, key=lambda one: places[one[1][0]]):
                one = here[best] if rank == self._group.rank else None
                given += self._given(scored[places[best]].score, blocks, rank, one)
        except (TypeError, ValueError, KeyError) as error:
            raise RanksError(
                f"The documents of a rank cannot be read ({error}); run the same version on all ranks."
            ) from error
        return given, sum((one.use for one in found), KVUse())

    def _split(self, engine: Engine, scored: Sequence[ScoredChunk], after: After) -> tuple[list[ContextChunk], KVUse]:
        """The documents of the chunks of an index that all ranks have, the best last. Block h is on rank h mod n, a
        short document on one rank.

        Missing blocks are encoded by all ranks together, each its own. UsageError on all ranks when they do not have
        the same documents.
        """
        compressor, prefix = compressor_for(engine.config.compressor, self._index.model), self._prefix(after)
        plans = list(planned(self._index, engine, compressor, scored))
        self._require_same([blocks for _, blocks in plans])
        given: list[ContextChunk] = []
        use = KVUse()
        for best, blocks in plans:
            kvs, of_one = self._part(blocks, compressor, prefix, after)
            given += given_blocks(best, blocks, kvs)
            use += of_one
        return given, use

    def _given(self, score: float, blocks: Sequence[Any], rank: int, one: DocumentBlocks | None) -> list[ContextChunk]:
        """The blocks of a document that is on one rank; on the other ranks, placeholders."""
        if one is not None:
            return [replace(each, kv=replace(each.stored(), owner=rank)) for each in one.given]
        return [
            ContextChunk(token_ids=tuple(map(int, ids)), score=score, kv=self._elsewhere(rank, len(ids), int(at)))
            for at, ids in blocks
        ]

    def _require_same(self, plans: Sequence[Blocks]) -> None:
        keys = [identity.key().hex() for blocks in plans for identity in blocks.identities]
        mine = hashlib.blake2b(repr(keys).encode(), digest_size=32).digest()
        for rank, other in enumerate(states := self._group.gather_bytes(mine)):
            if other != states[0]:
                raise UsageError(
                    f"Rank {rank} has other versions of the documents than rank 0, or none; give all ranks the same "
                    "index, or name shards with {rank} or --shards."
                )

    def _part(
        self, blocks: Blocks, compressor: Compressor, prefix: ChunkKV | None, after: After
    ) -> tuple[list[ChunkKV], KVUse]:
        """The KV of this rank's blocks of a document, and placeholders for the others."""
        rank, size, layout = self._group.rank, self._group.size, blocks.layout
        owners = [h % size for h in range(layout.blocks)]
        if layout.blocks == 1:
            owners = [rank_of(blocks.identities[0].key().hex(), size)]
        mine = {identity: h for h, identity in enumerate(blocks.identities) if owners[h] == rank}
        found, held = self._kv_loader.find(list(mine))
        made: dict[KVIdentity, ChunkKV] = {}
        there = torch.zeros(layout.blocks, dtype=torch.uint8)
        there[[mine[identity] for identity in found]] = 1
        if not self._group.gather(there).amax(0).all():
            started = time.perf_counter()
            if layout.blocks == 1:  # it is on the rank that holds the document
                missing = [identity for identity in mine if identity not in found]
                made = dict(make_blocks(blocks, missing, self._index.model, compressor, prefix, lambda _: None))
            else:
                made = self._together(blocks, compressor, prefix, mine, found)
            made = self._index.store.rounded(made)
            self._index.write_behind.note_encoded(sum(kv.tokens for kv in made.values()), time.perf_counter() - started)
            self._keep(blocks, made, after)
        kvs = {**found, **made}
        use = self._kv_loader.count_use(list(mine), blocks.all, kvs, lost=made, held=held)
        return [
            replace(kvs[identity], owner=rank)
            if identity in mine
            else self._elsewhere(owners[h], len(layout.span(h)), layout.position(h))
            for h, identity in enumerate(blocks.identities)
        ], use

    def _together(
        self,
        blocks: Blocks,
        compressor: Compressor,
        prefix: ChunkKV | None,
        mine: Mapping[KVIdentity, int],
        found: Mapping[KVIdentity, ChunkKV],
    ) -> dict[KVIdentity, ChunkKV]:
        """Encode the blocks that any rank lacks, each rank its own. Returns this rank's new blocks, and the anchor."""
        model, layout = self._index.model, blocks.layout
        known: dict[int, EncodedBlock] = {}
        for identity, kv in found.items():
            block = stored_block(kv, layout.passed(mine[identity]), model)
            if block is not None:
                known[mine[identity]] = block
        anchor, made = None, {}
        if blocks.anchor is not None and len(known) < len(mine):
            anchor = self._kv_loader.find([blocks.anchor])[0].get(blocks.anchor)
        long_document = LongDocument(
            model=model, layout=layout, ids=blocks.ids, compressor=compressor, prefix=prefix, anchor_kv=anchor
        )
        if blocks.anchor is not None and anchor is None and len(known) < len(mine):
            anchor = long_document.anchor()
            assert anchor is not None
            long_document, made = replace(long_document, anchor_kv=anchor), {blocks.anchor: anchor}
        for h, block in enumerate(RankExecutor(self._group).run(long_document, known)):
            identity = blocks.identities[h]
            if identity in mine and h not in known:
                made[identity] = with_choice(replace(block, kv=replace(block.kv, owner=None)))
        return made

    def _keep(self, blocks: Blocks, made: Mapping[KVIdentity, ChunkKV], after: After) -> None:
        """Store new KV after the first token; until then it is in memory."""
        store, owners, pairs = self._index.store, blocks.all, list(made.items())
        self._kv_loader.hold(made)
        if pairs and store.chunk(blocks.owners[0]) is not None:
            self._kv_loader.write(lambda: store.put_many([(i, kv, owners[i]) for i, kv in pairs]), pairs, after)

    def _elsewhere(self, rank: int, tokens: int, encoded_at: int) -> ChunkKV:
        layers = len(self._index.shape.layers)
        return ChunkKV.elsewhere(owner=rank, layers=layers, tokens=tokens, encoded_at=encoded_at)
