"""`ragkv plan`: predict what an ingest costs, and how much faster questions become."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ragkv.cli.budget import tell_budgets
from ragkv.cli.console import draw, note, print_json, say
from ragkv.cli.grid import plain
from ragkv.cli.option import Device, Json, Quiet, WorkFolder, split_names, stated
from ragkv.cli.progress import stages
from ragkv.config import byte_count
from ragkv.errors import UsageError
from ragkv.ingest.source import require_existing

if TYPE_CHECKING:
    from ragkv.planning.census import Estimate
    from ragkv.planning.plan import Plan
    from ragkv.planning.stopwatch import Repeats

__all__ = ["plan"]


def plan(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Files and folders, as for `ragkv ingest`.", metavar="PATH", show_default=False),
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option("--index", help="Instead of PATH: say which kv_budget gives this index which share of hits."),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option("--questions", help="With --index: a JSONL log of questions; else recorded uses.", metavar="FILE"),
    ] = None,
    zipf: Annotated[
        float | None, typer.Option("--zipf", help="With --index: assume that questions follow Zipf's law.", min=0)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub id; `mini` is the bundled one.", show_default="mini")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.", show_default="auto")] = None,
    engines: Annotated[str | None, typer.Option(help="Engines to store KV for.", show_default="ape,block,pced")] = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of a chunk, as the model counts them.", show_default="the model's, or 256"),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(help="The codec for which times are predicted; sizes are shown for all.", show_default="raw"),
    ] = None,
    embedder: Annotated[
        str | None,
        typer.Option(
            help="`mini`, a folder, a hub id or `none`.", show_default="mini beside the mini model, else none"
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="How many chunks a question reads.", show_default="8")] = None,
    sample: Annotated[
        str, typer.Option(help="Read about this much of the documents; smaller collections are read whole.")
    ] = "8MiB",
    seed: Annotated[int, typer.Option(help="Seed of the draw of files that are read.")] = 0,
    seconds: Annotated[
        float,
        typer.Option(
            help="About how long to measure, besides loading the model; the output says what is left out.", min=1
        ),
    ] = 30,
    folder: WorkFolder = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict the chunks, disk space and hours of an ingest, and whether loading stored KV is faster than a prefill.

    The command encodes, stores and loads a few chunks in a temporary folder, repeatedly for about --seconds; it writes
    nothing else. If the repeats differ much, or other processes use the machine, it says not to trust the times.

    With --index, the command simulates budgets of KV over the uses that the index has recorded, a log of questions, or
    Zipf's law, and says how many of the chunks that questions read would be found.

    Example: `ragkv plan docs/ --model Qwen/Qwen3-4B --codec int8`

    Example: `ragkv plan --index my-index --zipf 1.0`
    """
    if index is not None:
        given = stated(model=model, dtype=dtype, engines=engines, chunk_tokens=chunk_tokens, codec=codec)
        if paths or given:
            raise UsageError("--index plans the budget of an index that there is: leave PATH and its settings out.")
        tell_budgets(index, questions, zipf, top_k=top_k, seed=seed, device=device, as_json=as_json, quiet=quiet)
        return
    if questions is not None or zipf is not None:
        raise UsageError("--questions and --zipf are about the budget of an index: add --index DIR.")
    if not paths:
        raise UsageError("Say what to plan: PATH for an ingest, or --index DIR for a budget of KV.")
    settings = stated(
        model=model,
        dtype=dtype,
        engines=split_names(engines),
        chunk_tokens=chunk_tokens,
        codec=codec,
        embedder=embedder,
        top_k=top_k,
    )
    require_existing(paths)
    sample_bytes = byte_count("--sample", sample)
    if model is None and not (quiet or as_json):
        note("Planning for the bundled mini model; for real work add --model PATH-OR-HUB-ID.")
    with stages("plan", silent=quiet or as_json) as show:
        show(0, 0, "starting")
        from ragkv.planning.plan import plan_ingest  # torch and all: seconds, which the bar shows

        found = plan_ingest(
            *paths,
            device=device,
            folder=folder,
            sample_bytes=sample_bytes,
            seed=seed,
            seconds=seconds,
            on_step=show,
            **settings,
        )
    if as_json:
        print_json(found.to_json())
        return
    for skipped in found.census.skipped if not quiet else ():
        note(f"skipped {skipped.path}: {skipped.reason}")
    _tell(found)


