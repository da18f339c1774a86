"""`ragkv ls`, `ragkv show` and `ragkv delete`: list documents, show one chunk, delete documents."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli.console import (
    beginning,
    confirm,
    count,
    draw,
    echo,
    echo_text,
    note,
    plain,
    print_facts,
    print_json,
    size,
)
from ragkv.cli.main import brief
from ragkv.cli.options import (
    DEFAULT_INDEX,
    Documents,
    DryRun,
    Index,
    Json,
    NoServer,
    NoWait,
    Quiet,
    Where,
    wait,
    without_server,
)
from ragkv.errors import UsageError
from ragkv.server.local import LocalClient, UnservedError
from ragkv.types import Chunk

if TYPE_CHECKING:
    from ragkv.index.search import ChunkView
    from ragkv.store import KVRecord

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
    page: dict[str, Any] | None = None
    if pattern is None and not without_server(no_server):  # a pattern may be a path, which the server would not know
        with suppress(UnservedError):
            page = LocalClient(index).documents(where or [], after=after, limit=limit or None)
    if page is None:
        page = _read(index, pattern, where or [], after, limit or None)
    found, total, behind = page["documents"], page["total"], page["after"]
    if as_json:
        print_json(page)
    elif quiet:
        for one in found:
            echo(one["document"])
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


def _read(index: Path, pattern: str | None, where: list[str], after: str, limit: int | None) -> dict[str, Any]:
    from ragkv.pipeline import RagKV

    with RagKV.open(index, readonly=True) as rag:
        page = rag.list_documents([] if pattern is None else [pattern], where, after=after, limit=limit)
        documents = [document.to_json() for document in page.documents]
        return {"documents": documents, "after": page.after, "total": rag.stats().documents}


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
    from ragkv.index.search import chunk_named, look_at
    from ragkv.pipeline import RagKV

    with RagKV.open(index, readonly=True) as rag:
        view = look_at(rag.store, chunk_named(rag.store, chunk))
    if as_json:
        print_json(view.to_json())
        return
    if not quiet:
        _facts(view)
        echo()
    echo_text(view.chunk.text)


def _facts(view: ChunkView) -> None:
    chunk = view.chunk
    place = [f"chunk {chunk.ordinal}"]
    place += [] if chunk.page is None else [f"page {chunk.page}"]
    place += [] if chunk.heading is None else [f"under {chunk.heading!r}"]
    place += [] if chunk.box is None else ["box " + " ".join(f"{each:.3f}" for each in chunk.box)]
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


def delete(
    names: Documents = None,
    index: Index = DEFAULT_INDEX,
    where: Where = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Delete documents with their text, chunks and vectors, and the KV that no other document needs.

    Questions no longer find them. Their bytes stay in free pages of the file until those are used again;
    `ragkv compact` writes a file without free pages.

    With both names and --where, the named documents that match are deleted.

    Example: `ragkv delete notes.pdf 'drafts/*' --index my-index`
    """
    from ragkv.index.search import select
    from ragkv.pipeline import RagKV

    if not names and not where:
        raise UsageError("Name the documents to delete, or choose them with --where FIELD=PATTERN.")
    with RagKV.open(index, readonly=dry_run) as rag:
        ids = [stored.document.document_id for stored in select(rag.store, names or (), where or ())]
        if not dry_run:
            _confirm(ids, yes=yes)
            ids = rag.delete_many(ids, **wait(no_wait))
    if as_json:
        print_json({"deleted": ids, "dry_run": dry_run})
    elif not quiet:
        for document_id in ids:
            echo(f"{'would delete' if dry_run else 'deleted'} {document_id}")


def _confirm(ids: list[str], *, yes: bool) -> None:
    """Ask on a terminal; without one, require --yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"Deleting {count(len(ids), 'document')} needs --yes when stdin is not a terminal.")
    for document_id in ids:
        note(document_id)
    confirm(f"Delete {count(len(ids), 'document')}?")
