"""`ragkv ingest`: documents in, chunks and their KV stored."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ragkv.cli.completion import modes
from ragkv.cli.console import count, note, note_wait, print_json, size
from ragkv.cli.option import (
    DEFAULT_INDEX,
    ChunkTokens,
    Codec,
    Device,
    Dtype,
    Embedder,
    Engines,
    Index,
    Json,
    Model,
    NoWait,
    Quiet,
    Reranker,
    split_names,
)
from ragkv.cli.progress import percent_bar
from ragkv.config import CONFIG_FILE, IndexConfig, load_config
from ragkv.errors import ConfigError, KVMismatchError, StoreBusyError, UsageError
from ragkv.ingest import IngestProgress, IngestReport
from ragkv.pipeline import RagKV
from ragkv.settings import VARIABLES, UserFile, user_file

__all__ = ["ingest"]


def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files and folders: text, Markdown, HTML, PDF.", metavar="PATH")],
    index: Index = DEFAULT_INDEX,
    model: Model = None,
    dtype: Dtype = None,
    engines: Engines = None,
    chunk_tokens: ChunkTokens = None,
    codec: Codec = None,
    embedder: Embedder = None,
    reranker: Reranker = None,
    retrieval: Annotated[
        str | None,
        typer.Option(
            help="How questions search: dense, sparse, colbert, hybrid or bm25.",
            show_default="dense with an embedder, else bm25",
            autocompletion=modes,
        ),
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Drop documents that are gone from the folders.")] = False,
    no_wait: NoWait = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Read documents once: chunk them, prefill every chunk, keep its KV.

    Unchanged files are left alone, changed ones replace their chunks; a run that was stopped goes on where it was.

    Example: `ragkv ingest docs/ notes.pdf --index my-index --model Qwen/Qwen3-4B`
    """
    asked: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "engines": None if engines is None else split_names(engines),
        "chunk_tokens": chunk_tokens,
        "codec": codec,
        "embedder": embedder,
        "reranker": reranker,
        "retrieval": retrieval,
    }
    settings = {key: value for key, value in asked.items() if value is not None}
    for path in paths:
        if not path.exists():
            raise UsageError(f"No such file or folder: {path}.")
    with _index(index, settings, device) as rag:
        if model is None and rag.config.model == "mini" and not quiet:
            note("Using the bundled mini model, made for trying things out; for real work add --model PATH-OR-HUB-ID.")
        with _progress(quiet or as_json) as on_progress:
            report = rag.ingest(
                *paths, prune=prune, on_progress=on_progress, timeout=0 if no_wait else None, on_wait=note_wait
            )
    if as_json:
        print_json(report.to_json())
    elif not quiet:
        _tell(report, index)


@contextmanager
def _index(folder: Path, settings: dict[str, Any], device: str | None) -> Iterator[RagKV]:
    """The index at `folder`, made if there is none; settings that an existing one contradicts are refused."""
    if not (folder / CONFIG_FILE).exists():
        try:
            made = RagKV.create(folder, device=device, **{**UserFile.read(user_file()).settings, **settings})
        except (ConfigError, StoreBusyError):
            if not (folder / CONFIG_FILE).exists():  # else another process has just made it
                raise
        else:
            with made:
                yield made
            return
    kept = load_config(folder)
    IndexConfig(**({"embedder": kept.embedder} | settings))  # a wrong value is wrong, whatever the index holds
    for key, value in settings.items():
        if getattr(kept, key) != value:
            variable = VARIABLES.get(key, "")
            remedy = f"leave the option out and {variable} unset" if variable in os.environ else "leave the option out"
            raise KVMismatchError(
                f"The index at {folder} was made with {key} = {_shown(getattr(kept, key))}, not {_shown(value)}; "
                f"use another --index, or {remedy}."
            )
    with RagKV.open(folder, device=device) as rag:
        yield rag


def _shown(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


@contextmanager
def _progress(silent: bool) -> Iterator[Callable[[IngestProgress], None] | None]:
    """A bar over the sources' bytes with tokens/s and KV bytes."""
    with percent_bar(silent) as show:
        if show is None:
            yield None
            return

        def tell(progress: IngestProgress) -> None:
            rate = f"{progress.tokens / max(progress.encode_seconds, 1e-9):,.0f} tokens/s, {size(progress.kv_bytes)} KV"
            name = progress.current if len(progress.current) <= 28 else "…" + progress.current[-27:]
            show(name, progress.done_bytes, max(1, progress.total_bytes), rate if progress.tokens else "")

        yield tell


def _tell(report: IngestReport, index: Path) -> None:
    for skipped in report.skipped:
        note(f"skipped {skipped.path}: {skipped.reason}")
    parts = [
        f"{len(found)} {word}"
        for word, found in (
            ("added", report.added),
            ("updated", report.updated),
            ("unchanged", report.unchanged),
            ("pruned", report.pruned),
            ("skipped", report.skipped),
        )
        if found
    ]
    print(f"{index}: {', '.join(parts)}.")
    if report.kv_encoded:
        print(
            f"Encoded {count(report.kv_encoded, 'chunk KV')} of {count(report.chunks, 'chunk')}: "
            f"{count(report.tokens, 'token')}, {size(report.kv_bytes)}, in {report.seconds:.1f} s "
            f"({report.tokens / max(report.encode_seconds, 1e-9):,.0f} tokens/s)."
        )
    else:
        print(f"Nothing re-encoded, in {report.seconds:.1f} s.")
