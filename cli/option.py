"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["DEFAULT_INDEX", "Device", "DryRun", "Index", "Json", "Quiet"]

DEFAULT_INDEX = Path("ragkv-index")

Index = Annotated[Path, typer.Option("--index", help="Folder of the index.")]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1, …", show_default="cuda if there is one")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only results and errors.")]
