"""`ragkv plan` predicts what an ingest costs, and whether stored KV pays."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli.console import count, draw, echo, note, plain, print_json, steps
from ragkv.cli.options import (
    DEFAULT_INDEX,
    VARIABLES,
    ContextTokens,
    Device,
    Json,
    PlanSettings,
    Quiet,
    Threads,
    UserFile,
    WorkFolder,
    encoding_of,
    given_values,
    shared_options,
    user_file,
)
from ragkv.config import CONFIG_FILE, load_config

if TYPE_CHECKING:
    from ragkv.plan import Plan


@shared_options
def plan(
    paths: Annotated[
        list[Path], typer.Argument(help="Files and folders, as for `ragkv ingest`.", metavar="PATH", show_default=False)
    ],
    *,
    settings: PlanSettings,
    context_tokens: ContextTokens = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure, besides loading the model.", min=1)] = 30,
    folder: WorkFolder = None,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict the chunks, disk space and hours of an ingest, and whether loading stored KV is faster than a prefill.

    The command ingests a few chunks into a temporary folder and asks about them; it writes nothing else. If the machine
    is busy, or repeats of a measurement differ much, it prints sizes and no verdict on speed. Without --model, the plan
    is for the model of an ingest: the index's, the user file's, else smollm2 or mini.

    Example: `ragkv plan docs/ --model Qwen/Qwen3-4B --codec int8`
    """
    from ragkv.ingest.source import require_existing

    require_existing(paths)
    settings = {**settings, **given_values(encoding=encoding_of(context_tokens))}
    chosen, where = _of_an_ingest(paths, settings)
    if where and not (quiet or as_json):
        note(f"Planning for {chosen['model']}, {where}; for another model add --model PATH-OR-HUB-ID.")
    with steps("plan", silent=quiet or as_json, stages=True) as show:
        show(0, 0, "starting")
        from ragkv.plan import plan_ingest

        result = plan_ingest(*paths, device=device, folder=folder, seconds=seconds, on_step=show, **chosen)
    if as_json:
        print_json(result.to_json())
        return
    for skipped in result.corpus.skipped if not quiet else ():
        note(f"skipped {skipped.path}: {skipped.reason}")
    _print(result)


_PLANNED = ("model", "dtype", "engines", "chunk_tokens", "codec", "encoding", "embedder", "top_k")
"""The settings of an index or a user file that a plan is about."""


def _of_an_ingest(paths: Sequence[Path], settings: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What an ingest with these settings would make chunks and KV with, and where its model comes from if not there."""
    from ragkv.index.ingestion import default_model

    user = UserFile.read(user_file())
    index = Path(os.environ.get(VARIABLES["index"]) or user.table.get("index") or DEFAULT_INDEX).expanduser()
    if "model" not in settings and (index / CONFIG_FILE).exists():
        config = load_config(index)
        return {**{name: getattr(config, name) for name in _PLANNED}, **settings}, f"the model of {index}"
    chosen = {**{name: user.settings[name] for name in _PLANNED if name in user.settings}, **settings}
    if "model" in chosen:
        return chosen, "" if "model" in settings else f"as {user.path} says"
    return {**chosen, "model": default_model(paths)}, "which `ragkv ingest` takes where none is named"


def _print(plan: Plan) -> None:
    corpus = plan.corpus
    how = (
        f"all of {_bytes(corpus.source_bytes)} read"
        if corpus.read_files == corpus.files
        else f"estimated from {corpus.read_files:,} of {corpus.files:,} files"
    )
    echo(f"{plan.model}, {plan.parameters / 1e6:,.0f}M parameters, {plan.dtype} on {plan.device}; {how}.")
    twice = f", {1 - corpus.distinct:.0%} of them twice and stored once" if corpus.distinct < 0.995 else ""
    echo(
        f"{corpus.documents:,.0f} documents, {corpus.chunks:,.0f} chunks of at most {plan.chunk_tokens} tokens, "
        f"{corpus.tokens:,.0f} tokens{twice}."
    )
    parts = ", ".join(f"{name} {_time(value)}" for name, value in plan.seconds.items() if value)
    rate = f"{plan.encode_tokens_per_second:,.0f} tokens/s encoded"
    echo(f"Ingest: {_time(plan.total_seconds)} ({parts}); {rate}.")
    echo(f"Disk with {plan.codec}: {_bytes(plan.disk_bytes)}; KV in {' and '.join(plan.encodings)} encoding:")
    echo()
    table = plain(*(f"{codec}" for codec in plan.kv_bytes))
    table.add_row(*(_bytes(nbytes) for nbytes in plan.kv_bytes.values()))
    draw(table)
    echo()
    if plan.no_verdict:
        reasons = "; ".join(plan.no_verdict)
        echo(f"No verdict on speed: {reasons}. Run it again on a quiet machine, or with more --seconds.")
        return
    echo(
        f"Over {plan.context_tokens:,} tokens, {plan.engine} has its first token after "
        f"{plan.first_token_seconds * 1000:,.1f} ms with stored KV; a prefill takes "
        f"{plan.prefill_seconds * 1000:,.1f} ms."
    )
    if plan.pays:
        times = plan.prefill_seconds / plan.first_token_seconds
        echo(f"Stored KV pays: {times:,.1f} times as fast, repaid after {count(plan.repaid_after or 0, 'question')}.")
    else:
        echo("Stored KV does not pay: no question gets faster.")


def _bytes(number: float) -> str:
    """Decimal units, like the sizes of disks: 1500000000 -> "1.50 GB"."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:,.2f} GB" if number < 1000 else f"{number / 1000:,.1f} TB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
