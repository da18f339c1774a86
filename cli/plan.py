"""`ragkv plan` predicts what an ingest costs and what it gains; `ragkv models` shows which models run exactly.

`ragkv plan --index` shows which share of KV lookups each KV budget would serve from the store.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ragkv.cli.console import (
    count,
    draw,
    echo,
    note,
    plain,
    print_facts,
    print_json,
    size,
    stages,
    three_digits,
)
from ragkv.cli.options import (
    DEFAULT_INDEX,
    VARIABLES,
    ContextTokens,
    Device,
    Dtype,
    Json,
    Quiet,
    UserFile,
    WorkFolder,
    encoding_of,
    given_values,
    split_names,
    user_file,
)
from ragkv.cli.question_files import questions_of_log
from ragkv.config import CONFIG_FILE, DTYPES, byte_count, load_config, one_of
from ragkv.errors import UsageError

if TYPE_CHECKING:
    from ragkv.planning.calibration import ModelRequirements, Repeats
    from ragkv.planning.cluster import ClusterPlan
    from ragkv.planning.plan import Estimate, Plan


def show_budgets(
    index: Path,
    questions: Path | None,
    zipf: float | None,
    *,
    top_k: int | None,
    seed: int,
    device: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Simulate budgets for the index and print them."""
    from ragkv.pipeline import RagKV
    from ragkv.planning.plan import plan_budgets

    if questions is not None and zipf is not None:
        raise UsageError("--questions is a log, and --zipf assumes one: give one of them.")
    with RagKV.open(index, device=device) as rag:
        asked: list[dict[str, Any]] | None = None
        if questions is not None:
            asked = questions_of_log(rag, questions, quiet=quiet)
        found = plan_budgets(rag, questions=asked, zipf=zipf, top_k=top_k, seed=seed)
    if as_json:
        print_json(found.to_json())
        return
    echo(
        f"{index}: {count(found.chunks, 'chunk')}, {size(found.bytes)} of KV in one encoding; by {found.source}, "
        f"{count(found.reads, 'read')} of {count(found.distinct, 'chunk')}."
    )
    echo()
    table = plain("kv_budget", "of all KV", "hits", "in the second half", "saved in 1,000 questions")
    for room in found.rooms:
        saved = "?" if room.saved_seconds is None else f"{room.saved_seconds:,.1f} s"
        table.add_row(size(room.bytes), f"{room.share:.0%}", f"{room.hits:.1%}", f"{room.later:.1%}", saved)
    draw(table)


