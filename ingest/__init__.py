"""From files to visible documents: find, read, chunk, encode, commit."""

from ragkv.ingest.ingester import Ingester, Recipe, chunk_vectors
from ragkv.ingest.parser import Parsed, Section, Unreadable, join_rows, sections_under
from ragkv.ingest.plain import decode
from ragkv.ingest.preview import preview
from ragkv.ingest.report import IngestProgress, IngestReport
from ragkv.ingest.source import Skipped, SourceFile
from ragkv.ingest.span import find_chunk
from ragkv.ingest.supplied import supplied

__all__ = [
    "IngestProgress",
    "IngestReport",
    "Ingester",
    "Parsed",
    "Recipe",
    "Section",
    "Skipped",
    "SourceFile",
    "Unreadable",
    "chunk_vectors",
    "decode",
    "find_chunk",
    "join_rows",
    "preview",
    "sections_under",
    "supplied",
]
