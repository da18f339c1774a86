"""Answer questions about given texts without an index: nothing is searched, and nothing is written."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ragkv.config import EncodingConfig, IndexConfig, RuntimeConfig, StepsConfig
from ragkv.errors import AnswerInterruptedError, PromptTooLongError
from ragkv.index.answer import AnswerStream, AnswerTask, validate_task
from ragkv.index.batch import Answers
from ragkv.index.index import runtime_limits
from ragkv.index.kv_source import After, Prefetch, Reads
from ragkv.model.prompt import render
from ragkv.question import Asked
from ragkv.types import Chunk, Encoding, KVUse, ScoredChunk

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.engines import ContextChunk, Engine, Request
    from ragkv.model.apb.document import BlockExecutor
    from ragkv.model.language_model import LanguageModel
    from ragkv.runtime import Runtime

logger = logging.getLogger(__name__)

_CLOSED = "The contexts were closed before the answer was finished."
_UNSCORED = 0.5  # relevance of a text without a score


class Contexts:
    """Whole texts by name, in prompt order, and the model that reads them. A context manager.

    It answers like `RagKV`. `config` gives the prompt, the decoding, the tuning and the default engine. Engines that
    read chunk KV get it from memory, where each text is encoded once. `executor` encodes the blocks of long texts; by
    default, one after another.
    """

    def __init__(
        self,
        model: LanguageModel,
        texts: Iterable[tuple[str, str]],
        config: IndexConfig,
        *,
        limits: RuntimeConfig | None = None,
        executor: BlockExecutor | None = None,
    ) -> None:
        from ragkv.runtime import runtime_of

        self.config = replace(config, encoding=EncodingConfig(), steps=StepsConfig())
        """Without `[encoding]`, because a text is one chunk with nothing of its document before it, and with a single
        step, because nothing is searched."""
        self.model = model
        self.closed = False
        self.prompt = render(config.prompt, model.tokens)
        self._prefix_ids = self.prompt.prefix_ids(model.tokens)
        self.runtime: Runtime = runtime_of(model, runtime_limits(model, config, limits))
        self._executor = executor
        self._common = [
            given_chunk(self.chunk(text, chunk_id=f"context-{at}"), name) for at, (name, text) in enumerate(texts, 1)
        ]
        self._held: dict[tuple[Encoding, tuple[int, ...]], ChunkKV] = {}  # KV of the common texts and the prefix
        self._warned_plain: set[str] = set()
        self._passing: weakref.WeakValueDictionary[tuple[Encoding, tuple[int, ...]], ChunkKV]
        self._passing = weakref.WeakValueDictionary()

    def __enter__(self) -> Contexts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all running answers."""
        self.closed = True
        self.runtime.close(self, _CLOSED)

    def stream(self, question: Asked, **options: Any) -> AnswerStream:
        """Like `RagKV.stream`; `chunks` replace the common texts for this question."""
        return AnswerStream(self, validate_task(self.config, question, **options))

    def query_each(self, questions: Iterable[Asked], **options: Any) -> Answers:
        """Like `RagKV.query_each`."""
        return Answers(self, self.config, questions, options)

    def chunk(self, text: str, *, chunk_id: str) -> Chunk:
        """A chunk of any text, tokenised as in the prompt."""
        ids = self.prompt.chunk_ids(self.model.tokens, text)
        return Chunk(
            chunk_id=chunk_id, document_id=chunk_id, ordinal=0, text=text, token_ids=ids, start=0, end=len(text)
        )

    # `AnswerBackend` (`ragkv.index.answer`).

    @property
    def owner(self) -> Contexts:
        return self

    def require_open(self) -> None:
        if self.closed:
            raise AnswerInterruptedError(_CLOSED)

    def require(self, task: AnswerTask) -> None:
        from ragkv.engines import require_supported

        require_supported(task.engine, self.model)

    def find(self, task: AnswerTask, on_candidates: Callable[[list[ScoredChunk]], None]) -> list[ScoredChunk]:
        return self._common[::-1] if task.query.chunks is None else list(task.query.chunks)

    def word_weights(self, words: Sequence[str]) -> Mapping[str, float]:
        return {}

    def beginnings(self, task: AnswerTask) -> list[ScoredChunk]:
        return self._common

    def plan(self, engine: Engine, scored: Sequence[ScoredChunk]) -> Reads:
        return Reads(scored=scored)  # nothing to lease: the common KV is held anyway

    def prefetch(self, engine: Engine, likely: Sequence[ScoredChunk]) -> Prefetch | None:
        return None

    def store(self, after: After) -> None:
        """Nothing is written."""

    def ended(self) -> None:
        """Nothing is written."""

    def request(self, task: AnswerTask, reads: Reads, prefetch: Prefetch | None, after: After) -> tuple[Request, KVUse]:
        from ragkv.engines import Request

        scored = reads.scored
        encoding = task.engine.encoding
        suffix = task.suffix_ids(self.prompt, self.model.tokens)
        tokens = len(self._prefix_ids) + sum(len(each.chunk.token_ids) for each in scored) + len(suffix)
        most = self.model.max_positions
        whole = task.engine.whole_documents
        if (encoding is None or whole) and most is not None and tokens > most:
            raise PromptTooLongError(
                f"The question and its context are {tokens} tokens, but model {self.model.checkpoint.name!r} has "
                f"{most} positions; give less context, or ingest the files and ask the index."
            )
        context, use = self._blocks(task, scored) if whole else self._chunks(encoding, scored)
        return Request(
            prefix_ids=self._prefix_ids,
            prefix=None
            if encoding is None or not self._prefix_ids
            else self._kv(Encoding.STANDALONE, self._prefix_ids),
            chunks=tuple(context),
            suffix_ids=suffix,
            question=task.query.question,
            prompt=self.prompt,
        ), use

    def _chunks(self, encoding: Encoding | None, scored: Sequence[ScoredChunk]) -> tuple[list[ContextChunk], KVUse]:
        """Each text as one chunk."""
        from ragkv.engines import ContextChunk

        kvs, use = self._kvs(encoding, [each.chunk.token_ids for each in scored])
        pairs = zip(scored, kvs, strict=True)
        return [ContextChunk(token_ids=each.chunk.token_ids, score=each.score, kv=kv) for each, kv in pairs], use

    def _blocks(self, task: AnswerTask, scored: Sequence[ScoredChunk]) -> tuple[list[ContextChunk], KVUse]:
        """Each text as blocks encoded for this question (APB §3.3); a short one as one chunk, with a warning."""
        from ragkv.engines import ContextChunk
        from ragkv.model.apb.document import SequentialExecutor, document_for_question

        prefix = self._kv(Encoding.STANDALONE, self._prefix_ids) if self._prefix_ids else None
        question = self.prompt.chunk_ids(self.model.tokens, task.query.question)
        context: list[ContextChunk] = []
        use = KVUse()
        for candidate in scored:
            ids = candidate.chunk.token_ids
            long_document = document_for_question(self.model, task.engine.config, ids, question, prefix)
            if long_document is None:
                if task.engine.config.lengths(len(ids)) is None:
                    self._warn_plain(candidate.source, len(ids))
                one, of_one = self._chunks(task.engine.encoding, [candidate])
                context, use = [*context, *one], use + of_one
                continue
            for number, block in enumerate((self._executor or SequentialExecutor()).run(long_document)):
                span = long_document.layout.span(number)
                context.append(ContextChunk(token_ids=ids[span.start : span.stop], score=candidate.score, kv=block.kv))
            use += KVUse(hits=0, misses=long_document.layout.blocks, bytes=0, tokens=0)
        return context, use

    def _warn_plain(self, name: str, tokens: int) -> None:
        from ragkv.model.apb.document import PLAIN_BELOW

        if name not in self._warned_plain:
            self._warned_plain.add(name)
            logger.warning(
                "%s has %d tokens and is read as one block, by plain attention: apb is for documents of %d tokens and "
                "more (--block-tokens cuts it all the same)",
                name,
                tokens,
                PLAIN_BELOW,
            )

    def _kvs(self, encoding: Encoding | None, chunks: Sequence[tuple[int, ...]]) -> tuple[list[ChunkKV | None], KVUse]:
        """Each chunk's KV, and how many were encoded by an earlier question."""
        if encoding is None:
            return [None] * len(chunks), KVUse()
        known = [(encoding, ids) in self._held or (encoding, ids) in self._passing for ids in chunks]
        kvs = [self._kv(encoding, ids) for ids in chunks]
        hits = [kv for kv, was in zip(kvs, known, strict=True) if was]
        use = KVUse(
            hits=len(hits),
            misses=len(kvs) - len(hits),
            bytes=sum(kv.nbytes for kv in hits),
            tokens=sum(kv.tokens for kv in hits),
            memory_hits=len(hits),
        )
        return [*kvs], use

    def _kv(self, encoding: Encoding, ids: tuple[int, ...]) -> ChunkKV:
        key = (encoding, ids)
        kv = self._held.get(key) or self._passing.get(key)
        if kv is None:
            prefixed = encoding is Encoding.PREFIXED and self._prefix_ids
            prefix = self._kv(Encoding.STANDALONE, self._prefix_ids) if prefixed else None
            [kv] = self.model.encode([ids], prefix=prefix)
            self._passing[key] = kv
            if ids == self._prefix_ids or any(each.chunk.token_ids == ids for each in self._common):
                self._held[key] = kv
        return kv


def given_chunk(chunk: Chunk, source: str) -> ScoredChunk:
    """A chunk that was given, not retrieved, so it has no scores of stages."""
    return ScoredChunk(chunk=chunk, source=source, retrieval_score=0.0, rerank_score=None, score=_UNSCORED)
