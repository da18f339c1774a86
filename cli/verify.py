"""`ragkv verify`: check that an index is complete and undamaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.console import count, note, print_json, say, size
from ragkv.cli.option import DEFAULT_INDEX, Index, Json, Quiet
from ragkv.cli.progress import progress_bar

if TYPE_CHECKING:
    from ragkv.store import Finding, Verification

__all__ = ["show_findings", "verify"]

SHOWN = 50


def verify(
    index: Index = DEFAULT_INDEX,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Do not read the KV itself, nor compare rows by content; say what is left out."),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check every row, checksum and reference of an index; other processes may use it meanwhile.

    The exit code is 1 if something is wrong; `ragkv repair` repairs it.

    Example: `ragkv verify --index my-index --quick`
    """
    from ragkv.pipeline import RagKV

    with RagKV.open(index, readonly=True) as rag, progress_bar(quiet or as_json) as on_progress:
        found = rag.verify(quick=quick, on_progress=on_progress)
    if as_json:
        print_json(found.to_json())
    else:
        show_findings(found.findings)
        if not quiet:
            _tell(found, str(index))
    if not found.ok:
        raise typer.Exit(1)


def show_findings(findings: tuple[Finding, ...]) -> None:
    """Print a line for each finding, but not more than a person reads."""
    for finding in findings[:SHOWN]:
        say(f"{finding.kind}: {finding}")
    if len(findings) > SHOWN:
        say(f"... and {count(len(findings) - SHOWN, 'finding')} more; --json lists all")


def _tell(found: Verification, index: str) -> None:
    checked = found.checked
    what = f"{count(checked['documents'], 'document')}, {count(checked['chunks'], 'chunk')}, "
    what += f"{count(checked['kv'], 'KV record')}, {size(checked['bytes'])} read"
    say(f"{index}: {'no damage' if found.ok else count(len(found.findings), 'finding')} ({what}).")
    for left_out in found.unchecked:
        note(f"not checked: {left_out}")
    orphans = found.orphans
    if orphans.records or orphans.segments:
        note(
            f"{count(orphans.records, 'orphan record')} and {count(orphans.segments, 'orphan segment')} "
            f"({size(orphans.bytes)}): not damage; an ingest is running or was stopped, and ragkv gc deletes them"
        )
    for name, state in found.derived.items():
        if state != "current":
            note(f"{name}: {state}")