def _tell(plan: Plan) -> None:
    census, seconds = plan.census, plan.seconds
    how = (
        f"all of {_bytes(census.source_bytes)} read"
        if census.whole
        else f"estimated from {census.read_sources:,} of {census.sources:,} files; ± is 95 % of such samples"
    )
    say(f"{plan.model}, {plan.parameters / 1e6:,.0f}M parameters, {plan.dtype} on {plan.device}; {how}.")
    say(
        f"{_number(census.documents)} documents, {_number(census.chunks)} chunks of at most {plan.chunk_tokens} "
        f"tokens, {_number(census.tokens)} tokens"
        + (f", {1 - census.distinct:.0%} of them twice and stored once" if census.distinct < 0.995 else "")
        + "."
    )
    parts = {"start": seconds.start, "read": seconds.read, "encode": seconds.encode, "embed": seconds.embed}
    shown = ", ".join(f"{name} {_time(value)}" for name, value in {**parts, "write": seconds.write}.items() if value)
    rates = f"{1 / plan.encode_seconds:,.0f} tokens/s encoded"
    if len(plan.encode.seconds) > 1:
        fastest, slowest = plan.fastest.total, plan.slowest.total
        rates += (
            f", {1 / plan.encode.high:,.0f} to {1 / plan.encode.low:,.0f} in {len(plan.encode.seconds)} repeats: "
            f"{_time(fastest)} to {_time(slowest)} in all"
        )
    say(f"Ingest: {_time(seconds.total)} ({shown}); {rates}.")
    say(
        f"Disk with {plan.codec}: {_bytes(plan.disk_bytes.value)}, "
        f"of which {_bytes(plan.vector_bytes)} are vectors; KV in {' and '.join(plan.encodings)} encoding:"
    )
    say()
    table = plain("codec", "KV", "per million tokens", "load, disk", "load, memory", "pays from")
    for codec in plan.codecs:
        cold = "?" if codec.cold_seconds is None else f"{codec.cold_seconds * 1e6:,.1f} µs/token"
        table.add_row(
            codec.codec,
            _bytes(codec.kv_bytes.value),
            _bytes(codec.bytes_per_million_tokens),
            cold,
            f"{codec.warm_seconds * 1e6:,.1f} µs/token",
            "never" if codec.least_disk is None else f"{_bytes(codec.least_disk)}/s",
        )
    draw(table)
    say()
    say(
        f"Recomputing takes {plan.recompute_seconds * 1e6:,.1f} µs/token: loading pays on a disk that reads faster "
        "than the last column."
    )
    say()
    table = plain("engine", "first token", "prefill", "sooner")
    for engine in plan.engines:
        table.add_row(
            engine.engine,
            _milliseconds(engine.first_token),
            _milliseconds(engine.prefill),
            f"{engine.prefill_ms / engine.first_token_ms:,.1f}x",
        )
    draw(table)
    first = plan.engines[0]
    say()
    say(
        f"Over {first.chunks} chunks, {first.context_tokens:,} tokens, from the page cache, without retrieval. "
        + (
            f"With {first.engine} no question gets faster."
            if plan.questions is None
            else f"With {first.engine} the ingest is repaid after {plan.questions:,.0f} questions."
        )
    )
    if plan.left_out:
        say()
        say(f"Left out for lack of time (--seconds {plan.asked_seconds:g}): {' '.join(plan.left_out)}")
    if not plan.trust.trusted:
        say()
        draw(Text(f"Do not trust these times. {' '.join(plan.trust.reasons)} {_AGAIN}", style="yellow"))


_AGAIN = "Run it again on a quiet machine, or with more --seconds; counts and sizes are not affected."


def _milliseconds(repeats: Repeats) -> str:
    """ "39.3 ms (38.9 to 41.0)"."""
    shown = f"{repeats.value * 1000:,.1f} ms"
    if len(repeats.seconds) < 2:
        return shown
    return f"{shown} ({repeats.low * 1000:,.1f} to {repeats.high * 1000:,.1f})"


def _number(estimate: Estimate) -> str:
    return f"{estimate.value:,.0f}" + (f" ± {estimate.spread:,.0f}" if estimate.spread else "")


def _bytes(number: float) -> str:
    """Decimal units, as disks are sold: 1500000000 -> "1.50 GB"."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:,.2f} GB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
