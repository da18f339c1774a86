"""Vector search by Qdrant, for indexes that outgrow one machine's memory (docs/retrieval.md, "Qdrant").

A collection is derived from one index's store, as the other retrieval indexes are, and is trusted as little. Qdrant
only proposes chunks: a proposal that the store does not hold, or that the question may not see, is dropped and counted,
and the scores are computed from the store's own vectors, by a `DenseIndex` or `SparseIndex` over the proposals. So
nothing in Qdrant can add a chunk to an answer or change a score; what is missing there is not found.

A point is a chunk. Its id is the chunk id's key, so a set of chunks is a filter of ids. Its payload has the chunk id, a
hash of every field and value of its document (`term`), by which `--where` filters, and the name of the update that sent
it. The collection's metadata has a fingerprint of the index, its embedder and its kinds of vectors, and the version of
the store that its points follow, which is written last: what was interrupted is sent again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Any
from uuid import UUID

from ragkv.config import QdrantConfig
from ragkv.errors import ConfigError, RetrievalError, extra
from ragkv.retrievers.arrays import IdSet, id_key
from ragkv.retrievers.base import Hit, ScoreKind, best_hits
from ragkv.retrievers.vectors import EXTRA, TIE, DenseIndex, SparseIndex, is_zero_dense, is_zero_sparse

if TYPE_CHECKING:
    from qdrant_client import models

BATCH = 128
"""Points in one request, which stays below Qdrant's limit of 32 MB with vectors of 4096 numbers."""
MAX_TERMS = 20_000
"""Values or ids in one filter; a set with more is searched in several requests, whose best hits are merged."""
MAX_PROPOSALS = 1 << 14
"""How many proposals a search may request to find all chunks that tie with the last one."""
_META = "ragkv"
_SCHEMA = 2

logger = logging.getLogger(__name__)
_memory: dict[str, Any] = {}
"""The clients of `memory://` URLs, which share their collections within this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A chunk to send: the `term`s of its document, and its vectors by kind."""

    chunk_id: str
    terms: Sequence[str]
    vectors: Mapping[ScoreKind, Any]


def term(field: str, value: str) -> str:
    """A hash of a document's field and value, so that any text of either is matched exactly by a filter."""
    text = f"{len(field)}:{field}{value}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def point_id(key: bytes) -> str:
    """The id of the point of a chunk, by the key of its id; numpy strips zeros from the end of a key."""
    return str(UUID(bytes=key.ljust(16, b"\0")))


