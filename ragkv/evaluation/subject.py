"""The model that is judged: the index's own, or another one on the same documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from ragkv.engines import ContextChunk
from ragkv.errors import KVMismatchError
from ragkv.index.search import Retrieval
from ragkv.model.prompt import Prompt, render

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel
    from ragkv.pipeline import RagKV

__all__ = ["Subject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with its prompt. `own`: the index is configured with it. `current`: it also cut the index's chunks.

    A model that did not cut the chunks reads their texts in its own tokens, so it can be tried before an ingest.
    """

    name: str
    model: LanguageModel
    prompt: Prompt
    fingerprint: str
    own: bool
    current: bool

    @classmethod
    def of(cls, rag: RagKV, name: str | None = None, *, device: str | None = None) -> Subject:
        """Load `name`, or the index's model. Raises ModelLoadError or UnsupportedModelError."""
        if name is not None and name != rag.config.model:
            from ragkv.model.language import LanguageModel

            model = LanguageModel.load(name, dtype=rag.config.dtype, device=device)
            revision = None if model.checkpoint.local else model.revision
            return cls(
                name=name,
                model=model,
                prompt=render(rag.config.prompt, model.tokens),
                fingerprint=model.checkpoint.fingerprint(rag.config.dtype, revision, device=str(model.device)),
                own=False,
                current=False,
            )
        try:
            rag.index.require_same_model()
            current = True
        except KVMismatchError:
            current = False
        return cls(
            name=rag.config.model,
            model=rag.model,
            prompt=rag.prompt,
            fingerprint=rag.fingerprint,
            own=True,
            current=current,
        )

    def retrieve(
        self, rag: RagKV, question: str, *, top_k: int | None = None, **retrieval: Unpack[Retrieval]
    ) -> list[ContextChunk]:
        """The chunks that the index finds, in this model's tokens, in ascending relevance as engines expect."""
        return [
            ContextChunk(
                token_ids=(
                    found.chunk.token_ids
                    if self.current
                    else self.prompt.chunk_ids(self.model.tokens, found.chunk.text)
                ),
                score=found.score,
            )
            for found in reversed(rag.retrieve(question, top_k=top_k, **retrieval))
        ]
