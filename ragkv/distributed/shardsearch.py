"""Search an index whose documents lie on several ranks: the chunks and scores that one index of them all would give.

Every rank searches what it has, and all of them learn the best of all. What depends on the whole (how rare a word is,
the range of scores that a fusion scales) is computed from everybody's numbers, so that it is that of one index.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from ragkv.config import Mode
from ragkv.distributed.group import Group
from ragkv.errors import RanksError, UsageError
from ragkv.index.finder import Finder
from ragkv.index.index import Index
from ragkv.index.search import Found, Searcher, SearchSettings
from ragkv.retrievers import BM25, Hit, VectorIndex
from ragkv.retrievers.base import best_hits
from ragkv.retrievers.bm25 import Census
from ragkv.retrievers.roster import KeySet
from ragkv.types import Chunk, Document, ScoredChunk

if TYPE_CHECKING:
    from ragkv.retrievers import Reranker

__all__ = ["ShardFinder", "gathered", "packed", "unpacked"]

Among = Collection[str] | KeySet | None


class ShardFinder(Finder):
    """Finds chunks of all ranks' indexes. All ranks ask it the same questions in the same order."""

    def __init__(self, index: Index, group: Group) -> None:
        super().__init__(index)
        self._group = group
        self._known: dict[str, ScoredChunk] = {}
        self.owners: dict[str, int] = {}
        """Of the chunks that the last question found, the rank that has each; the lowest, if several have it."""

    def find(
        self,
        question: str,
        search: SearchSettings,
        *,
        on_candidates: Callable[[list[ScoredChunk]], None] | None = None,
    ) -> list[ScoredChunk]:
        """As `Finder.find`, over the chunks of all ranks; `on_candidates` is told of all of them."""
        question = search.search_for or question
        searcher = self.searcher(search.mode, rerank=search.rerank)
        among = self._among_everybody(search.where, search.only)
        pool = max(search.top_k, search.candidates)
        count = pool if search.rerank else search.top_k
        found = searcher.candidates(question, mode=search.mode, count=count, pool=pool, among=among)
        self._fetch(found)
        there = [each for each in found if each.chunk_id in self._known]
        if on_candidates is not None:
            on_candidates(self._told(there[: search.top_k]))
        if search.rerank and there:
            there = searcher.rerank(question, there)
        return self._told(there[: search.top_k])

    def searcher(self, mode: Mode, *, rerank: bool) -> _ShardSearcher:
        """A searcher over the indexes of all ranks."""
        parts = self._parts(mode, rerank=rerank)
        group = self._group
        return _ShardSearcher(
            group,
            embedder=parts["embedder"],
            indexes={kind: _Vectors(group, index) for kind, index in parts["indexes"].items()},
            bm25=None if parts["bm25"] is None else _Words(group, parts["bm25"]),
            texts=lambda chunk_ids: {each: self._known[each].chunk.text for each in chunk_ids if each in self._known},
            colbert=parts["colbert"],
            reranker=None if parts["reranker"] is None else _Judges(group, parts["reranker"]),
            fusion=parts["fusion"],
        )

    def _among_everybody(self, where: Sequence[str], only: Callable[[Document, Chunk], bool] | None) -> KeySet | None:
        """What may be found here; UsageError if no document of any rank meets the conditions."""
        refusal: UsageError | None = None
        among: KeySet | None = None
        try:
            among = self._among(where, only)
        except UsageError as error:
            refusal, among = error, KeySet.of([])
        refusals = gathered(self._group, None if refusal is None else str(refusal))
        if all(refusals):
            raise refusal or UsageError(refusals[0])
        return among

    def _fetch(self, found: Sequence[Found]) -> None:
        """Learn the chunks of what was found from whichever ranks have them."""
        wanted = {each.chunk_id for each in found}
        chunks = self._store.chunk_many(each.chunk_id for each in found)
        here = self._scored([each for each in found if each.chunk_id in chunks], chunks)
        self._known, self.owners = {}, {}
        for rank, told in enumerate(gathered(self._group, packed(here))):
            for each in unpacked(told, rank):
                if each.chunk.chunk_id in wanted:
                    self.owners.setdefault(each.chunk.chunk_id, rank)
                    self._known.setdefault(each.chunk.chunk_id, each)

    def _told(self, found: Sequence[Found]) -> list[ScoredChunk]:
        return [each.scored((known := self._known[each.chunk_id]).chunk, known.source) for each in found]


class _ShardSearcher(Searcher):
    """A searcher whose ColBERT vectors stay where they are: each rank scores its own candidates."""

    def __init__(self, group: Group, **parts: Any) -> None:
        super().__init__(**parts)
        self._group = group

    def _late(self, query: Any, hits: Sequence[Hit]) -> list[Found]:
        mine = {each.chunk_id: each for each in super()._late(query, hits)}
        scores = _joined(self._group, {chunk_id: each.retrieval_score for chunk_id, each in mine.items()})
        return self._judged_late(hits, scores)


class _Vectors:
    """One index of vectors, of which every rank has a part."""

    def __init__(self, group: Group, part: VectorIndex[Any]) -> None:
        self._group = group
        self._part = part

    def search(self, query: Any, k: int, *, among: Among = None) -> list[Hit]:
        return _best(self._group, self._part.search(query, k, among=among), k)


class _Words:
    """One BM25 index, of which every rank has a part."""

    def __init__(self, group: Group, part: BM25) -> None:
        self._group = group
        self._part = part

    def search(self, question: str, k: int, *, among: Among = None) -> list[Hit]:
        parts = gathered(self._group, asdict(self._part.census(question)))
        whole = reduce(add, (Census(**part) for part in parts))
        return _best(self._group, self._part.search_part(question, k, whole, among=among), k)


class _Judges:
    """The reranker, of which every rank judges some candidates."""

    def __init__(self, group: Group, reranker: Reranker) -> None:
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


def gathered(group: Group, mine: Any) -> list[Any]:
    """Every rank's value of JSON, in the order of the ranks."""
    sent = json.dumps(mine, ensure_ascii=True).encode()
    try:
        return [json.loads(each) for each in group.gather_bytes(sent)]
    except ValueError as error:
        raise RanksError("A rank sent what is no JSON; run the same version of ragkv on all ranks.") from error


def packed(found: Sequence[ScoredChunk]) -> list[Any]:
    """Chunks with their scores as JSON."""
    return [asdict(each) for each in found]


def unpacked(told: Any, rank: int) -> list[ScoredChunk]:
    """What `packed` made on that rank."""
    try:
        return [ScoredChunk(**{**fields, "chunk": _chunk(fields["chunk"])}) for fields in told]
    except (TypeError, ValueError, KeyError) as error:
        raise RanksError(
            f"What rank {rank} says of its chunks cannot be read ({error}); run the same version of ragkv on all ranks."
        ) from error


def _chunk(fields: Mapping[str, Any]) -> Chunk:
    return Chunk(**{**fields, "token_ids": tuple(map(int, fields["token_ids"]))})


def _best(group: Group, mine: Sequence[Hit], k: int) -> list[Hit]:
    """The best `k` of all ranks' hits; a chunk that several have counts once, with its better score."""
    scores = _joined(group, {hit.chunk_id: hit.score for hit in mine})
    return best_hits((Hit(chunk_id=chunk_id, score=score) for chunk_id, score in scores.items()), k)


def _joined(group: Group, mine: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in gathered(group, mine):
        for chunk_id, score in part.items():
            found[chunk_id] = max(score, found.get(chunk_id, score))
    return found
