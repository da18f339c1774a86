"""What a question may ask of an index besides its words: the same fields in every protocol that the server speaks."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from ragkv.index.task import QueryOptions
from ragkv.server.words import Words

__all__ = ["Options"]

_DECODING = ("temperature", "top_p", "min_p", "top_k_tokens", "repetition_penalty", "seed")


class Options(BaseModel):
    """How a question is searched for and answered; what is left out or null is as `ragkv.toml` says."""

    engine: str | None = None
    top_k: int | None = None
    retrieval: str | None = None
    rerank: bool | None = None
    candidates: int | None = None
    where: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k_tokens: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    def most_tokens(self) -> int | None:
        """How many tokens the answer may have at most; None for as many as `RagKV.query` lets it have."""
        raise NotImplementedError

    def query_options(self, words: Words, *, engine: str | None = None) -> QueryOptions:
        """The options of `RagKV.stream`, which checks them; `engine` goes before the field."""
        decoding: dict[str, Any] = {name: getattr(self, name) for name in _DECODING}
        decoding["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        options: QueryOptions = {
            "engine": engine or self.engine,
            "top_k": self.top_k,
            "retrieval": self.retrieval,
            "rerank": self.rerank,
            "candidates": self.candidates,
            "where": self.where or (),
            "search_for": words.search,
            "decoding": {name: value for name, value in decoding.items() if value is not None},
        }
        most = self.most_tokens()
        if most is not None:
            options["max_new_tokens"] = most
        return options
