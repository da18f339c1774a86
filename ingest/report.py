"""What an ingest tells: while it works, and when it is done."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ragkv.ingest.source import Skipped

__all__ = ["IngestProgress", "IngestReport"]


@dataclass(slots=True, kw_only=True)
class IngestProgress:
    """What a progress bar shows; handed to the callback after every step. Bytes of sources, tokens encoded.

    `indexed` is told when an interrupt ends it: how many of the `sources` (then less the unreadable) the index holds.
    """

    sources: int
    total_bytes: int
    done_bytes: float = 0
    done_sources: int = 0
    indexed: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    encode_seconds: float = 0.0
    current: str = ""
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


@dataclass(slots=True, kw_only=True)
class IngestReport:
    """What an ingest did or, with `dry_run`, would do: then it is not known how many chunks.

    `skipped` are the files that are not in the index, `left_out` the parts that those in it lack; both say why.
    `kv_encoded`/`kv_reused` count chunk KVs, `kv_bytes` those of the encoded, uncompressed; `encode_seconds` is the
    part of `seconds` that the model took, `embed_seconds` that of the embedder.
    """

    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    left_out: list[Skipped] = field(default_factory=list)
    chunks: int = 0
    tokens: int = 0
    kv_encoded: int = 0
    kv_reused: int = 0
    kv_bytes: int = 0
    encode_seconds: float = 0.0
    embed_seconds: float = 0.0
    seconds: float = 0.0
    dry_run: bool = False

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv ingest --json` prints."""
        return {
            "added": self.added,
            "updated": self.updated,
            "unchanged": self.unchanged,
            "pruned": self.pruned,
            "skipped": [{"path": str(s.path), "reason": s.reason} for s in self.skipped],
            "left_out": [{"path": str(s.path), "reason": s.reason} for s in self.left_out],
            "chunks": self.chunks,
            "tokens": self.tokens,
            "kv_encoded": self.kv_encoded,
            "kv_reused": self.kv_reused,
            "kv_bytes": self.kv_bytes,
            "encode_seconds": round(self.encode_seconds, 3),
            "embed_seconds": round(self.embed_seconds, 3),
            "seconds": round(self.seconds, 3),
            "dry_run": self.dry_run,
        }
