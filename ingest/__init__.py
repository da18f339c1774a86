"""From files to visible documents: find, read, chunk, encode, commit."""

from ragkv.ingest.ingester import Ingester, Recipe, chunk_vectors
from ragkv.ingest.ready import ReadyChunk, ReadyDocument
from ragkv.ingest.report import IngestProgress, IngestReport
from ragkv.ingest.source import Skipped
from ragkv.ingest.span import find_chunk

__all__ = [
    "IngestProgress",
    "IngestReport",
    "Ingester",
    "ReadyChunk",
    "ReadyDocument",
    "Recipe",
    "Skipped",
    "chunk_vectors",
    "find_chunk",
]
