"""From files to visible documents: find, read, chunk, encode, commit."""

from ragkv.ingest.ingester import Ingester, IngestProgress, IngestReport, Recipe
from ragkv.ingest.source import Skipped

__all__ = ["IngestProgress", "IngestReport", "Ingester", "Recipe", "Skipped"]
