"""Documents, chunks, scores and answers, and the shapes of KV: the types that all packages share.

This module does without torch, because most commands only describe what is stored. Key/value tensors are in
`ragkv.attention.kv`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

DType: TypeAlias = Literal[
    "bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"
]
"""torch's name of a dtype; `ragkv.attention.kv` maps it to the dtype itself."""
ITEM_SIZES: Mapping[DType, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per number."""
SCALE_BYTES, MOST = 2, 127
"""Bytes after the int8 numbers of a head and token, and the largest int8 (`ragkv.attention.kv.PackedTensors`)."""


class Encoding(StrEnum):
    """Which tokens a chunk saw while it was prefilled (docs/glossary.md)."""

    STANDALONE = "standalone"
    """No other tokens: its first token is at position 0."""

    PREFIXED = "prefixed"
    """The prompt's prefix of P tokens: its first token is at position P."""

    CONTEXT = "context"
    """The prefix and, of its own document, title, heading and the tokens before it (`ragkv.ingest.encoding`)."""

    LONG = "long"
    """The prefix, the anchor and the tokens that earlier blocks pass on: a block of a long document (APB)."""


class Capability(StrEnum):
    """A use of stored KV by an engine that not every model can run exactly."""

    MERGE = "merge"
    """A sequence reads several chunks that were encoded independently."""

    MOVE = "move"
    """A chunk is read at another position than the one at which it was encoded."""

    TENSORS = "be read as tensors"
    """An engine cuts or overwrites the keys and values of a chunk; they are no opaque state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One source, already read to text.

    `document_id` is stable across ingests (a path, or the caller's id). `content_hash` is the hex digest of the
    source's bytes; an ingest skips a document if it is unchanged.
    """

    document_id: str
    source: str
    content_hash: str
    media_type: str = "text/plain"
    title: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A span of a document's text.

    `token_ids` are the generation model's tokens of the chunk as it appears in the prompt: its text, then the separator
    that follows every chunk. `start` and `end` are character offsets into the document's text.
    """

    chunk_id: str
    document_id: str
    ordinal: int
    text: str
    token_ids: tuple[int, ...]
    start: int
    end: int
    page: int | None = None
    heading: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredChunk:
    """A retrieved chunk with the scores of every stage, which PCED decodes with (PCED §3, Eq. 2).

    `retrieval_score` and `rerank_score` are raw; `score` is the fused relevance r in [0, 1) (PCED Eqs. 4-7). `stages`
    holds the raw score of each stage that saw the chunk: dense, sparse, colbert, bm25, relative, rrf.
    """

    chunk: Chunk
    source: str
    retrieval_score: float
    rerank_score: float | None
    score: float
    stages: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One chunk that an answer is based on. `tokens_won` is, for PCED, how many tokens this chunk's expert chose.

    `heading` is the path of headings above the chunk, or the row of a table that the chunk is.
    """

    document: str
    chunk_id: str
    text: str
    page: int | None
    heading: str | None = None
    score: Annotated[float, "The fused relevance, from 0 to below 1 (PCED Eqs. 4-7)."]
    retrieval_score: float
    rerank_score: float | None
    stages: Annotated[Mapping[str, float], "Raw scores: dense, sparse, colbert, bm25, relative, rrf."] = field(
        default_factory=dict
    )
    tokens_won: Annotated[int | None, "For PCED, how many tokens the chunk's expert chose."] = None
    snippet: Annotated[str, "The best sentences for question and answer, as one line of plain text."] = ""
    highlights: Annotated[
        tuple[tuple[int, int], ...],
        "Where they are in `text`: [start, end] in characters (code points); empty if no word matches.",
    ] = ()

    @property
    def title(self) -> str:
        """Document, page and heading."""
        page = "" if self.page is None else f", page {self.page}"
        return f"{self.document}{page}" + (f", {self.heading}" if self.heading else "")

    def to_json(self) -> dict[str, Any]:
        """The source as `ragkv query --json` prints it."""
        return asdict(replace(self, stages=dict(self.stages))) | {"highlights": [*map(list, self.highlights)]}


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedToken:
    """One generated token. `text` is what it added to the answer: nothing while a character is incomplete.

    `source` is, for PCED, the place among the answer's sources of the chunk whose expert won the token (PCED Fig. 2).
    """

    token_id: int
    text: str
    source: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The token as the server returns it."""
        return {"id": self.token_id, "text": self.text, "source": self.source}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds of each stage. `first_token` counts from the end of `load`; `total` is the whole answer."""

    retrieve: float
    rerank: float
    load: float
    first_token: float
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUse:
    """How many of the answer's chunks came with stored KV. `bytes` (in memory) and `tokens` are those of the hits.

    `memory_hits` counts the hits that an earlier query had already loaded.
    """

    hits: int = 0
    misses: int = 0
    bytes: int = 0
    tokens: int = 0
    memory_hits: int = 0

    def __add__(self, other: KVUse) -> KVUse:
        return KVUse(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


IntentName: TypeAlias = Literal["question", "greeting", "thanks", "summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer (docs/design.md)."""

    question: str
    text: str
    engine: str
    finish_reason: str
    sources: tuple[Source, ...]
    timing: Timing
    kv: KVUse
    decoding: Annotated[
        Mapping[str, Any],
        "`max_new_tokens` and every setting of `Decoding` that was in effect, including a seed that was drawn.",
    ] = field(default_factory=dict)
    dtype: Annotated[str, "The precision of the model: float32, bfloat16 or float16, or int8 for int8 weights."] = ""
    charge: Annotated[
        float | None,
        "For an engine that recomputes stored KV (blend), the share that it has recomputed: tokens times layers.",
    ] = None
    trace: tuple[TracedToken, ...] = field(default=(), repr=False)
    """The generated tokens; stripped at both ends, their text is `text`."""
    reasoning: Annotated[str, "The model's thinking before its answer (`thinking` of `Decoding`)."] = ""
    queries: Annotated[
        tuple[str, ...],
        "The search queries that the model has written: a rewritten follow-up question, then those of further steps.",
    ] = ()
    intent: Annotated[
        IntentName,
        "What the message was taken for; all but a question are answered without a search.",
    ] = "question"
    fields: Annotated[
        Mapping[str, int],
        "For a JSON answer by PCED: the place among `sources` of each value's source, by the value's JSON pointer.",
    ] = field(default_factory=dict)

    @classmethod
    def from_json(cls, result: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; the trace is empty."""
        return cls(
            question=result["question"],
            text=result["answer"],
            engine=result["engine"],
            finish_reason=result["finish_reason"],
            sources=tuple(
                Source(**each | {"highlights": tuple(map(tuple, each.get("highlights", ())))})
                for each in result["sources"]
            ),
            timing=Timing(**result["timing_ms"]),
            kv=KVUse(**result["kv"]),
            decoding=result["decoding"],
            dtype=result.get("dtype", ""),
            charge=result.get("charge"),
            fields=result.get("fields", {}),
            reasoning=result.get("reasoning", ""),
            queries=tuple(result.get("queries", ())),
            intent=result.get("intent", "question"),
        )

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv query --json` prints."""
        return {
            "question": self.question,
            "answer": self.text,
            "engine": self.engine,
            "finish_reason": self.finish_reason,
            "sources": [source.to_json() for source in self.sources],
            "timing_ms": asdict(self.timing),
            "kv": asdict(self.kv),
            "decoding": dict(self.decoding),
            "dtype": self.dtype,
            "charge": self.charge,
            "fields": dict(self.fields),
            "reasoning": self.reasoning,
            "queries": list(self.queries),
            "intent": self.intent,
        }


_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def field_sources(trace: Sequence[TracedToken]) -> dict[str, int]:
    """The source of each string, number and constant of a JSON text, by its JSON pointer (RFC 6901): the one whose
    expert won most of its characters, the better one of equals. A value whose tokens no expert won has none.
    """
    owners = [token.source for token in trace for _ in token.text]
    if all(owner is None for owner in owners):
        return {}
    positions: dict[str, int] = {}
    path: list[int | str | None] = []  # the position in each open container; None where an object's key is next
    for match in _JSON_TOKEN.finditer("".join(token.text for token in trace)):
        text = match[0]
        if text in "{[":
            path.append(None if text == "{" else 0)
        elif text in "}]":
            path.pop()
        elif text == ",":
            path[-1] = path[-1] + 1 if isinstance(path[-1], int) else None
        elif path and path[-1] is None:
            path[-1] = json.loads(text)
        elif text != ":":
            won = Counter(sorted(owner for owner in owners[match.start() : match.end()] if owner is not None))
            if won:
                pointer = "".join(f"/{str(each).replace('~', '~0').replace('/', '~1')}" for each in path)
                positions[pointer] = won.most_common(1)[0][0]
    return positions


class LayerShape(NamedTuple):
    """Keys of a layer are `(kv_heads, tokens, key_dim)`, values `(kv_heads, tokens, value_dim)`.

    A `value_dim` of 0: the values are columns of the keys (latent attention), which are kept once. All 0: the layer
    keeps nothing, because it reads another layer's KV or has none.
    """

    kv_heads: int
    key_dim: int
    value_dim: int


class StateShape(NamedTuple):
    """The shape of a layer's state besides keys and values. Its size does not depend on the number of tokens."""

    layer: int
    name: str
    dtype: DType
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * ITEM_SIZES[self.dtype]


class KVShape(NamedTuple):
    """The properties shared by all KV of one model: dtype of keys and values, every layer's shape, and its states."""

    dtype: DType
    layers: tuple[LayerShape, ...]
    states: tuple[StateShape, ...] = ()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return sum(heads * (key + value) for heads, key, value in self.layers) * ITEM_SIZES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """Bytes of a chunk's states, whatever its length."""
        return sum(state.nbytes for state in self.states)

    def nbytes(self, tokens: int) -> int:
        """Bytes of the KV of a chunk of `tokens` tokens."""
        return self.state_bytes + tokens * self.token_bytes
