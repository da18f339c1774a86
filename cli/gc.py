"""`ragkv gc`: delete what nothing in the index needs."""

from __future__ import annotations

from ragkv.cli.console import count, print_json, say, size
from ragkv.cli.option import DEFAULT_INDEX, DryRun, Index, Json, NoWait, Quiet, wait
from ragkv.cli.progress import progress_bar

__all__ = ["gc"]


def gc(
    index: Index = DEFAULT_INDEX,
    dry_run: DryRun = False,
    no_wait: NoWait = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Delete KV that no chunk needs, the KV of old prompts, and outdated retrieval indexes.

    The command waits for a running ingest, because its records belong to no document until that document is complete.
    The file keeps its size and the space is used again; `ragkv compact` makes a smaller file.

    Example: `ragkv gc --index my-index --dry-run`
    """
    from ragkv.pipeline import RagKV

    with RagKV.open(index, readonly=dry_run) as rag, progress_bar(quiet or as_json) as on_progress:
        found = rag.gc(dry_run=dry_run, on_progress=on_progress, **wait(no_wait))
    if as_json:
        print_json(found.to_json())
        return
    if quiet:
        return
    verb = "Would drop" if dry_run else "Dropped"
    say(
        f"{index}: {verb} {count(found.records, 'orphan record')}, {count(found.segments, 'orphan segment')} and "
        f"{count(found.index_records, 'record')} of old prompts ({size(found.bytes)}), "
        f"{count(found.derived, 'stale derived folder')} ({size(found.derived_bytes)})."
    )