def plan(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Files and folders, as for `ragkv ingest`.", metavar="PATH", show_default=False),
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option(help="Instead of PATH: show the share of hits of this index for each kv_budget."),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(help="With --index: a JSONL log of questions; else recorded uses.", metavar="FILE"),
    ] = None,
    zipf: Annotated[
        float | None, typer.Option(help="With --index or --chunks: assume that questions follow Zipf's law.", min=0)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model folder, .gguf file or hub id; `mini` is the bundled one.",
            show_default="that of an ingest: RAGKV_MODEL, the index's, the user file's, else smollm2 or mini",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16, float16 or int8.", show_default="auto")
    ] = None,
    engines: Annotated[str | None, typer.Option(help="Engines to store KV for.", show_default="ape,block,pced")] = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of a chunk, as the model counts them.", show_default="the model's, or 256"),
    ] = None,
    context_tokens: ContextTokens = None,
    codec: Annotated[
        str | None,
        typer.Option(help="The codec for which times are predicted; sizes are shown for all.", show_default="half"),
    ] = None,
    embedder: Annotated[
        str | None,
        typer.Option(help="`mini`, a folder, a hub id or `none`.", show_default="mini for the mini model, else none"),
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
    beside: Annotated[
        tuple[float, float] | None,
        typer.Option(
            help="Tokens/s at which another runtime prefills and decodes (pp and tg of llama-bench): shows with which "
            "token of an answer it would be ahead.",
            metavar="PREFILL DECODE",
            show_default=False,
        ),
    ] = None,
    folder: WorkFolder = None,
    chunks: Annotated[
        float | None,
        typer.Option(
            help="Plan for this many chunks like those of PATH, on several machines: 1e7.", show_default=False
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="With --chunks: on this many machines like this one.", show_default="1")
    ] = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict the chunks, disk space and hours of an ingest, and whether loading stored KV is faster than a prefill.

    The command encodes, stores and loads a few chunks in a temporary folder, repeatedly for about --seconds; it writes
    nothing else. If the repeats differ much, it says not to trust the times.

    With --index, the command simulates budgets of KV over the uses that the index has recorded, a log of questions, or
    Zipf's law, and says how many of the chunks that questions read would be found.

    With --chunks, PATH is a sample: its measured rates are scaled to that many chunks on --nodes machines, with bytes,
    hours, the cost of every kind of storage, and a simulation of the nodes (docs/tiers.md has what is assumed).

    Example: `ragkv plan docs/ --model Qwen/Qwen3-4B --codec int8`

    Example: `ragkv plan --index my-index --zipf 1.0`

    Example: `ragkv plan docs/ --model Qwen/Qwen3-4B --chunks 1e7 --nodes 100`
    """
    if index is not None:
        given = given_values(
            model=model,
            dtype=dtype,
            engines=engines,
            chunk_tokens=chunk_tokens,
            context_tokens=context_tokens,
            codec=codec,
        )
        if paths or given or chunks is not None:
            raise UsageError("--index plans the budget of an index that there is: leave PATH and its settings out.")
        show_budgets(index, questions, zipf, top_k=top_k, seed=seed, device=device, as_json=as_json, quiet=quiet)
        return
    if questions is not None or (zipf is not None and chunks is None):
        raise UsageError("--questions needs --index DIR; --zipf needs --index DIR or --chunks.")
    if nodes is not None and chunks is None:
        raise UsageError("--nodes needs --chunks: how many chunks those machines hold.")
    machines = 1 if nodes is None else nodes
    if chunks is not None:
        from ragkv.planning.cluster import check_size, plan_cluster

        check_size(chunks, machines)  # before the sample is measured
    if not paths:
        raise UsageError("Say what to plan: PATH for an ingest, or --index DIR for a budget of KV.")
    settings = given_values(
        model=model,
        dtype=dtype,
        engines=split_names(engines),
        chunk_tokens=chunk_tokens,
        encoding=encoding_of(context_tokens),
        codec=codec,
        embedder=embedder,
        top_k=top_k,
    )
    from ragkv.ingest.source import require_existing

    require_existing(paths)
    sample_bytes = byte_count("--sample", sample)
    if model is None:
        kept, where = _of_an_ingest(paths)
        settings = kept | settings
        if not (quiet or as_json):
            note(f"Planning for {kept['model']}, {where}; for another model add --model PATH-OR-HUB-ID.")
    with stages("plan", silent=quiet or as_json) as show:
        show(0, 0, "starting")
        from ragkv.planning.plan import plan_ingest

        found = plan_ingest(
            *paths,
            device=device,
            folder=folder,
            sample_bytes=sample_bytes,
            seed=seed,
            seconds=seconds,
            beside=beside,
            on_step=show,
            **settings,
        )
    cluster = None
    if chunks is not None:
        cluster = plan_cluster(found, chunks, machines, zipf=1.0 if zipf is None else zipf, seed=seed)
    if as_json:
        print_json(found.to_json() | ({} if cluster is None else {"cluster": cluster.to_json()}))
        return
    for skipped in found.corpus.skipped if not quiet else ():
        note(f"skipped {skipped.path}: {skipped.reason}")
    _notify(found)
    if cluster is not None:
        _show_cluster(cluster)


def _of_an_ingest(paths: Sequence[Path]) -> tuple[dict[str, Any], str]:
    """What an ingest of the paths without --model would make chunks and KV with, and where its model comes from."""
    from ragkv.index.ingestion import default_model

    user = UserFile.read(user_file())
    index = Path(os.environ.get(VARIABLES["index"]) or user.table.get("index") or DEFAULT_INDEX).expanduser()
    named = os.environ.get(VARIABLES["model"])
    if (index / CONFIG_FILE).exists() and not named:
        config = load_config(index)
        return {name: getattr(config, name) for name in _PLANNED}, f"the model of {index}"
    found = {name: user.settings[name] for name in _PLANNED if name in user.settings}
    if named:
        return found | {"model": named}, f"as {VARIABLES['model']} says"
    if "model" in found:
        return found, f"as {user.path} says"
    return found | {"model": default_model(paths)}, "which `ragkv ingest` takes where none is named"


_PLANNED = ("model", "dtype", "engines", "chunk_tokens", "codec", "encoding", "embedder", "top_k")
"""The settings of an index or a user file that a plan is about."""


def _show_cluster(found: ClusterPlan) -> None:
    from ragkv.planning.cluster import BUSY

    ran = found.simulated
    echo()
    echo(
        f"{found.chunks:,.0f} chunks of {found.tokens / found.chunks:,.0f} tokens on {count(found.nodes, 'node')}: "
        f"{_bytes(found.kv_bytes)} of KV, {_bytes(found.kv_bytes_node)} on each, {_bytes(found.other_bytes)} of text, "
        f"vectors and pages; ingest {found.ingest_hours:,.1f} h, ${found.ingest_dollars:,.0f}."
    )
    echo()
    echo(
        f"All KV in one place: what it costs, how long a question waits for its {count(found.top_k, 'chunk')} to be "
        "loaded or encoded, and how often a chunk has to be read in a month so that keeping it costs less than "
        "encoding it each time."
    )
    echo()
    table = plain("KV in", "a month", "load", "encode", "pays from, reads a month")
    for tier in found.tiers:
        pays = "never" if tier.reads_to_pay is None else three_digits(tier.reads_to_pay)
        table.add_row(tier.name, f"${tier.dollars:,.0f}", _ms(tier.load_seconds), _ms(found.encode_seconds), pays)
    draw(table)
    echo()
    echo(
        f"Simulated {count(ran.questions, 'question')} from empty nodes, arriving at {_rate(ran.per_second)} "
        f"({BUSY:.0%} of what the nodes could answer with nothing stored): first token after {_ms(ran.median_seconds)} "
        f"at the median, {_ms(ran.p99_seconds)} for 99 of 100; {ran.memory_hits:.0%} of chunks "
        f"in memory, {ran.disk_hits:.0%} on disks, the rest in the object store or encoded; the busiest node has "
        f"{ran.busiest:.2f} of an even share; {count(ran.lost_nodes, 'node')} lost half-way, "
        f"{count(ran.repeated, 'question')} begun again, {ran.answered:,} answered."
    )
    echo("Assumed, not measured: the bandwidth, latency and price of each kind of storage (docs/tiers.md).")


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}/s" if per_second >= 10 else f"{per_second:.2g}/s"


def _notify(plan: Plan) -> None:
    corpus, seconds = plan.corpus, plan.seconds
    how = (
        f"all of {_bytes(corpus.source_bytes)} read"
        if corpus.whole
        else f"estimated from {corpus.read_sources:,} of {corpus.sources:,} files; ± is 95 % of such samples"
    )
    echo(f"{plan.model}, {plan.parameters / 1e6:,.0f}M parameters, {plan.dtype} on {plan.device}; {how}.")
    echo(
        f"{_number(corpus.documents)} documents, {_number(corpus.chunks)} chunks of at most {plan.chunk_tokens} "
        f"tokens, {_number(corpus.tokens)} tokens"
        + (f", {1 - corpus.distinct:.0%} of them twice and stored once" if corpus.distinct < 0.995 else "")
        + "."
    )
    if "context" in plan.encodings:
        mean = corpus.tokens.value / corpus.chunks.value
        echo(
            f"In context encoding, a chunk of {mean:,.0f} tokens is encoded behind {corpus.seen:,.0f} tokens of its "
            f"document on average, which makes {1 + corpus.seen / mean:.1f} times the tokens to encode."
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
    echo(f"Ingest: {_time(seconds.total)} ({shown}); {rates}.")
    echo(
        f"Disk with {plan.codec}: {_bytes(plan.disk_bytes.value)}, "
        f"of which {_bytes(plan.vector_bytes)} are vectors; KV in {' and '.join(plan.encodings)} encoding:"
    )
    echo()
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
    echo()
    echo(
        f"Recomputing takes {plan.recompute_seconds * 1e6:,.1f} µs/token: loading pays on a disk that reads faster "
        "than the last column."
    )
    echo()
    table = plain("engine", "first token", "prefill", "faster", "a later token")
    for engine in plan.engines:
        table.add_row(
            engine.engine,
            _milliseconds(engine.first_token),
            _milliseconds(engine.prefill),
            f"{engine.prefill_ms / engine.first_token_ms:,.1f}x",
            _ms(engine.token.value),
        )
    draw(table)
    first = plan.engines[0]
    echo()
    echo(
        f"Over {count(first.chunks, 'chunk')}, {first.context_tokens:,} tokens, from the page cache, without "
        "retrieval. "
        + (
            f"With {first.engine} no question gets faster."
            if plan.questions is None
            else f"With {first.engine} the ingest is repaid after {count(round(plan.questions), 'question')}."
        )
    )
    if plan.beside is not None:
        prefill, decode = plan.beside
        found = [(engine.engine, engine.overtaken_after(prefill, decode)) for engine in plan.engines]
        when = ", ".join(f"{name} " + ("never" if at is None else f"with token {at:,}") for name, at in found)
        echo(
            f"A runtime that prefills the {first.prompt_tokens:,} tokens of the prompt at {prefill:g} tokens/s and "
            f"decodes at {decode:g} overtakes in an answer: {when}."
        )
    if plan.left_out:
        echo()
        echo(f"Left out for lack of time (--seconds {plan.asked_seconds:g}): {' '.join(plan.left_out)}")
    if not plan.trust.trusted:
        echo()
        draw(Text(f"Do not trust these times. {' '.join(plan.trust.reasons)} {_AGAIN}", style="yellow"))


_AGAIN = "Run it again on a quiet machine, or with more --seconds; counts and sizes are not affected."


def _milliseconds(repeats: Repeats) -> str:
    """ "39.3 ms (38.9 to 41.0)"."""
    shown = f"{repeats.value * 1000:,.1f} ms"
    if len(repeats.seconds) < 2:
        return shown
    return f"{shown} ({repeats.low * 1000:,.1f} to {repeats.high * 1000:,.1f})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"


def _number(estimate: Estimate) -> str:
    return f"{estimate.value:,.0f}" + (f" ± {estimate.spread:,.0f}" if estimate.spread else "")


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


def models(
    checkpoint: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder, .gguf file or hub id to describe.", show_default=False)
    ],
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what a model needs, and which engines run on it exactly.

    The model is loaded and self-checked; then engines, bytes of KV per token and codec, memory, positions, and what
    will be slow. A model that ragkv cannot run is an error that says why. docs/models.md has a table of the families.

    Example: `ragkv models Qwen/Qwen3-4B`
    """
    if dtype is not None:
        one_of("--dtype", dtype, DTYPES)
    from ragkv.planning.calibration import model_requirements

    requirements = model_requirements(checkpoint, dtype=dtype or "auto", device=device)
    print_json(requirements.to_json()) if as_json else _show(requirements)


def _show(requirements: ModelRequirements) -> None:
    able = [name for name, reason in requirements.engines.items() if reason is None]
    rows = [
        ("model", f"{requirements.name} ({requirements.family})"),
        ("parameters", f"{requirements.parameters / 1e6:,.1f}M, {requirements.dtype} on {requirements.device}"),
        (
            "memory",
            f"{size(requirements.weight_bytes)} of weights, {size(1000 * requirements.kv_bytes['raw'])} for 1,000 "
            "tokens of context",
        ),
        ("positions", "no limit known" if requirements.positions is None else f"{requirements.positions:,}"),
        ("engines", ", ".join(able)),
        *((f"not {name}", reason) for name, reason in requirements.engines.items() if reason is not None),
        *((f"KV, {name}", f"{nbytes:,.0f} bytes/token") for name, nbytes in requirements.kv_bytes.items()),
    ]
    if requirements.state_bytes:
        rows.append(("states", f"{size(requirements.state_bytes)} per chunk, beside its KV"))
    if requirements.expanded_bytes is not None:
        rows.append(("KV, expanded", f"{requirements.expanded_bytes:,.0f} bytes/token, if keys and values were kept"))
    rows += [("slow", reason) for reason in requirements.slow]
    print_facts(rows)
