"""Retrieval: BM25, embedders, vector indexes, rerankers, and PCED's fusion of their scores."""

from ragkv.retrievers.base import (
    EPSILON,
    Embedder,
    Embedding,
    Hit,
    Reranker,
    ScoreKind,
    VectorSearch,
    fuse,
    normalise_rerank,
    normalise_retrieval,
    reciprocal_rank_fusion,
    relative_score_fusion,
)
from ragkv.retrievers.bm25 import BM25
from ragkv.retrievers.embedders import (
    BGEM3,
    SentenceEmbedder,
    embedder_fingerprint,
    embedder_modes,
    embedder_stamp,
    load_embedder,
)
from ragkv.retrievers.rerankers import CrossEncoder, load_reranker, reranker_fingerprint
from ragkv.retrievers.vectors import DenseIndex, SparseIndex, colbert_scores

__all__ = [
    "BGEM3",
    "BM25",
    "EPSILON",
    "CrossEncoder",
    "DenseIndex",
    "Embedder",
    "Embedding",
    "Hit",
    "Reranker",
    "ScoreKind",
    "SentenceEmbedder",
    "SparseIndex",
    "VectorSearch",
    "colbert_scores",
    "embedder_fingerprint",
    "embedder_modes",
    "embedder_stamp",
    "fuse",
    "load_embedder",
    "load_reranker",
    "normalise_rerank",
    "normalise_retrieval",
    "reciprocal_rank_fusion",
    "relative_score_fusion",
    "reranker_fingerprint",
]
