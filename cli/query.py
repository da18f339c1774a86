"""`ragkv query`: one question, an answer with its sources."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.console import count, note, print_json, size
from ragkv.cli.option import DEFAULT_INDEX, Device, Index, Json, Quiet
from ragkv.errors import KVMismatchError, UsageError
from ragkv.pipeline import RagKV
from ragkv.types import Answer

__all__ = ["query"]


def query(
    question: Annotated[str, typer.Argument(help="What you want to know.", metavar="QUESTION")],
    index: Index = DEFAULT_INDEX,
    engine: Annotated[
        str | None,
        typer.Option(help="full, ape, block, pced, or one of your own.", show_default="the index's"),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Chunks to answer from.", show_default="the index's")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    model: Annotated[
        str | None, typer.Option(help="Refuse an index that was made by another model.", show_default=False)
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer as it comes.")] = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answer a question from the index, starting from the stored KV.

    Example: `ragkv query "Who founded Halden Works?" --engine pced --top-k 4`
    """
    if stream and as_json:
        raise UsageError("--stream and --json exclude each other; choose one.")
    with RagKV.open(index, device=device) as rag:
        if model is not None and model != rag.config.model:
            raise KVMismatchError(
                f"The index at {index} was made by model {rag.config.model!r}, not {model!r}; "
                "leave --model out, or ingest the documents into another --index."
            )
        pieces = rag.stream(question, engine=engine, top_k=top_k, max_new_tokens=max_new_tokens)
        if not quiet and (warning := pieces.warning):
            note(warning)
        for piece in pieces:
            if stream:
                sys.stdout.write(piece)
                sys.stdout.flush()
        answer = pieces.answer
    if as_json:
        print_json(answer.to_json())
        return
    print("" if stream else answer.text, flush=True)  # before the sources, also where stdout is a pipe
    if not quiet:
        _sources(answer, index)


def _sources(answer: Answer, index: Path) -> None:
    """The chunks that the answer came from, best first, and what it cost; on stderr, so that a pipe gets the text."""
    note("")
    for rank, source in enumerate(answer.sources, start=1):
        page = "" if source.page is None else f", page {source.page}"
        won = "" if source.tokens_won is None else f", {count(source.tokens_won, 'token')}"
        first = " ".join(source.text.split())
        note(f"[{rank}] {source.document}{page} (score {source.score:.3f}{won})")
        note(f"    {first if len(first) <= 72 else first[:71] + '…'}")
    timing, kv = answer.timing, answer.kv
    loaded = f"KV of {count(kv.hits, 'chunk')} loaded ({size(kv.bytes)}), {kv.misses} encoded anew"
    loaded = loaded if kv.hits or kv.misses else "everything prefilled anew"
    note(
        f"{answer.engine} on {index}: first token {timing.load + timing.first_token:.0f} ms "
        f"(load {timing.load:.0f}), total {timing.total:.0f} ms; {loaded}"
    )
