"""`ragkv ls`: the documents of an index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.console import count, draw, note, print_json, say, size
from ragkv.cli.grid import plain
from ragkv.cli.option import DEFAULT_INDEX, Index, Json, Quiet, Where

if TYPE_CHECKING:
    from ragkv.index.inspection import DocumentView

__all__ = ["ls"]


def ls(
    pattern: Annotated[
        str | None,
        typer.Argument(
            help="Id, source name, path, or a pattern such as 'notes/*'.", metavar="PATTERN", show_default="all"
        ),
    ] = None,
    index: Index = DEFAULT_INDEX,
    where: Where = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List documents with their chunks and sizes; with --quiet, only their ids.

    Example: `ragkv ls '*.pdf' --where title=Handbook* --index my-index`
    """
    from ragkv.index.inspection import list_documents
    from ragkv.pipeline import RagKV

    with RagKV.open(index, readonly=True) as rag:
        found = list_documents(rag.store, [] if pattern is None else [pattern], where or ())
    if as_json:
        print_json({"documents": [one.to_json() for one in found]})
    elif quiet:
        for one in found:
            say(one.document.document_id)
    elif found:
        _table(found)
        chunks = sum(one.stats.chunks for one in found)
        kv = sum(one.stats.kv_bytes for one in found)
        total = f"{count(len(found), 'document')}, {count(chunks, 'chunk')}, KV {size(kv)}"
        note(f"{total} (KV that documents share is counted for each)")
    else:
        note(f"{index} holds no document; add some with ragkv ingest PATH --index {index}.")


def _table(found: list[DocumentView]) -> None:
    table = plain()
    table.add_column("document", overflow="fold")
    for name in ("chunks", "tokens", "KV", "text", "vectors"):
        table.add_column(name, no_wrap=True, justify="right")
    for one in found:
        stats = one.stats
        table.add_row(
            stats.source,
            f"{stats.chunks:,}",
            f"{stats.tokens:,}",
            size(stats.kv_bytes),
            size(stats.text_bytes),
            size(stats.vector_bytes),
        )
    draw(table)
