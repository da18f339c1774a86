"""`ragkv repair`: repair the damage that `ragkv verify` finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.console import count, print_json, say
from ragkv.cli.option import DEFAULT_INDEX, Device, DryRun, Index, Json, NoWait, Quiet, wait
from ragkv.cli.progress import progress_bar
from ragkv.cli.verify import show_findings

if TYPE_CHECKING:
    from ragkv.store import Repair

__all__ = ["repair"]


def repair(
    index: Index = DEFAULT_INDEX,
    dry_run: DryRun = False,
    no_encode: Annotated[
        bool, typer.Option("--no-encode", help="Only drop damaged KV; it is encoded when a question needs it.")
    ] = False,
    device: Device = None,
    no_wait: NoWait = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Drop damaged parts of an index and make them again: KV from the chunks' tokens, rows from other rows.

    A document that cannot be restored is dropped and named. The exit code is then 1, as it is if damage remains.

    Example: `ragkv repair --index my-index`
    """
    from ragkv.pipeline import RagKV

    with (
        RagKV.open(index, device=device, readonly=dry_run) as rag,
        progress_bar(quiet or as_json) as on_progress,
    ):
        report = rag.repair(encode=not no_encode, dry_run=dry_run, on_progress=on_progress, **wait(no_wait))
    if as_json:
        print_json(report.to_json())
    elif report.dropped or report.left or not quiet:
        _tell(report, str(index))
    if not report.ok:
        raise typer.Exit(1)


def _tell(report: Repair, index: str) -> None:
    if report.dry_run:
        show_findings(report.found)
    for name, reason in report.dropped.items():
        say(f"{'would be ' if report.dry_run else ''}dropped: {name} ({reason}); ingest it again")
    show_findings(report.left)
    if not report.found:
        say(f"{index}: no damage, nothing to repair.")
        return
    parts = [
        (report.encoded, "KV record", "encoded anew"),
        (report.dropped_records, "KV record", "dropped"),
        (len(report.mended), "document", "mended"),
        (len(report.dropped), "document", "dropped"),
        (report.rows, "row", "put right"),
        (len(report.facts), "fact", "forgotten"),
    ]
    done = ", ".join(f"{count(number, noun)} {verb}" for number, noun, verb in parts if number)
    say(f"{index}: {count(len(report.found), 'finding')}; {'would be: ' if report.dry_run else ''}{done}.")
    if report.mended and not report.dry_run:
        say("Mended documents are read again by the next ragkv ingest of their files; their KV is kept.")
