"""Where the chunks of a question come from: the example itself, or a search of the user's index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ragkv.config import MODES
from ragkv.engines import ContextChunk
from ragkv.errors import UsageError
from ragkv.evaluation.answerer import GIVEN, Contender
from ragkv.evaluation.example import Example
from ragkv.evaluation.loadedmodel import LoadedModel
from ragkv.evaluation.scorer import Scorer

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

__all__ = ["IndexSource", "OwnSource", "Placed", "Source"]

Placed = list[tuple[int, ContextChunk]]
"""Pairs of (position, chunk) in ascending relevance. The position is an index of `Example.chunks`, or a rank."""


class Source(Protocol):
    """Provides models and the chunks that each contender reads.

    `whole` says that chunks are whole texts, which engines for long documents read in blocks.
    """

    whole: bool

    def check(self, contender: Contender) -> None:
        """Raise UsageError, before any work is done, if the contender cannot get chunks."""

    def model(self, name: str, dtype: str | None) -> LoadedModel:
        """The model; it is loaded when it is first needed."""
        ...

    def facts(self, loaded: LoadedModel, example: Example, contender: Contender) -> Any:
        """Plain data that identifies the chunks and their scores."""
        ...

    def chunks(self, loaded: LoadedModel, example: Example, contender: Contender) -> Placed:
        """The chunks in the tokens of the loaded model."""
        ...


class OwnSource:
    """Examples bring their own chunks, which are ranked among themselves."""

    whole = True

    def __init__(self, scorer: Scorer | None = None, *, device: str | None = None) -> None:
        self._scorer = scorer or Scorer(device=device)
        self._device = device

    def check(self, contender: Contender) -> None:
        self._scorer.check(contender.retrieval, rerank=contender.rerank)

    def model(self, name: str, dtype: str | None) -> LoadedModel:
        return LoadedModel(name, dtype, device=self._device)

    def facts(self, loaded: LoadedModel, example: Example, contender: Contender) -> Any:
        ranking = self._scorer.facts(contender.retrieval, rerank=contender.rerank)
        return {"chunks": example.chunks, "ranking": ranking, "top_k": contender.top_k}

    def chunks(self, loaded: LoadedModel, example: Example, contender: Contender) -> Placed:
        ranked = self._scorer.rank(example.question, example.chunks, contender.retrieval, rerank=contender.rerank)
        prompt = loaded.reader(contender.prompt, contender.codec).prompt
        return [
            (index, ContextChunk(token_ids=loaded.chunk_ids(prompt, example.chunks[index]), score=score))
            for index, score in ranked[-(contender.top_k or len(ranked)) :]
        ]


class IndexSource:
    """The user's index is searched as by `ragkv query`; nothing is written."""

    whole = False

    def __init__(self, rag: RagKV, *, device: str | None = None) -> None:
        self._rag = rag
        self._device = device
        self._known: dict[tuple[str, str, str, bool, int | None], list[ContextChunk]] = {}

    def check(self, contender: Contender) -> None:
        if contender.retrieval == GIVEN:
            raise UsageError(f"An index has no chunks in a given order; --retrieval is one of {', '.join(MODES)}.")

    def model(self, name: str, dtype: str | None) -> LoadedModel:
        from ragkv.evaluation.subject import Subject

        subject = Subject.of(self._rag, name, device=self._device)
        return LoadedModel(name, dtype, subject=subject, words=self._rag.config.prompt)

    def facts(self, loaded: LoadedModel, example: Example, contender: Contender) -> Any:
        return [(chunk.token_ids, chunk.score) for _, chunk in self.chunks(loaded, example, contender)]

    def chunks(self, loaded: LoadedModel, example: Example, contender: Contender) -> Placed:
        key = (loaded.name, example.question, contender.retrieval, contender.rerank, contender.top_k)
        if key not in self._known:
            assert loaded.subject is not None
            self._known[key] = loaded.subject.retrieve(
                self._rag,
                example.question,
                top_k=contender.top_k,
                retrieval=contender.retrieval,
                rerank=contender.rerank,
            )
        found = self._known[key]
        return [(len(found) - 1 - at, chunk) for at, chunk in enumerate(found)]
