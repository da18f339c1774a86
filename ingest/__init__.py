"""Ingestion: find, read, chunk and encode documents, and commit them to the store."""

from typing import TYPE_CHECKING, Any

from ragkv.ingest.charset import decode
from ragkv.ingest.ingester import (
    Ingester,
    IngestFingerprint,
    IngestProgress,
    IngestReport,
    MadeDocument,
    Make,
    ReadyChunk,
    ReadyDocument,
    batches_of,
    chunk_vectors,
    encode_identities,
    preview,
    require_readable,
)
from ragkv.ingest.parser import Parsed, ParseLimits, Section, Unreadable, join_rows, sections_under
from ragkv.ingest.source import Skipped, SourceFile, from_bytes

if TYPE_CHECKING:
    from ragkv.ingest.web import from_web

__all__ = [
    "IngestFingerprint",
    "IngestProgress",
    "IngestReport",
    "Ingester",
    "MadeDocument",
    "Make",
    "ParseLimits",
    "Parsed",
    "ReadyChunk",
    "ReadyDocument",
    "Section",
    "Skipped",
    "SourceFile",
    "Unreadable",
    "batches_of",
    "chunk_vectors",
    "decode",
    "encode_identities",
    "from_bytes",
    "from_web",
    "join_rows",
    "preview",
    "require_readable",
    "sections_under",
]


def __getattr__(name: str) -> Any:
    """Import the module of the web lazily: the process that reads files imports this package too."""
    if name == "from_web":
        from ragkv.ingest.web import from_web

        return from_web
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
