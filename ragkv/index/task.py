"""One question with everything that its answer depends on, settled before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Required, Unpack

from ragkv.config import IndexConfig, build_config
from ragkv.decoding import Decoding
from ragkv.errors import UsageError
from ragkv.index.search import Retrieval, SearchSettings, search_settings
from ragkv.types import ScoredChunk

if TYPE_CHECKING:
    from ragkv.engines import Engine
    from ragkv.runtime import Generation

__all__ = ["Asked", "QueryOptions", "Task", "settle_asked", "settle_task"]


class QueryOptions(Retrieval, total=False):
    """What a question takes besides its text; unset or None: as `ragkv.toml` says."""

    engine: str | None
    top_k: int | None
    max_new_tokens: int
    """At most so many tokens are generated; 128 unless told."""
    decoding: Decoding | Mapping[str, Any] | None
    """A `Decoding`, or the settings that differ from the index's `[decoding]` table: `{"temperature": 0.7}`."""
    logits_processors: Sequence[Any]
    """transformers' own kind of object, given the generated tokens; not shared between requests if it keeps state."""
    stopping_criteria: Sequence[Any]
    chunks: Sequence[ScoredChunk] | None
    """Best first: answer from these instead of what retrieval finds; they need not be the index's own."""
    keep: bool
    """Store the KV of `chunks` that are not the index's own, until the next `gc`."""


class Asked(QueryOptions, total=False):
    """A question with options of its own, which go before those that are given for all."""

    question: Required[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question and how it is answered."""

    question: str
    engine: Engine
    search: SearchSettings
    max_new_tokens: int
    decoding: Decoding
    logits_processors: Sequence[Any] = ()
    stopping_criteria: Sequence[Any] = ()
    chunks: Sequence[ScoredChunk] | None = None
    keep: bool = False

    @property
    def generation(self) -> Generation:
        """How its tokens are chosen."""
        from ragkv.runtime import Generation

        return Generation(
            max_new_tokens=self.max_new_tokens,
            decoding=self.decoding,
            processors=self.logits_processors,
            criteria=self.stopping_criteria,
        )


def settle_task(
    config: IndexConfig,
    question: str,
    *,
    engine: str | None = None,
    top_k: int | None = None,
    max_new_tokens: int = 128,
    decoding: Decoding | Mapping[str, Any] | None = None,
    logits_processors: Sequence[Any] = (),
    stopping_criteria: Sequence[Any] = (),
    chunks: Sequence[ScoredChunk] | None = None,
    keep: bool = False,
    **retrieval: Unpack[Retrieval],
) -> Task:
    """The task that `QueryOptions` describe, the rest as the index's configuration says.

    Raises UsageError for an unknown engine, `top_k` or `max_new_tokens` below 1, an empty question or a bad setting.
    """
    from ragkv.engines import make_engine

    if not question.strip():
        raise UsageError("The question is empty; ask something.")
    if any("\ud800" <= char <= "\udfff" for char in question):  # what is left of bytes that are not UTF-8
        raise UsageError("The question is not valid Unicode text; write it in UTF-8.")
    if max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens must be at least 1, not {max_new_tokens}.")
    if isinstance(decoding, Decoding):
        settings = decoding
    else:
        settings = build_config(Decoding, asdict(config.decoding) | dict(decoding or {}), "decoding")
    return Task(
        question=question.strip(),
        engine=make_engine(engine or config.default_engine, config.tuning),
        search=search_settings(config, config.top_k if top_k is None else top_k, **retrieval),
        max_new_tokens=max_new_tokens,
        decoding=settings.settled(),
        logits_processors=logits_processors,
        stopping_criteria=stopping_criteria,
        chunks=chunks,
        keep=keep,
    )


def settle_asked(config: IndexConfig, asked: str | Asked, options: QueryOptions) -> Task:
    """The task of one of many questions, of which `options` hold; UsageError as for `settle_task`."""
    own: dict[str, Any] = {"question": asked} if isinstance(asked, str) else dict(asked)
    if unknown := sorted(own.keys() - Asked.__annotations__.keys()):
        raise UsageError(
            f"A question has no option {unknown[0]!r}; there are {', '.join(sorted(Asked.__annotations__))}."
        )
    if not isinstance(own.get("question"), str):
        raise UsageError('A question is a text, or options with its text as "question".')
    return settle_task(config, own.pop("question"), **{**options, **own})
