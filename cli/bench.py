"""`ragkv bench`: measure ragkv and a baseline in the same run (docs/design.md)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.benchmarks.speed.report import Report
from ragkv.cli.console import draw, note, print_json
from ragkv.cli.grid import plain, print_grid
from ragkv.cli.option import Device, Json, Quiet, WorkFolder, block_tuning, given_names, given_numbers
from ragkv.cli.progress import stages

if TYPE_CHECKING:
    from ragkv.benchmarks.speed.index import Growth

__all__ = ["app"]

app = typer.Typer(help="Measure ragkv beside a baseline, in one run.", no_args_is_help=True)
Quick = Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds: at most a minute on two cores.")]


@app.command()
def apb(
    lengths: Annotated[str, typer.Option(help="Tokens of the documents.")] = "4096,8192,16384,32768",
    block_tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens in a block, or in block, anchor and what a block passes on (4096,1024,512).",
            show_default="2048,512,128; for a short document less",
            metavar="TOKENS",
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Also the slowest of so many ranks, on a processor; 1: no.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds per length; medians are shown.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="auto (bfloat16 where the processor has it), float32, bfloat16.")] = "auto",
    quick: Quick = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prefill of one long document: in one pass, by Star Attention, and by APB, blocks one after another or on 2 ranks.

    Processor time of one thread, and the operations that the formula counts. Example: `ragkv bench apb --quick`
    """
    from ragkv.benchmarks.speed.longdocument import measure
    from ragkv.engines import make_engine

    given = block_tuning(block_tokens)
    report = measure(
        [2048] if quick else given_numbers("--lengths", lengths),
        cut=make_engine("apb", given).config.lengths(1) if given else None,
        ranks=ranks,
        rounds=1 if quick else rounds,
        dtype=dtype,
        device=device,
        on_step=None if quiet or as_json else note,
    )
    show(report, as_json, quiet=quiet)


