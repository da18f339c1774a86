"""`ragkv backup`: a consistent copy of an index that is in use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.console import print_json, say, size
from ragkv.cli.option import DEFAULT_INDEX, Index, Json, Quiet
from ragkv.cli.progress import progress_bar

__all__ = ["Verify", "backup"]

Verify = Annotated[bool, typer.Option("--verify", help="Check the copy before it is kept, as ragkv verify does.")]


def backup(
    destination: Annotated[Path, typer.Argument(help="A new or empty folder for the copy.", metavar="DEST")],
    index: Index = DEFAULT_INDEX,
    verify: Verify = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy an index as it is at one moment, while other processes read and write it.

    The copy is an index like any other. It appears under its name once it is complete on the disk, or not at all.

    Example: `ragkv backup /backups/my-index-monday --index my-index --verify`
    """
    from ragkv.pipeline import RagKV

    with RagKV.open(index, readonly=True) as rag, progress_bar(quiet or as_json) as on_progress:
        copy = rag.backup(destination, verify=verify, on_progress=on_progress)
    if as_json:
        print_json(copy.to_json())
    elif not quiet:
        say(f"{destination}: {size(copy.bytes_after)}{', verified' if copy.verified else ''}.")
