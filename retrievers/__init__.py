"""Finding chunks and scoring their relevance: BM25 without a model, embedders, indexes, rerankers, PCED's fusion."""

from ragkv.retrievers.base import Embedder, Embedding, Hit, Reranker, Retriever, ScoreKind, VectorIndex
from ragkv.retrievers.bge import BGEM3
from ragkv.retrievers.bm25 import BM25, BM25Config
from ragkv.retrievers.colbert import colbert_scores
from ragkv.retrievers.dense import DenseConfig, DenseIndex
from ragkv.retrievers.fusion import EPSILON, fuse, normalise_rerank, normalise_retrieval
from ragkv.retrievers.hybrid import reciprocal_rank_fusion, relative_score_fusion
from ragkv.retrievers.registry import (
    embedder_fingerprint,
    embedder_modes,
    embedder_stamp,
    load_embedder,
    load_reranker,
    reranker_fingerprint,
)
from ragkv.retrievers.rerank import CrossEncoder
from ragkv.retrievers.sentence import SentenceEmbedder
from ragkv.retrievers.sparse import SparseIndex

__all__ = [
    "BGEM3",
    "BM25",
    "EPSILON",
    "BM25Config",
    "CrossEncoder",
    "DenseConfig",
    "DenseIndex",
    "Embedder",
    "Embedding",
    "Hit",
    "Reranker",
    "Retriever",
    "ScoreKind",
    "SentenceEmbedder",
    "SparseIndex",
    "VectorIndex",
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
