"""How an ingest makes chunks, KV and vectors of a document, as one hash that is kept beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragkv.config import IndexConfig
from ragkv.model.prompt import Prompt
from ragkv.types import Encoding

__all__ = ["Recipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides what an ingest stores for a document. If it changes, the document is ingested again."""

    model: str
    """The model's fingerprint."""
    prompt: Prompt
    chunk_tokens: int
    codec: str
    encodings: tuple[Encoding, ...]
    embedder: str | None = None
    """The embedder's fingerprint; None for an index without vectors."""
    vectors: tuple[str, ...] = ()
    blocks: Mapping[str, object] | None = None
    """How long documents are cut into blocks (`ragkv.engines.apb`); None for an index without such."""

    @classmethod
    def of(
        cls,
        config: IndexConfig,
        *,
        model: str,
        prompt: Prompt,
        encodings: Sequence[Encoding],
        embedder: str | None = None,
        blocks: Mapping[str, object] | None = None,
    ) -> Recipe:
        return cls(
            model=model,
            prompt=prompt,
            chunk_tokens=config.chunk_tokens,
            codec=config.codec,
            encodings=tuple(sorted(encodings)),
            embedder=embedder,
            vectors=() if embedder is None else tuple(sorted(config.vectors)),
            blocks=blocks,
        )

    def digest(self) -> str:
        """The hex digest that the store keeps beside each document.

        It must stay the same for old indexes: facts that were added later enter it only where they are not the default.
        """
        facts: dict[str, object] = {
            "model": self.model,
            "prefix": self.prompt.before_contexts if Encoding.PREFIXED in self.encodings else "",
            "separator": self.prompt.separator,
            "chunk_tokens": self.chunk_tokens,
            "codec": self.codec,
            "encodings": [encoding.value for encoding in self.encodings],
        }
        if self.prompt.bos != "auto" and Encoding.PREFIXED in self.encodings:
            facts["bos"] = self.prompt.bos
        if self.embedder is not None:
            facts |= {"embedder": self.embedder, "vectors": self.vectors}
        if self.blocks is not None:
            facts |= {"blocks": dict(self.blocks), "prefix": self.prompt.before_contexts}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
