"""`ragkv stats`: what an index holds and what it weighs."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from ragkv.cli.console import print_json, size
from ragkv.cli.option import DEFAULT_INDEX, Index, Json
from ragkv.pipeline import RagKV

__all__ = ["stats"]


def stats(index: Index = DEFAULT_INDEX, as_json: Json = False) -> None:
    """Show documents, chunks, KV records and bytes of an index.

    Example: `ragkv stats --index my-index --json`
    """
    with RagKV.open(index, readonly=True) as rag:
        found, config = rag.stats(), rag.config
    values = {"index": str(index), "model": config.model, "codec": config.codec, **asdict(found)}
    if as_json:
        print_json(values)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in values.items():
        sized = "bytes" in key or key.endswith("_size")
        shown = (
            size(value) if sized and isinstance(value, int) else f"{value:,}" if isinstance(value, int) else str(value)
        )
        table.add_row(key.replace("_", " "), shown)
    Console(highlight=False).print(table)
