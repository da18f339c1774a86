"""What an ingest reports: its progress while it works, and its result when it is done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ragkv.boundary.notebook import as_html, card, details, table
from ragkv.ingest.source import Skipped

__all__ = ["IngestProgress", "IngestReport"]

MOST_SHOWN = 100
"""Names that a notebook shows of each list."""


@dataclass(slots=True, kw_only=True)
class IngestProgress:
    """What a progress bar shows; passed to the callback after every step. Bytes are those of the sources.

    When all documents are in the store, the search indexes follow: `building` names the one that is brought up to date
    now, of whose `to_build` chunks or documents `built` are taken up.

    After an interrupt, `indexed` says how many of the `sources` the index holds; unreadable ones are then not counted.
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
    building: str = ""
    built: int = 0
    to_build: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


@dataclass(slots=True, kw_only=True)
class IngestReport:
    """What an ingest did. With `dry_run`, what it would do; then the number of chunks is not known.

    `skipped` are files that are not in the index, and `left_out` are parts missing from files that are; both with the
    reason. `one_block` are documents of several chunks that the engine `apb` reads by plain attention, as they have too
    few tokens to be cut. `kv_encoded` and `kv_reused` count KVs of chunks and blocks, `kv_later` those that the first
    question to read them makes; `kv_bytes` is the uncompressed size of the encoded ones. `encode_seconds` is the part
    of `seconds` that the model took, `embed_seconds` the part that the embedder took.
    """

    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    left_out: list[Skipped] = field(default_factory=list)
    one_block: list[str] = field(default_factory=list)
    chunks: int = 0
    tokens: int = 0
    kv_encoded: int = 0
    kv_reused: int = 0
    kv_later: int = 0
    kv_bytes: int = 0
    encode_seconds: float = 0.0
    embed_seconds: float = 0.0
    seconds: float = 0.0
    dry_run: bool = False

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv ingest --json` prints."""
        found = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}
        for name in ("skipped", "left_out"):
            found[name] = [{"path": str(skip.path), "reason": skip.reason} for skip in getattr(self, name)]
        return found

    def _repr_html_(self) -> str:
        """What a notebook shows: how much was ingested in what time, and the files with what became of them."""
        lists = {
            name: getattr(self, name)
            for name in ("added", "updated", "unchanged", "pruned", "skipped", "left_out", "one_block")
        }
        counts = " · ".join(f"{len(found):,} {name.replace('_', ' ')}" for name, found in lists.items() if found)
        rows = [
            ("chunks", f"{self.chunks:,} of {self.tokens:,} tokens"),
            ("KV", f"{self.kv_encoded:,} encoded, {self.kv_reused:,} reused, {self.kv_later:,} when first asked for"),
            ("KV bytes", f"{self.kv_bytes:,}"),
            (
                "seconds",
                f"{self.seconds:.1f}, of them model {self.encode_seconds:.1f}, embedder {self.embed_seconds:.1f}",
            ),
        ]
        would = "Would ingest: " if self.dry_run else ""
        return card(
            f"<div>{would}{counts or 'no documents'}</div>",
            "" if self.dry_run else table(("", ""), rows),
            *(_listed(name.replace("_", " "), found) for name, found in lists.items() if found),
        )


def _listed(name: str, found: Sequence[str | Skipped]) -> str:
    lines = [each if isinstance(each, str) else f"{each.path}: {each.reason}" for each in found[:MOST_SHOWN]]
    more = f"<li>and {len(found) - MOST_SHOWN:,} more</li>" if len(found) > MOST_SHOWN else ""
    items = "".join(f"<li>{as_html(line)}</li>" for line in lines)
    return details(f"{len(found):,} {name}", f"<ul>{items}{more}</ul>")