class QdrantCollection:
    """The points of one index in Qdrant. Thread-safe. Any failure there is a RetrievalError of one sentence.

    `index` identifies the index: a collection of another one is refused, as is one of another embedder.
    """

    def __init__(self, config: QdrantConfig, index: str) -> None:
        with extra("[qdrant] in ragkv.toml needs qdrant-client", "qdrant"):
            from qdrant_client import QdrantClient, models
        self.name = config.collection or f"ragkv-{index[:16]}"
        self.made = False
        """Whether the collection exists: `open` has found it, or `make` has made it."""
        self.version: tuple[int, str] | None = None
        """The store's version that the points have; None if that is unknown, or there are none."""
        self.sending = threading.Lock()
        self.dropped = 0
        """Proposals that the index does not hold, or that the question may not see."""
        self._index, self._models, self._where = index, models, f"collection {self.name!r} of Qdrant at {config.url}"
        self._local = config.url.startswith("memory://")
        self._lock: AbstractContextManager[Any] = threading.Lock() if self._local else nullcontext()
        key = os.environ.get(config.api_key) if config.api_key else None
        if config.api_key and not key:
            raise ConfigError(f"[qdrant] api_key names the environment variable {config.api_key}, which is not set.")
        if self._local:
            self._client = _memory.get(config.url) or _memory.setdefault(config.url, QdrantClient(":memory:"))
        else:
            self._client = QdrantClient(url=config.url, api_key=key, timeout=config.timeout, check_compatibility=False)

    def close(self) -> None:
        """End the connections."""
        if not self._local:
            self._client.close()

    def _call(self, method: str, **arguments: Any) -> Any:
        try:
            with self._lock:
                return getattr(self._client, method)(self.name, **arguments)
        except Exception as error:  # of any of its transports
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise RetrievalError(f"The {self._where} cannot be used ({reason}); see [qdrant] in ragkv.toml.") from error

    def open(self, embedder: str, kinds: Collection[str], *, replace: bool = False) -> None:
        """Find out whether the collection exists, and which version it has.

        RetrievalError unless it belongs to this index, embedder and kinds of vectors. With `replace`, a collection of
        this index with another embedder or kinds is deleted.
        """
        self.made, self.version = False, None
        if not self._call("collection_exists"):
            return
        facts = (self._call("get_collection").config.metadata or {}).get(_META)
        if not isinstance(facts, dict) or facts.get("index") != self._index:
            whose = "of another index" if isinstance(facts, dict) else "not of ragkv's making"
            raise RetrievalError(f"The {self._where} is {whose}: name another collection in [qdrant] of ragkv.toml.")
        generation, mark = facts.pop("generation", None), facts.pop("mark", None)
        if facts == self._facts(embedder, kinds):
            self.made = True
            self.version = (generation, mark) if isinstance(generation, int) and isinstance(mark, str) else None
        elif replace:
            self._call("delete_collection")
        else:
            raise RetrievalError(
                f"The {self._where} has the vectors of another embedder; run ragkv repair, which sends them again."
            )

    def _facts(self, embedder: str, kinds: Collection[str]) -> dict[str, Any]:
        return {"schema": _SCHEMA, "index": self._index, "embedder": embedder, "kinds": sorted(kinds)}

    def make(self, embedder: str, kinds: Collection[str], width: int) -> None:
        """Make the collection, for dense vectors of `width` numbers."""
        make = self._models
        dense_vectors = make.VectorParams(size=width, distance=make.Distance.DOT)  # they are unit vectors
        self._call(
            "create_collection",
            vectors_config={"dense": dense_vectors} if "dense" in kinds else {},
            sparse_vectors_config={"sparse": make.SparseVectorParams()} if "sparse" in kinds else None,
            metadata={_META: self._facts(embedder, kinds)},
        )
        if not self._local:  # local mode has no payload indexes, and warns
            self._call("create_payload_index", field_name="terms", field_schema=make.PayloadSchemaType.KEYWORD)
        self.made = True

    def send(self, points: Iterable[Point], update: str) -> int:
        """Send points under the name of this update; returns their number."""
        rest, sent = iter(points), 0
        while batch := [self._struct(point, update) for point in islice(rest, BATCH)]:
            self._call("upsert", points=batch, wait=True)
            sent += len(batch)
        return sent

    def drop(self, keys: Iterable[bytes]) -> None:
        """Delete the points of chunks, by the keys of their ids."""
        for ids in _cut([point_id(key) for key in keys]):
            self._call("delete", points_selector=self._models.PointIdsList(points=ids), wait=True)

    def drop_others(self, update: str) -> None:
        """Delete the points that this update has not sent."""
        make = self._models
        sent = make.FieldCondition(key="update", match=make.MatchValue(value=update))
        self._call("delete", points_selector=make.FilterSelector(filter=make.Filter(must_not=[sent])), wait=True)

    def record(self, embedder: str, kinds: Collection[str], version: tuple[int, str]) -> None:
        """Record the version of the store that the points now follow."""
        facts = self._facts(embedder, kinds) | dict(zip(("generation", "mark"), version, strict=True))
        self._call("update_collection", metadata={_META: facts})
        self.version = version

    def _struct(self, point: Point, update: str) -> models.PointStruct:
        vectors = {
            kind: self.sparse(vector) if isinstance(vector, Mapping) else vector.astype("f4").tolist()
            for kind, vector in point.vectors.items()
            if not _is_zero(vector, point.chunk_id)
        }
        payload = {"chunk": point.chunk_id, "terms": sorted(point.terms), "update": update}
        return self._models.PointStruct(id=point_id(id_key(point.chunk_id)), vector=vectors, payload=payload)

    def sparse(self, weights: Mapping[str, float]) -> models.SparseVector:
        """Token weights by 32 bits of the tokens' hashes; two tokens with one hash only add up in a proposal."""
        hashed: Counter[int] = Counter()
        for token, weight in weights.items():
            digest = hashlib.blake2b(token.encode("utf-8", "surrogatepass"), digest_size=4).digest()
            hashed[int.from_bytes(digest, "big")] += weight  # type: ignore[assignment]
        return self._models.SparseVector(indices=list(hashed), values=list(hashed.values()))

    def count(self) -> int:
        """The number of points."""
        return int(self._call("count", exact=True).count)

    def propose(self, kind: ScoreKind, query: Any, count: int, among: models.Filter | None) -> list[tuple[str, float]]:
        """The ids of the `count` chunks that Qdrant ranks best, with its scores, best first."""
        found = self._call(
            "query_points", query=query, using=kind, limit=count, query_filter=among, with_payload=["chunk"]
        )
        return [(str((each.payload or {}).get("chunk")), each.score) for each in found.points]

    def filters(self, among: IdSet | None) -> Iterator[models.Filter | None]:
        """The restrictions of `among` as filters that cover it together; None: no restriction.

        The conditions of `--where` are terms: for each field, the document must have one of them. Patterns were
        resolved to the values that they match, so the filter is exact.
        """
        make = self._models
        if among is None:
            yield None
        elif among.terms is None:
            for ids in _cut([point_id(key) for key in among.keys.tolist()]):
                yield make.Filter(must=[make.HasIdCondition(has_id=ids)])
        else:
            for chosen in product(*map(_cut, among.terms())):
                fields = [make.FieldCondition(key="terms", match=make.MatchAny(any=terms)) for terms in chosen]
                yield make.Filter(must=fields)


