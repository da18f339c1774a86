"""`ragkv ls`: the documents of an index."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.console import count, draw, note, print_json, say, size
from ragkv.cli.grid import plain
from ragkv.cli.option import DEFAULT_INDEX, Index, Json, Quiet, Where
from ragkv.cli.program import brief

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragkv.index.inspection import DocumentView

__all__ = ["ls"]

TERMINAL_ROWS = 50


def ls(
    pattern: Annotated[
        str | None,
        typer.Argument(
            help="Id, source name, path, or a pattern such as 'notes/*'.", metavar="PATTERN", show_default="all"
        ),
    ] = None,
    index: Index = DEFAULT_INDEX,
    where: Where = None,
    limit: Annotated[
        int | None,
        typer.Option(help="How many documents to list; 0 lists all.", min=0, show_default="50 on a terminal, else all"),
    ] = None,
    after: Annotated[
        str, typer.Option(help="List the documents behind this id, as the page before named it.", show_default="")
    ] = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List documents with their chunks and sizes; with --quiet, only their ids.

    A large index is listed page by page: `--limit` documents behind the id `--after`. Without a pattern or
    conditions, a page costs the same at any size of the index.

    Example: `ragkv ls '*.pdf' --where title=Handbook* --index my-index`
    """
    brief()
    from ragkv.index.inspection import list_documents
    from ragkv.pipeline import RagKV

    if limit is None and sys.stdout.isatty() and not as_json:
        limit = TERMINAL_ROWS
    with RagKV.open(index, readonly=True) as rag:
        names = [] if pattern is None else [pattern]
        page = list_documents(rag.store, names, where or (), after=after, limit=limit or None)
        total = rag.stats().documents
    found = page.documents
    if as_json:
        print_json({"documents": [one.to_json() for one in found], "after": page.after, "total": total})
    elif quiet:
        for one in found:
            say(one.document.document_id)
    elif found:
        _table(found)
        chunks = sum(one.stats.chunks for one in found)
        kv = sum(one.stats.kv_bytes for one in found)
        shown = f"{count(len(found), 'document')}, {count(chunks, 'chunk')}, KV {size(kv)}"
        note(f"{shown} (KV that documents share is counted for each)")
    elif total:
        note(f"There are no more documents (of {total:,}).")
    else:
        note(f"{index} holds no document; add some with ragkv ingest PATH --index {index}.")
    if page.after is not None and not as_json:
        name = shlex.quote(page.after)
        note(f"There are more (the index holds {total:,}): --after {name} lists the next, --limit 0 all.")


def _table(found: Sequence[DocumentView]) -> None:
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
