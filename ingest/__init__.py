"""From files to visible documents: find, read, chunk, encode, commit."""

from typing import TYPE_CHECKING, Any

from ragkv.ingest.limit import Limits
from ragkv.ingest.parser import Parsed, Section, Unreadable, join_rows, sections_under
from ragkv.ingest.plain import decode
from ragkv.ingest.preview import preview, require_readable
from ragkv.ingest.ready import ReadyChunk, ReadyDocument
from ragkv.ingest.report import IngestProgress, IngestReport
from ragkv.ingest.source import Skipped, SourceFile
from ragkv.ingest.span import find_chunk
from ragkv.ingest.supplied import supplied

if TYPE_CHECKING:
    from ragkv.ingest.ingester import Ingester, batches_of, chunk_vectors, encode_identities
    from ragkv.ingest.recipe import Recipe

__all__ = [
    "IngestProgress",
    "IngestReport",
    "Ingester",
    "Limits",
    "Parsed",
    "ReadyChunk",
    "ReadyDocument",
    "Recipe",
    "Section",
    "Skipped",
    "SourceFile",
    "Unreadable",
    "batches_of",
    "chunk_vectors",
    "decode",
    "encode_identities",
    "find_chunk",
    "join_rows",
    "preview",
    "require_readable",
    "sections_under",
    "supplied",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is used: the process that reads files imports this package too."""
    if name in ("Ingester", "Recipe", "batches_of", "chunk_vectors", "encode_identities"):
        from ragkv.ingest import ingester

        return getattr(ingester, name)
    raise AttributeError(f"module 'ragkv.ingest' has no attribute {name!r}")
