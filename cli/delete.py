"""`ragkv delete`: documents and all that only they needed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ragkv.cli.console import confirm, count, note, print_json, say
from ragkv.cli.option import DEFAULT_INDEX, DryRun, Index, Json, NoWait, Quiet, Where, wait
from ragkv.errors import UsageError

__all__ = ["delete"]


def delete(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Ids, source names, paths, or patterns such as 'docs/*'.", metavar="DOCUMENT", show_default=False
        ),
    ] = None,
    index: Index = DEFAULT_INDEX,
    where: Where = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Delete documents with their text, chunks, vectors and the KV that no other document needs.

    Nothing reads them any more; their bytes leave the disk with `ragkv compact` (free pages are overwritten only
    when they are used again).

    With names and --where, those of the named that meet it go.

    Example: `ragkv delete notes.pdf 'drafts/*' --index my-index`
    """
    from ragkv.index.inspection import select
    from ragkv.pipeline import RagKV

    if not names and not where:
        raise UsageError("Name the documents to delete, or choose them with --where FIELD=PATTERN.")
    with RagKV.open(index, readonly=dry_run) as rag:
        ids = [stored.document.document_id for stored in select(rag.store, names or (), where or ())]
        if not dry_run:
            _confirm(ids, yes=yes)
            ids = [found for found in ids if rag.delete(found, **wait(no_wait))]
    if as_json:
        print_json({"deleted": ids, "dry_run": dry_run})
    elif not quiet:
        for document_id in ids:
            say(f"{'would delete' if dry_run else 'deleted'} {document_id}")


def _confirm(ids: list[str], *, yes: bool) -> None:
    """Ask on a terminal; where nobody can answer, want it said beforehand."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"Deleting {count(len(ids), 'document')} needs --yes where nobody can be asked.")
    for document_id in ids:
        note(document_id)
    confirm(f"Delete {count(len(ids), 'document')}?")
