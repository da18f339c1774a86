"""`ragkv compact`: an index without free pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.backup import Verify
from ragkv.cli.console import print_json, say, size
from ragkv.cli.option import DEFAULT_INDEX, Index, Json, Quiet
from ragkv.cli.progress import progress_bar

__all__ = ["compact"]


def compact(
    output: Annotated[Path, typer.Option("--output", help="Folder for the new index; new or empty.")],
    index: Index = DEFAULT_INDEX,
    verify: Verify = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the index anew without free pages: smaller, and rid of the bytes of what was deleted.

    The old index stays as it is, and may be read and written meanwhile; what is written after the start is not in
    the new one. Put the new folder in its place when nobody uses the old one.

    Example: `ragkv compact --index my-index --output my-index-compacted`
    """
    from ragkv.pipeline import RagKV

    with RagKV.open(index, readonly=True) as rag, progress_bar(quiet or as_json) as on_progress:
        copy = rag.compact(output, verify=verify, on_progress=on_progress)
    if as_json:
        print_json(copy.to_json())
    elif not quiet:
        checked = ", verified" if copy.verified else ""
        say(f"{output}: {size(copy.bytes_before)} before, {size(copy.bytes_after)} now{checked}.")
