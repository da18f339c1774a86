"""What an answer stands on: where its chunks are found, their KV, and the runtime that reads them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ragkv.errors import RetrievalError
from ragkv.index.finder import Finder
from ragkv.index.index import Index
from ragkv.index.recall import After, Ahead, Recall
from ragkv.index.requested import index_request
from ragkv.index.task import Task
from ragkv.types import Encoding, KVUse, ScoredChunk

if TYPE_CHECKING:
    from ragkv.engines import Request
    from ragkv.model.language import LanguageModel
    from ragkv.runtime import Runtime

__all__ = ["Ground", "IndexGround"]


class Ground(Protocol):
    """What an `AnswerStream` asks for, step by step. Chunks are best first in `find`, best last in all others."""

    @property
    def owner(self) -> object:
        """Whose answers they are: it may end them all (`Runtime.close`)."""

    @property
    def closed(self) -> bool:
        """Whether the owner was closed."""

    def require_open(self) -> None:
        """AnswerInterruptedError once the owner was closed."""

    @property
    def model(self) -> LanguageModel:
        """The generation model, loaded at the first use."""

    @property
    def runtime(self) -> Runtime:
        """Where its questions are answered."""

    def require(self, task: Task) -> None:
        """Load what answering takes, which is no part of answering, and check that it goes together."""

    def find(self, task: Task, on_candidates: Callable[[list[ScoredChunk]], None]) -> list[ScoredChunk]:
        """The chunks for a question; RetrievalError when there is none."""

    def sizes(
        self, encoding: Encoding | None, scored: Sequence[ScoredChunk], *, whole: bool = False
    ) -> Mapping[Hashable, int]:
        """The KV that the question reads, in bytes; `whole`: of the documents that the chunks are from."""

    def ahead(self, encoding: Encoding | None, likely: Sequence[ScoredChunk]) -> Ahead | None:
        """Begin to load these chunks' KV while something else works."""

    def request(
        self, task: Task, scored: Sequence[ScoredChunk], ahead: Ahead | None, after: After
    ) -> tuple[Request, KVUse]:
        """What the engine starts from, and how much of it was stored; `after` takes what is to be stored later."""

    def store(self, after: After) -> None:
        """Have done what `request` has put off: the first token is there."""

    def ended(self) -> None:
        """An answer has ended."""


class IndexGround:
    """An index: its documents are searched, its KV is stored."""

    def __init__(self, index: Index, finder: Finder, recall: Recall) -> None:
        self._index = index
        self._finder = finder
        self._recall = recall
        self.sizes = recall.sizes
        self.ahead = recall.ahead

    @property
    def owner(self) -> Index:
        return self._index

    @property
    def closed(self) -> bool:
        return self._index.closed

    def require_open(self) -> None:
        self._index.require_open()

    @property
    def model(self) -> LanguageModel:
        return self._index.model

    @property
    def runtime(self) -> Runtime:
        return self._index.runtime

    def require(self, task: Task) -> None:
        from ragkv.engines import require_able

        index = self._index
        index.require_same_model()
        require_able(task.engine, index.model)  # before any KV is read or made for it
        _ = index.runtime
        if task.chunks is None:
            index.encoders.load(embedder=task.search.mode != "bm25", reranker=task.search.rerank)

    def find(self, task: Task, on_candidates: Callable[[list[ScoredChunk]], None]) -> list[ScoredChunk]:
        if task.chunks is not None:
            found = list(task.chunks)
        else:
            found = self._finder.find(task.question, task.search, on_candidates=on_candidates)
        if not found:
            raise RetrievalError(
                f"The index at {self._index.folder} holds no document yet; add some with: ragkv ingest PATH"
                if self._index.store.empty
                else "No chunk of the index matches the question; ask with words that the documents use."
            )
        return found

    def request(
        self, task: Task, scored: Sequence[ScoredChunk], ahead: Ahead | None, after: After
    ) -> tuple[Request, KVUse]:
        asked = task.engine, task.question, scored, ahead
        return index_request(self._index, self._recall, *asked, keep=task.keep, after=after)

    def store(self, after: After) -> None:
        while after:
            self._index.keeper.later(after.pop(0))

    def ended(self) -> None:
        self._index.keeper.settle()
