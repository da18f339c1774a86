"""Finding chunks and scoring their relevance: BM25 without a model, protocols for the rest, PCED's fusion."""

from ragkv.retrievers.base import Embedder, Embedding, Hit, Reranker, Retriever, ScoreKind, VectorIndex
from ragkv.retrievers.bm25 import BM25, BM25Config
from ragkv.retrievers.fusion import EPSILON, fuse, normalise_rerank, normalise_retrieval

__all__ = [
    "BM25",
    "EPSILON",
    "BM25Config",
    "Embedder",
    "Embedding",
    "Hit",
    "Reranker",
    "Retriever",
    "ScoreKind",
    "VectorIndex",
    "fuse",
    "normalise_rerank",
    "normalise_retrieval",
]
