"""The base class of engines, the operations that an engine may request of the runtime, and engines by name.

An engine is a generator that never calls the model. It yields one of the operations below and is sent the result:
logits for `Forward`, a token for `Sample`. So the runtime can put the sequences of all questions into one forward pass,
and a test can drive an engine with made-up logits and no model (docs/engines.md).

Built-in engines are imported on first use; a package adds its own by the entry-point group `ragkv.engines`.

A loaded model is exact for `full` and for every engine that reads each chunk where it was encoded. Anything more is a
`Capability`: `Engine.needs` lists those that an engine requires, and the self-check on load finds those that the model
lacks, with the reason (`LanguageModel.missing_capabilities`).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar

from ragkv.attention.kv import ChunkKV, PlacedChunk
from ragkv.attention.sequence import TokenSequence
from ragkv.config import build_config
from ragkv.errors import ConfigError, PromptTooLongError, UnsupportedModelError
from ragkv.types import Capability, Encoding
from ragkv.util.lazy import LazyModule
from ragkv.util.plugins import ENGINES, require_engine

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ragkv.model.checkpoint import Checkpoint
    from ragkv.model.prompt import Prompt, Tokens
else:
    torch = LazyModule("torch")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """Append `ids[i]` to `sequences[i]`. The result: fp32 logits of each sequence's last token, `(sequences, vocab)`.

    The engine owns the logits and may modify them in place. In a process that has not imported torch they are an array
    of numpy: an engine that computes with them imports torch at the top of its module.
    """

    sequences: Sequence[TokenSequence]
    ids: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Choose the answer's next token from `scores` `(vocab,)` by the request's decoding settings. The result: its id.

    The token is shown to the caller, and the program is closed after the last one. With experts, `winners` `(vocab,)`
    says which of them proposes each token (the lower number among equals), and `owners` are the indices of their chunks
    in `Request.chunks`.
    """

    scores: Tensor
    winners: Tensor | None = None
    owners: tuple[int, ...] = ()

    def best(self) -> Tensor:
        """The greedy choice, 0-dim, on the device: the lowest id among equals, after the lowest winner (PCED Eq. 3)."""
        if self.winners is None:
            return self.scores.argmax()
        tied = self.scores == self.scores.max()
        return torch.where(tied, self.winners, len(self.owners)).argmin()


@dataclass(frozen=True, slots=True, eq=False)
class Argmax:
    """Choose the best token of each row of `logits` `(rows, vocab)`, for the engine itself. The result: `list[int]`.

    With `k`, the k best of each row, best first; the lower index among equals.
    """

    logits: Tensor
    k: int = 1

    def best(self) -> Tensor:
        """The choices, `(rows · k,)`, on the device."""
        if self.k == 1:
            return self.logits.argmax(-1)
        return torch.as_tensor(self.logits).sort(dim=-1, descending=True, stable=True).indices[:, : self.k].flatten()


