"""`ragkv show`: one chunk, and everything that the index holds for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.console import beginning, count, print_json, say, say_text, size
from ragkv.cli.grid import print_facts
from ragkv.cli.option import DEFAULT_INDEX, Index, Json, Quiet
from ragkv.types import Chunk

if TYPE_CHECKING:
    from ragkv.index.inspection import ChunkView
    from ragkv.store import KVRecord

__all__ = ["show"]


def show(
    chunk: Annotated[
        str, typer.Argument(help="A chunk's id or its start, or DOCUMENT:NUMBER (from 0).", metavar="CHUNK")
    ],
    index: Index = DEFAULT_INDEX,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show a chunk: its text, place, KV records, vectors and neighbours. With --quiet, only its text.

    Example: `ragkv show notes.md:3 --index my-index`
    """
    from ragkv.index.inspection import chunk_named, look_at
    from ragkv.pipeline import RagKV

    with RagKV.open(index, readonly=True) as rag:
        view = look_at(rag.store, chunk_named(rag.store, chunk))
    if as_json:
        print_json(view.to_json())
        return
    if not quiet:
        _facts(view)
        say()
    say_text(view.chunk.text)


def _facts(view: ChunkView) -> None:
    chunk = view.chunk
    place = [f"chunk {chunk.ordinal}"]
    place += [] if chunk.page is None else [f"page {chunk.page}"]
    place += [] if chunk.heading is None else [f"under {chunk.heading!r}"]
    print_facts(
        [
            ("chunk", chunk.chunk_id),
            ("document", chunk.document_id),
            ("place", ", ".join(place)),
            ("characters", f"{chunk.start:,} to {chunk.end:,} of the document's text"),
            ("tokens", f"{len(chunk.token_ids):,}, the separator after it included"),
            *((f"KV, {record.encoding}", _record(record)) for record in view.kv),
            *([] if view.kv else [("KV", "none: the question that needs it encodes it")]),
            ("vectors", ", ".join(f"{kind} ({what})" for kind, what in view.vectors.items()) or "none"),
            ("before", _neighbour(view.before)),
            ("after", _neighbour(view.after)),
        ]
    )


def _record(record: KVRecord) -> str:
    saw = f"after a prefix of {count(record.prefix_tokens, 'token')}, " if record.prefix_tokens else ""
    shared = "" if record.shared_by == 1 else f", shared by {count(record.shared_by, 'chunk')}"
    return (
        f"{record.codec}, {size(record.bytes)} of {size(record.raw_bytes)}, {saw}{count(record.layers, 'layer')} of "
        f"{record.dtype}, in {count(record.segments, 'segment')}{shared}, model {record.model[:12]}"
    )


def _neighbour(chunk: Chunk | None) -> str:
    return "none" if chunk is None else f"{chunk.chunk_id}: {beginning(chunk.text, 48)}"
