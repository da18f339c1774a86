"""What every engine is: a program that answers one question from prefix, chunk KVs and scores, token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ragkv.attention.kv import ChunkKV, Segment
from ragkv.engines.program import Program
from ragkv.types import Encoding, Need

if TYPE_CHECKING:
    from ragkv.model.checkpoint import Checkpoint
    from ragkv.model.prompt import Prompt, Tokens

__all__ = ["ContextChunk", "Demand", "Engine", "ModelFacts", "Request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextChunk:
    """One retrieved chunk as an engine receives it; `kv` is None for an engine that needs no stored KV."""

    token_ids: tuple[int, ...]
    score: float
    kv: ChunkKV | None = None

    def stored(self) -> ChunkKV:
        """The KV, which the caller must have loaded for this engine's encoding."""
        if self.kv is None:
            raise ValueError("this engine answers from stored KV, but the chunk came without it")
        return self.kv


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question. `chunks` are in ascending relevance (Block-Attention §3.2: the best stands next to the question).

    `prefix` is the KV of `prefix_ids` at positions 0..P-1; None when the engine's `encoding` is None. `question` and
    `prompt` are for engines that ask the model something of their own first (mapreduce).
    """

    prefix_ids: tuple[int, ...]
    chunks: tuple[ContextChunk, ...]
    suffix_ids: tuple[int, ...]
    prefix: ChunkKV | None = None
    question: str = ""
    prompt: Prompt | None = None

    @property
    def prefix_tokens(self) -> int:
        return len(self.prefix_ids)

    @property
    def tokens(self) -> int:
        """All tokens of the prompt."""
        return len(self.prefix_ids) + sum(len(chunk.token_ids) for chunk in self.chunks) + len(self.suffix_ids)

    @property
    def before(self) -> tuple[Segment, ...]:
        """The prefix as a segment, for a row that sees it; empty where there is none."""
        return () if self.prefix is None else (Segment(kv=self.prefix, start=0),)

    @property
    def filled(self) -> tuple[int, ...]:
        """Indices of the chunks that hold a token: an empty one has no KV, and nothing to attend to."""
        return tuple(index for index, chunk in enumerate(self.chunks) if chunk.token_ids)


class ModelFacts(Protocol):
    """What an engine may know of the model; a `LanguageModel` has it all."""

    checkpoint: Checkpoint
    tokens: Tokens
    eos_ids: frozenset[int]
    max_positions: int | None
    lacks: Mapping[Need, str]
    moves_within: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a program needs at most at one time: rows, and tokens of their own KV, all rows together.

    `shared`: the tokens of the sequences that it asks for (`Shared.sizes`), which count once however many hold them.
    """

    rows: int
    tokens: int
    shared: Mapping[Hashable, int] = field(default_factory=dict)


class Engine(ABC):
    """Base of all engines; one instance per request is cheap, and none keeps state between requests.

    An engine asks and the runtime answers: `program` yields what it wants read and is sent logits, so that the rows of
    all requests share one forward pass.

    `encoding` says which chunk KV it reads (None: none, it prefills). `Config` is its own frozen dataclass, built
    from `[tuning.<name>]` of the index's configuration.
    """

    name: ClassVar[str]
    encoding: ClassVar[Encoding | None]
    Config: ClassVar[type[Any]]
    counts_winners: ClassVar[bool] = False
    """Whether it names the winning chunk of every token."""
    most_chunks: ClassVar[int | None] = None
    """It answers from at most so many of the chunks, the best ones; None: from all it is given."""
    whole_documents: ClassVar[bool] = False
    """Whether it reads all of the documents that the chunks are from, in blocks (`ragkv.model.apb`)."""
    stacks: ClassVar[bool] = False
    """Whether requests that begin at the same time shall begin `together`."""

    def __init__(self, config: Any = None) -> None:
        self.config: Any = self.Config() if config is None else config

    @property
    def needs(self) -> frozenset[Need]:
        """What it does that not every model bears; all of it, unless an engine says what it does not do."""
        return frozenset(Need)

    def warning(self, model: ModelFacts) -> str | None:
        """One sentence that a user should read before trusting this engine on this model; None for none."""
        return None

    def demand(self, request: Request, max_new_tokens: int) -> Demand:
        """What `program` needs at most; the default is for an engine whose one row reads the suffix."""
        return Demand(rows=1, tokens=len(request.suffix_ids) + max_new_tokens)

    def together(self, requests: Sequence[Request], model: ModelFacts) -> list[Program]:
        """A program for each of several requests that begin at the same time, of an engine that `stacks`."""
        return [self.program(request, model) for request in requests]

    @abstractmethod
    def program(self, request: Request, model: ModelFacts) -> Program:
        """Read the question and choose tokens until closed."""
