"""`ragkv ls`: the documents of an index."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ragkv.cli.console import count, draw, note, print_json, say, size
from ragkv.cli.grid import plain
from ragkv.cli.option import DEFAULT_INDEX, Index, Json, NoServer, Quiet, Where
from ragkv.cli.program import brief
from ragkv.cli.resident import Lodger, UnservedError, alone
from ragkv.server.errand import list_page

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
        str,
        typer.Option(help="List the documents behind this id, as the page before named it.", show_default=False),
    ] = "",
    no_server: NoServer = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List documents with their chunks and sizes; with --quiet, only their ids.

    A large index is listed page by page: `--limit` documents behind the id `--after`. Without a pattern or
    conditions, a page costs the same at any size of the index.

    Example: `ragkv ls '*.pdf' --where title=Handbook* --index my-index`
    """
    brief()
    if limit is None and sys.stdout.isatty() and not as_json:
        limit = TERMINAL_ROWS
    served = None if alone(no_server) or pattern is not None else _served(index, where or [], after, limit or None)
    page = _read(index, pattern, where or [], after, limit or None) if served is None else served
    found, total, behind = page["documents"], page["total"], page["after"]
    if as_json:
        print_json(page)
    elif quiet:
        for one in found:
            say(one["document"])
    elif found:
        _table(found)
        chunks = sum(one["chunks"] for one in found)
        kv = sum(one["kv_bytes"] for one in found)
        shown = f"{count(len(found), 'document')}, {count(chunks, 'chunk')}, KV {size(kv)}"
        note(f"{shown} (KV that documents share is counted for each)")
    elif total:
        note(f"There are no more documents (of {total:,}).")
    else:
        note(f"{index} holds no document; add some with ragkv ingest PATH --index {index}.")
    if behind is not None and not as_json:
        name = shlex.quote(behind)
        note(f"There are more (the index holds {total:,}): --after {name} lists the next, --limit 0 all.")


def _served(index: Path, where: list[str], after: str, limit: int | None) -> dict[str, Any] | None:
    """The page as the server that is up for the index lists it; None when there is none.

    A PATTERN may be a path of this process, so that it is for this process.
    """
    try:
        return Lodger(index).page(where, after=after, limit=limit)
    except UnservedError:
        return None


def _read(index: Path, pattern: str | None, where: list[str], after: str, limit: int | None) -> dict[str, Any]:
    from ragkv.pipeline import RagKV

    with RagKV.open(index, readonly=True) as rag:
        return list_page(rag, [] if pattern is None else [pattern], where, after=after, limit=limit)


def _table(found: list[dict[str, Any]]) -> None:
    table = plain()
    table.add_column("document", overflow="fold")
    for name in ("chunks", "tokens", "KV", "text", "vectors"):
        table.add_column(name, no_wrap=True, justify="right")
    for one in found:
        table.add_row(
            one["source"],
            f"{one['chunks']:,}",
            f"{one['tokens']:,}",
            size(one["kv_bytes"]),
            size(one["text_bytes"]),
            size(one["vector_bytes"]),
        )
    draw(table)
