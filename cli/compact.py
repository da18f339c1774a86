"""`ragkv compact`: a copy of an index without free pages."""

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
    output: Annotated[Path, typer.Option("--output", help="A new or empty folder for the compacted index.")],
    index: Index = DEFAULT_INDEX,
    verify: Verify = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Copy an index without its free pages: the copy is smaller and holds no bytes of deleted documents.

    The old index stays as it is and may be used meanwhile; what is written to it after the start is not in the copy.
    When no process uses the old index any more, put the new folder in its place.

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
