"""Finding chunks and scoring their relevance: BM25 without a model, indexes of vectors, PCED's fusion."""

from ragkv.retrievers.base import Embedder, Embedding, Hit, Reranker, Retriever, ScoreKind, VectorIndex
from ragkv.retrievers.bm25 import BM25, BM25Config
from ragkv.retrievers.colbert import colbert_scores
from ragkv.retrievers.dense import DenseConfig, DenseIndex
from ragkv.retrievers.fusion import EPSILON, fuse, normalise_rerank, normalise_retrieval
from ragkv.retrievers.hybrid import reciprocal_rank_fusion
from ragkv.retrievers.sparse import SparseIndex

__all__ = [
    "BM25",
    "EPSILON",
    "BM25Config",
    "DenseConfig",
    "DenseIndex",
    "Embedder",
    "Embedding",
    "Hit",
    "Reranker",
    "Retriever",
    "ScoreKind",
    "SparseIndex",
    "VectorIndex",
    "colbert_scores",
    "fuse",
    "normalise_rerank",
    "normalise_retrieval",
    "reciprocal_rank_fusion",
]