@dataclass(frozen=True, slots=True, eq=False)
class Release:
    """Free the own KV of these sequences now instead of at the program's end. The result: None."""

    sequences: Sequence[TokenSequence]


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """Copy adjacent chunks into a sequence's own KV, every key rotated to its position; the engine may overwrite it.

    The result: the `KVCache`, with room for `tokens` and for the answer.
    """

    segments: Sequence[PlacedChunk]
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class WaitFor:
    """Resume when `ready()` is true, which another program brings about, or earlier. The result: None."""

    ready: Callable[[], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Prefill `parts` one after another as one causal sequence, once for all programs that request the same.

    `before` comes first, at position 0: KV that exists already, such as the stored prefix. The result: the placed
    chunks of all parts, `before` included, each at its position in the sequence.
    """

    parts: Sequence[Sequence[int]]
    before: tuple[PlacedChunk, ...] = field(default=())

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """One key per part. Keys are equal if two sequences, and their division into parts, are equal up to the end of
        that part.
        """
        keys, digest = [], hashlib.blake2b(repr([id(chunk.kv) for chunk in self.before]).encode())
        for ids in self.parts:
            digest.update(array("q", (len(ids), *ids)).tobytes())
            keys.append(digest.digest())
        return tuple(keys)

    @property
    def sizes(self) -> dict[Hashable, int]:
        """Tokens of each part by its key, for `Demand.shared`."""
        return {key: len(ids) for key, ids in zip(self.keys, self.parts, strict=True) if ids}


Operation: TypeAlias = Forward | Sample | Argmax | Join | Release | Shared | WaitFor
Program: TypeAlias = Generator[Operation, Any, None]


def answer_from(sequence: TokenSequence, ids: Sequence[int]) -> Program:
    """Answer from one sequence: read the question `ids`, then sample token by token."""
    while True:
        [scores] = yield Forward((sequence,), (ids,))
        ids = ((yield Sample(scores)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextChunk:
    """One retrieved chunk as an engine gets it; `kv` is None for an engine that needs no stored KV.

    `seen` is for encoding it: the tokens of its document that it shall see (`ragkv.ingest.encoding`).
    """

    token_ids: tuple[int, ...]
    score: float
    kv: ChunkKV | None = None
    seen: tuple[int, ...] = ()

    def stored(self) -> ChunkKV:
        """The KV, which the caller must have loaded for this engine's encoding."""
        if self.kv is None:
            raise ValueError("this engine answers from stored KV, but the chunk came without it")
        return self.kv


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question. `chunks` are in ascending relevance (Block-Attention §3.2: the best one is next to the question).

    `prefix` is the KV of `prefix_ids` at positions 0..P-1; None if the engine's `encoding` is None. `question` and
    `prompt` are for engines that first send the model a prompt of their own.
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
    def before(self) -> tuple[PlacedChunk, ...]:
        """The prefix as a placed chunk, for a sequence that sees it; empty if there is none."""
        return () if self.prefix is None else (PlacedChunk(kv=self.prefix, start=0),)

    @property
    def filled(self) -> tuple[int, ...]:
        """Indices of the chunks that have tokens; an empty chunk has no KV."""
        return tuple(index for index, chunk in enumerate(self.chunks) if chunk.token_ids)


class ModelFacts(Protocol):
    """What an engine may read of the model; a `LanguageModel` has all of it."""

    checkpoint: Checkpoint
    tokens: Tokens
    eos_ids: frozenset[int]
    max_positions: int | None
    missing_capabilities: Mapping[Capability, str]
    moves_within: int | None

    def companion(self, kind: Callable[[Any], T], make: Callable[[Any], T] | None = None) -> T: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Upper bounds of what a program needs at one time: sequences, and tokens of own KV in all of them together.

    `shared`: the tokens of the KV that it shares (`Shared.sizes`), counted once for all programs.
    """

    sequences: int
    tokens: int
    shared: Mapping[Hashable, int] = field(default_factory=dict)


class Engine(ABC):
    """Base of all engines. There is one instance per request, and an engine keeps no state between requests.

    `program` yields requests to the runtime, so that the sequences of all questions share one forward pass. `Config` is
    its own frozen dataclass, built from `[tuning.<name>]` of the index's configuration.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Any]]
    counts_winners: ClassVar[bool] = False
    """Whether it reports which chunk proposed each token."""
    most_chunks: ClassVar[int | None] = None
    """The most chunks that it reads, the best ones; None: all of them."""
    whole_documents: ClassVar[bool] = False
    """Whether it reads the whole documents that the chunks are from, in blocks (`ragkv.model.apb`)."""
    context: bool = False
    """Whether the index's chunks saw their document when they were encoded (`[encoding] context`)."""

    def __init__(self, config: Any = None) -> None:
        self.config: Any = self.Config() if config is None else config

    @property
    @abstractmethod
    def encoding(self) -> Encoding | None:
        """The chunk KV that it reads; None for an engine that prefills. A class attribute unless a setting decides."""

    @property
    def needs(self) -> frozenset[Capability]:
        """The capabilities that it requires of a model; all of them, unless an engine overrides this."""
        return frozenset(Capability)

    @property
    def reads(self) -> Encoding | None:
        """The chunk KV that it reads from this index: `encoding`, or `context` in place of `prefixed`."""
        seen = self.context and self.encoding is Encoding.PREFIXED and not self.whole_documents
        return Encoding.CONTEXT if seen else self.encoding

    @property
    def all_needs(self) -> frozenset[Capability]:
        """`needs`, plus those of chunks that were encoded behind others of their document and cut out of their KV."""
        if self.reads is Encoding.CONTEXT:
            return self.needs | {Capability.MOVE, Capability.TENSORS}
        return self.needs

    def warning(self, model: ModelFacts) -> str | None:
        """One sentence that a user should read before trusting this engine on this model; None if there is none."""
        return None

    def charge(self, request: Request, model: ModelFacts) -> float | None:
        """The share of the context that it recomputes for a question, beyond the question's own read: tokens times
        layers, over all tokens of the chunks times all layers. None if its settings do not change that.
        """
        return None

    def demand(self, request: Request, max_new_tokens: int) -> Demand:
        """The most that `program` needs; the default is for an engine with one sequence that reads the suffix."""
        return Demand(sequences=1, tokens=len(request.suffix_ids) + max_new_tokens)

    @abstractmethod
    def program(self, request: Request, model: ModelFacts) -> Program:
        """Read the question and choose tokens until closed."""


def engine_names() -> list[str]:
    """The names that `make_engine` accepts, sorted."""
    return ENGINES.names()


def engine_class(name: str) -> type[Engine]:
    """The engine's class. UsageError names the known ones; ConfigError when a package's engine cannot be imported."""
    require_engine(name)
    try:
        loaded: type[Engine] = ENGINES.load(name)
    except ImportError as error:
        raise ConfigError(f"Engine {name!r} is installed but cannot be loaded ({error}); reinstall it.") from error
    return loaded


def make_engine(name: str, tuning: Mapping[str, Mapping[str, Any]], *, context: int = 0) -> Engine:
    """An engine with its own `[tuning.<name>]` table, for an index with this `[encoding] context`."""
    kind = engine_class(name)
    try:
        config = build_config(kind.Config, tuning.get(name, {}), f"[tuning.{name}]")
    except TypeError as error:
        raise ConfigError(f"[tuning.{name}] does not fit: {error}.") from error
    engine = kind(config)
    engine.context = context > 0
    return engine


_PREFERRED = ("ape", "pced", "full")


def unsupported_reason(engine: Engine, model: ModelFacts) -> str | None:
    """Why `model` cannot run `engine` exactly, as the middle of a sentence; None if it can."""
    missing = model.missing_capabilities
    return next((missing[need] for need in sorted(engine.all_needs) if need in missing), None)


def require_supported(engine: Engine, model: ModelFacts) -> None:
    """Raise UnsupportedModelError, with the reason and an engine that works, if `model` cannot run `engine` exactly."""
    reason = unsupported_reason(engine, model)
    if reason is not None:
        raise UnsupportedModelError(
            f"Engine {engine.name!r} cannot run on model {model.checkpoint.name!r}: {reason}; {_remedy(engine, model)}."
        )


def require_reach(engine: Engine, model: ModelFacts, positions: int) -> None:
    """Raise PromptTooLongError if `engine` would move chunks further than `model` supports."""
    most = model.moves_within
    if most is not None and positions > most and Capability.MOVE in engine.all_needs:
        raise PromptTooLongError(
            f"Engine {engine.name!r} moves chunks, which model {model.checkpoint.name!r} allows only in prompts of up "
            f"to {most} positions, not {positions}; lower --top-k, or {_remedy(engine, model)}."
        )


def _remedy(engine: Engine, model: ModelFacts) -> str:
    """What to do instead of running `engine`; if chunks saw their document, every engine that reads them moves them."""
    if engine.reads is Encoding.CONTEXT and unsupported_reason(make_engine("full", {}), model) is None:
        return "use engine 'full', or set context = 0 under [encoding] in ragkv.toml"
    return f"use engine {supported_or(('full',) if engine.context else _PREFERRED, model)!r}"


def supported_engines(model: ModelFacts) -> list[str]:
    """The names of all engines, untuned, that `model` runs exactly."""
    return [name for name in engine_names() if unsupported_reason(make_engine(name, {}), model) is None]


def supported_or(names: Iterable[str], model: ModelFacts) -> str:
    """The first of these engines that `model` runs exactly, else any engine that it runs exactly."""
    wanted = (*names, *_PREFERRED)
    return next(name for name in wanted if unsupported_reason(make_engine(name, {}), model) is None)