def _cut(items: list[str]) -> list[list[str]]:
    return [items[start : start + MAX_TERMS] for start in range(0, len(items), MAX_TERMS)]


def _is_zero(vector: Any, what: str) -> bool:
    return is_zero_sparse(vector, what) if isinstance(vector, Mapping) else is_zero_dense(vector, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class QdrantIndex:
    """The `VectorSearch` over a collection's vectors of a kind; `vectors` returns those of the store, by chunk id."""

    collection: QdrantCollection
    score_kind: ScoreKind
    vectors: Callable[[Sequence[str]], Mapping[str, Any]]

    def search(self, query: Any, k: int, *, among: Collection[str] | IdSet | None = None) -> list[Hit]:
        """As `VectorSearch.search`."""
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        if _is_zero(query, "The question's vector") or not self.collection.made:
            return []
        some = among if among is None or isinstance(among, IdSet) else IdSet.of(among)
        asked = self.collection.sparse(query) if isinstance(query, Mapping) else query.astype("f4").tolist()
        best: dict[str, Hit] = {}
        for chosen in self.collection.filters(some):
            best |= {hit.chunk_id: hit for hit in self._best(query, asked, k, chosen, some)}
        return best_hits(best.values(), k)

    def _best(self, query: Any, asked: Any, k: int, chosen: models.Filter | None, among: IdSet | None) -> list[Hit]:
        """The best chunks of a filter: at least `k`, and all that tie with the last one."""
        want = k + EXTRA
        while True:
            proposed = self.collection.propose(self.score_kind, asked, want, chosen)
            stored = self.vectors([chunk_id for chunk_id, _ in proposed])
            seen = {name: vector for name, vector in stored.items() if among is None or name in among}
            index: Any = DenseIndex() if self.score_kind == "dense" else SparseIndex()
            index.update(seen.items(), (), generation=0, embedder="")
            hits: list[Hit] = index.search(query, max(1, len(seen)))
            # Nothing better comes below the last proposal, except for the rounding of Qdrant's scores.
            complete = len(hits) >= k and proposed[-1][1] < hits[k - 1].score - TIE * max(1.0, abs(hits[k - 1].score))
            if len(proposed) < want or complete or want >= MAX_PROPOSALS:
                break
            want *= 4
        if gone := len(proposed) - len(seen):
            self.collection.dropped += gone
            logger.info("%d chunks that Qdrant proposed are not in the index", gone)
        return hits
