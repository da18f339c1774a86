"""ragkv in LlamaIndex: a query engine, a retriever, an ingestion step and a reranker (docs/llama-index.md)."""

from ragkv.errors import MissingExtraError, install_hint
from ragkv.integrations.llama_index.nodes import RagKVIngest
from ragkv.integrations.llama_index.query_engine import RagKVQueryEngine, RagKVRerank, RagKVRetriever

__all__ = [
    "RagKVIngest",
    "RagKVQueryEngine",
    "RagKVRerank",
    "RagKVRetriever",
]


try:
    import llama_index.core  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"ragkv.integrations.llama_index needs LlamaIndex; {install_hint('llama-index')}."
    ) from error
