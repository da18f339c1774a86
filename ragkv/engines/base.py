"""What every engine is: a way to run one question over prefix, chunk KVs and scores, token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ragkv.attention.context import EMPTY, Context
from ragkv.attention.kv import ChunkKV
from ragkv.attention.settle import settle
from ragkv.types import Encoding

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel
    from ragkv.model.prompt import Prompt

__all__ = ["CausalStream", "ContextChunk", "Engine", "Request", "Stream"]


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
    `prompt` are for engines that ask the model something of their own first (mapreduce), which should look at
    `cancelled` between their tokens.
    """

    prefix_ids: tuple[int, ...]
    chunks: tuple[ContextChunk, ...]
    suffix_ids: tuple[int, ...]
    prefix: ChunkKV | None = None
    question: str = ""
    prompt: Prompt | None = None
    cancelled: Callable[[], bool] | None = None

    @property
    def prefix_tokens(self) -> int:
        return len(self.prefix_ids)

    @property
    def filled(self) -> tuple[int, ...]:
        """Indices of the chunks that hold a token: an empty one has no KV, and nothing to attend to."""
        return tuple(index for index, chunk in enumerate(self.chunks) if chunk.token_ids)


class Stream(ABC):
    """A request that has read the question: `scores` are those of the next token, `(vocab,)` in fp32."""

    scores: Tensor
    position: int = 0
    """Where the next token will stand, in the row that is furthest; the answer ends where the model's positions do."""

    @abstractmethod
    def advance(self, token_id: int) -> None:
        """Append a token and compute the next scores."""

    def best(self) -> int:
        """The greedy choice; the lowest id among equals."""
        return int(self.scores.argmax())

    def winner(self, token_id: int) -> int | None:
        """Index into `Request.chunks` of the expert that proposes `token_id`; None where there are no experts."""
        return None


class CausalStream(Stream):
    """One row over a fixed context: what `full`, `ape` and `block` decode with.

    The question reads the chunks where they lie; before the second token they are laid out once
    (`ragkv.attention.settle`).
    """

    def __init__(self, model: LanguageModel, ids: Sequence[int], *, start: int, context: Context = EMPTY) -> None:
        self._model = model
        self._context = context
        self._own = model.own()
        self._settled = False
        self.position = start
        model.require_positions(start + len(ids))
        self._read(ids)

    def advance(self, token_id: int) -> None:
        if not self._settled:
            self._context = settle(self._context, self._model.rotary, windowed=bool(self._model.windows))
            self._settled = True
        self._read([token_id])

    def _read(self, ids: Sequence[int]) -> None:
        tokens = torch.tensor([list(ids)], device=self._model.device)
        positions = torch.arange(self.position, self.position + len(ids), device=self._model.device)[None]
        self.scores = self._model.forward(tokens, positions, context=self._context, own=self._own)[0]
        self.position += len(ids)


class Engine(ABC):
    """Base of all engines; one instance per request is cheap, and none keeps state between requests.

    `encoding` says which chunk KV it reads (None: none, it prefills). `Config` is its own frozen dataclass, built
    from `[tuning.<name>]` of the index's configuration.
    """

    name: ClassVar[str]
    encoding: ClassVar[Encoding | None]
    Config: ClassVar[type[Any]]
    counts_winners: ClassVar[bool] = False
    """Whether its streams name the winning chunk of every token."""
    most_chunks: ClassVar[int | None] = None
    """It answers from at most so many of the chunks, the best ones; None: from all it is given."""

    def __init__(self, config: Any = None) -> None:
        self.config: Any = self.Config() if config is None else config

    def warning(self, model: LanguageModel) -> str | None:
        """One sentence that a user should read before trusting this engine on this model; None for none."""
        return None

    @abstractmethod
    def start(self, model: LanguageModel, request: Request) -> Stream:
        """Read the question; the stream's first scores are those of the first token."""
