"""Finding chunks and scoring their relevance: BM25 without a model, embedders, rerankers, PCED's fusion."""

from ragkv.retrievers.base import Embedder, Embedding, Hit, Reranker, Retriever, ScoreKind, VectorIndex
from ragkv.retrievers.bge import BGEM3
from ragkv.retrievers.bm25 import BM25, BM25Config
from ragkv.retrievers.fusion import EPSILON, fuse, normalise_rerank, normalise_retrieval
from ragkv.retrievers.registry import embedder_fingerprint, embedder_stamp, load_embedder, load_reranker
from ragkv.retrievers.rerank import CrossEncoder
from ragkv.retrievers.sentence import SentenceEmbedder

__all__ = [
    "BGEM3",
    "BM25",
    "EPSILON",
    "BM25Config",
    "CrossEncoder",
    "Embedder",
    "Embedding",
    "Hit",
    "Reranker",
    "Retriever",
    "ScoreKind",
    "SentenceEmbedder",
    "VectorIndex",
    "embedder_fingerprint",
    "embedder_stamp",
    "fuse",
    "load_embedder",
    "load_reranker",
    "normalise_rerank",
    "normalise_retrieval",
]
