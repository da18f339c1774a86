"""A language model of LlamaIndex that says what a test told it to, and a bag-of-words embedder."""

import re
import zlib
from typing import Any

from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata


class FixedLLM(CustomLLM):
    """Answers with `says[key]` for the first key that its prompt holds; without one a test must fail."""

    says: dict[str, str]

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(model_name="fixed")

    def complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponse:
        return CompletionResponse(text=next(text for key, text in self.says.items() if key in prompt))

    def stream_complete(self, prompt: str, formatted: bool = False, **_: Any) -> Any:
        raise NotImplementedError


class WordEmbedding(BaseEmbedding):
    """Cosine similarity of the words of two texts."""

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = [0.0] * 256
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32(word.encode()) % 256] += 1.0
        return vector

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)