@app.command()
def ttft(
    tokens: Annotated[str, typer.Option(help="Context lengths.")] = "512,2048,8192",
    rounds: Annotated[int, typer.Option(help="Rounds per length; medians are shown.", min=1)] = 3,
    model: Annotated[
        str | None, typer.Option(help="Model to measure.", show_default="a random Llama of 100M parameters")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    quick: Quick = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time to the first token from stored KV, compared with transformers' own sdpa prefill of the same tokens.

    Loading from the store is included, retrieval is not. Example: `ragkv bench ttft --tokens 512,8192`
    """
    from ragkv.benchmarks.speed.ttft import measure

    lengths = [512, 2048] if quick else given_numbers("--tokens", tokens)
    report = measure(
        lengths,
        rounds=1 if quick else rounds,
        model=model,
        dtype=dtype,
        device=device,
        on_step=None if quiet or as_json else note,
    )
    show(report, as_json, quiet=quiet)


@app.command()
def decode(
    tokens: Annotated[str, typer.Option(help="Context lengths.")] = "2048,16384",
    rounds: Annotated[int, typer.Option(help="Rounds of 8 tokens per length; medians are shown.", min=1)] = 3,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    quick: Quick = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time of one decode step over cached chunks (engine block), compared with transformers' own over the same KV.

    The baselines are transformers' DynamicCache and StaticCache. Example: `ragkv bench decode --tokens 16384`
    """
    from ragkv.benchmarks.speed.decode import measure

    report = measure(
        [2048] if quick else given_numbers("--tokens", tokens),
        rounds=1 if quick else rounds,
        dtype=dtype,
        device=device,
        on_step=None if quiet or as_json else note,
    )
    show(report, as_json, quiet=quiet)


@app.command()
def batch(
    questions: Annotated[str, typer.Option(help="Numbers of questions asked together.")] = "16",
    chunks: Annotated[int, typer.Option(help="Chunks of 256 tokens that a question reads.", min=1)] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are shown.", min=1)] = 3,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    quick: Quick = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Many questions at once (engine block), beside one by one and beside transformers with one cache for all.

    Example: `ragkv bench batch --questions 4,16`
    """
    from ragkv.benchmarks.speed.batch import measure

    report = measure(
        [4] if quick else given_numbers("--questions", questions),
        chunks=2 if quick else chunks,
        rounds=1 if quick else rounds,
        dtype=dtype,
        device=device,
        on_step=None if quiet or as_json else note,
    )
    show(report, as_json, quiet=quiet)


@app.command()
def ingest(
    chunks: Annotated[int, typer.Option(help="Chunks of 32 to 512 tokens.", min=1)] = 48,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are shown.", min=1)] = 3,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    quick: Quick = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Chunks of mixed length prefilled to KV, beside one at a time and beside padded batches of 8.

    Example: `ragkv bench ingest --chunks 48`
    """
    from ragkv.benchmarks.speed.ingest import measure

    report = measure(
        16 if quick else chunks,
        rounds=1 if quick else rounds,
        dtype=dtype,
        device=device,
        on_step=None if quiet or as_json else note,
    )
    show(report, as_json, quiet=quiet)


@app.command()
def store(
    rounds: Annotated[int, typer.Option(help="Rounds; medians are shown.", min=1)] = 15,
    folder: WorkFolder = None,
    quick: Quick = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Speed of the store on 100 MB of raw KV: reading against a memcpy, writing against a plain file, and churn.

    Example: `ragkv bench store --quick`
    """
    from ragkv.benchmarks.speed.store import measure

    report = measure(
        rounds=5 if quick else rounds,
        documents=60 if quick else 100,
        folder=folder,
        on_step=None if quiet or as_json else note,
    )
    show(report, as_json, quiet=quiet)


@app.command()
def codec(
    questions: Annotated[int, typer.Option(help="Questions per engine.", min=1)] = 330,
    engines: Annotated[str, typer.Option(help="Engines to compare answers of.")] = "block,ape,pced",
    model: Annotated[str, typer.Option(help="Model whose KV is stored.")] = "mini",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quick: Quick = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Size, speed and changed answers of every codec, compared with bf16, memcpy and a random last bit.

    Questions are about generated worlds that mini has never seen. Example: `ragkv bench codec --quick`
    """
    from ragkv.benchmarks.speed.codec import measure

    report = measure(
        questions=questions,
        model=model,
        dtype=dtype,
        quick=quick,
        engines=given_names("--engines", engines),
        device=device,
        on_step=None if quiet else note,
    )
    show(report, as_json, quiet=quiet)


@app.command()
def retrieval(
    chunks: Annotated[int, typer.Option(help="Chunks in each index.", min=100)] = 100_000,
    questions: Annotated[int, typer.Option(help="Questions; medians are shown.", min=1)] = 50,
    folder: WorkFolder = None,
    quick: Quick = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Dense and sparse indexes of synthetic chunks, compared with FAISS called directly and with bm25s.

    Measures queries, building, opening and memory. Example: `ragkv bench retrieval --quick`
    """
    from ragkv.benchmarks.speed.retrieval import measure

    report = measure(
        chunks=min(chunks, 20_000) if quick else chunks,
        questions=min(questions, 20) if quick else questions,
        folder=folder,
        on_step=None if quiet or as_json else note,
    )
    show(report, as_json, quiet=quiet)


@app.command()
def ippd(
    rounds: Annotated[int, typer.Option(help="Rounds per shape; medians are shown.", min=1)] = 3,
    dtype: Annotated[str, typer.Option(help="auto (bfloat16 where the processor has it), float32, bfloat16.")] = "auto",
    quick: Quick = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Many questions about common contexts, compared with transformers' generate in batches and with a prefix cache.

    The four data sets of the IPPD paper in their sizes, the longest scaled down. Example: `ragkv bench ippd --quick`
    """
    from ragkv.benchmarks.speed.ippd import SHAPES, measure

    report = measure(
        shapes=[shape.shorter() for shape in SHAPES] if quick else SHAPES,
        rounds=1 if quick else rounds,
        dtype=dtype,
        device=device,
        on_step=None if quiet or as_json else note,
    )
    show(report, as_json, quiet=quiet)


@app.command()
def index(
    sizes: Annotated[str, typer.Option(help="Sizes of the indexes, in chunks.")] = "1000,20000,100000",
    only: Annotated[
        str, typer.Option(help="What to measure of each, besides making it.")
    ] = "open,ask,where,change,upkeep",
    rounds: Annotated[int, typer.Option(help="Documents that are changed and deleted; medians are shown.", min=1)] = 3,
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep the indexes here, where the same command goes on and finds them.", show_default="none"),
    ] = None,
    quick: Quick = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Costs of indexes of several sizes: ingest, opening, questions, --where, one changed document, upkeep, memory.

    Processor time on one thread (in brackets: on the clock), compared with the first size. The documents are generated,
    and the models tiny. Example: `ragkv bench index --sizes 1000,100000 --folder /var/tmp/bench --only open,ask`
    """
    from ragkv.benchmarks.speed.index import measure

    with stages("bench index", silent=quiet or as_json) as step:
        growth = measure(
            [1000, 4000] if quick else given_numbers("--sizes", sizes),
            parts=given_names("--only", only),
            rounds=1 if quick else rounds,
            folder=folder,
            on_step=step,
        )
    if as_json:
        print_json(growth.report.to_json())
    else:
        _show_growth(growth, quiet=quiet)


@app.command()
def serve(
    streams: Annotated[int, typer.Option(help="Questions asked at the same time.", min=1)] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are shown.", min=1)] = 3,
    minutes: Annotated[
        float, typer.Option(help="Then so many minutes of questions, uploads, deletes and clients that leave.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="What the mixed load is drawn from.")] = 0,
    quick: Quick = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Many streams from one `ragkv serve`, compared with the same questions one after another.

    Errors, and answers unlike those of a single question, are counted. Example: `ragkv bench serve --minutes 10`
    """
    from ragkv.benchmarks.speed.serving import measure

    report = measure(
        8 if quick else streams,
        rounds=1 if quick else rounds,
        minutes=minutes,
        seed=seed,
        documents=2 if quick else 8,
        device=device,
        on_step=None if quiet or as_json else note,
    )
    show(report, as_json, quiet=quiet)


def show(report: Report, as_json: bool, *, quiet: bool = False) -> None:
    """Print the report as JSON, or as a table with the machine below it."""
    if as_json:
        print_json(report.to_json())
        return
    table = plain("what", "value", "baseline", "", "ratio")
    for row in report.rows:
        table.add_row(
            row.name,
            f"{_shown(row.value)} {row.unit}",
            row.baseline,
            f"{_shown(row.baseline_value)} {row.unit}",
            f"{row.ratio:,.{1 if row.ratio >= 10 else 2}f}x",
        )
    draw(table)
    _note_machine(report, quiet=quiet)


def _show_growth(growth: Growth, *, quiet: bool) -> None:
    """A column for each size, and how much more the last one costs than the first."""
    rows: dict[str, list[str]] = {}
    for at, size in enumerate(growth.sizes):
        for one in growth.figures[size]:
            cells = rows.setdefault(f"{one.name} ({one.unit})", ["-"] * len(growth.sizes))
            cells[at] = _shown(one.value) + ("" if one.wall is None else f" ({_shown(one.wall)})")
    print_grid(
        ["", *(f"{size:,} chunks" for size in growth.sizes), "growth"],
        [[name, *cells, growth.growth(name.rsplit(" (", 1)[0])] for name, cells in rows.items()],
    )
    _note_machine(growth.report, quiet=quiet)


def _note_machine(report: Report, *, quiet: bool) -> None:
    if not quiet:
        note(f"{report.machine}; " + ", ".join(f"{name} {version}" for name, version in report.versions.items()))


def _shown(number: float) -> str:
    """One decimal, or two significant digits of what is smaller than one."""
    return f"{number:,.1f}" if abs(number) >= 1 or number == 0 else f"{number:.2g}"
