"""`ragkv delete`: delete documents, and everything that only they needed."""

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
    from ragkv.index.inspection import select
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
            say(f"{'would delete' if dry_run else 'deleted'} {document_id}")


def _confirm(ids: list[str], *, yes: bool) -> None:
    """Ask on a terminal; without one, require --yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"Deleting {count(len(ids), 'document')} needs --yes when stdin is not a terminal.")
    for document_id in ids:
        note(document_id)
    confirm(f"Delete {count(len(ids), 'document')}?")
