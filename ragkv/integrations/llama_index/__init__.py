"""ragkv in LlamaIndex: a query engine, a retriever, an ingestion step and a reranker (docs/llama-index.md)."""

from ragkv.errors import MissingExtraError

try:
    import llama_index.core  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError(
        "ragkv.integrations.llama_index needs LlamaIndex; install it with: pip install 'ragkv[llama-index]'"
    ) from error

from ragkv.integrations.llama_index.ingest import RagKVIngest
from ragkv.integrations.llama_index.query_engine import RagKVQueryEngine
from ragkv.integrations.llama_index.rerank import RagKVRerank
from ragkv.integrations.llama_index.retriever import RagKVRetriever

__all__ = ["RagKVIngest", "RagKVQueryEngine", "RagKVRerank", "RagKVRetriever"]
