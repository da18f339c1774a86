"""Options that several commands share, so that each has one name and one help text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ragkv.boundary.toml import shortened
from ragkv.cli.completion import codecs, engine_lists, engines, indexes, modes
from ragkv.cli.console import note_wait
from ragkv.cli.setting import VARIABLES, UserFile, user_file
from ragkv.errors import UsageError

__all__ = [
    "DECODING",
    "DEFAULT_INDEX",
    "KV",
    "RUNTIME",
    "BatchTokens",
    "BlockTokens",
    "Candidates",
    "ChunkTokens",
    "Codec",
    "Debug",
    "Device",
    "DryRun",
    "Dtype",
    "Embedder",
    "Engine",
    "Engines",
    "Index",
    "Json",
    "JsonLines",
    "KVBudget",
    "MaxNewTokens",
    "MaxRows",
    "Model",
    "NoServer",
    "NoWait",
    "Quiet",
    "Rerank",
    "Reranker",
    "RetrievalMode",
    "Seed",
    "Temperature",
    "TopK",
    "Where",
    "WorkFolder",
    "block_tuning",
    "given_names",
    "given_numbers",
    "split_names",
    "stated",
    "wait",
]

DEFAULT_INDEX = Path("ragkv-index")
_RETRIEVAL = "Retrieval"
RUNTIME = "Many questions"
DECODING = "Decoding (default: as ragkv.toml says, else greedy)"
_LENGTH = re.compile("[0-9]{1,9}")


def _given(ctx: typer.Context, name: str) -> bool:
    """Whether the parameter's value comes from the command line or an environment variable."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _index(ctx: typer.Context, value: Path) -> Path:
    """The index that the user file names, if neither the option nor the variable does."""
    if _given(ctx, "index") or ctx.resilient_parsing:
        return value
    told = UserFile.read(user_file()).used("index")
    return value if told is None else Path(told).expanduser()


def _device(ctx: typer.Context, value: str | None) -> str | None:
    if value is not None or ctx.resilient_parsing:
        return value
    return UserFile.read(user_file()).used("device")


def _folder(ctx: typer.Context, value: Path | None) -> Path | None:
    if value is not None and not value.is_dir() and not ctx.resilient_parsing:
        raise UsageError(f"{value} is not a folder; make it, or leave --folder out.")
    return value


def block_tuning(text: str | None) -> dict[str, dict[str, int]]:
    """`[tuning.apb]` of `--block-tokens`: l_b, or l_b, l_a and l_p; UsageError for anything else."""
    if text is None:
        return {}
    numbers = [number.strip() for number in text.split(",")]
    if len(numbers) not in (1, 3) or not all(_LENGTH.fullmatch(number) for number in numbers):
        raise UsageError(
            f"--block-tokens is the length of a block, as in 4096, or of block, anchor and what is passed on, as in "
            f"4096,1024,512; not {shortened(text)}."
        )
    return {"apb": dict(zip(("block", "anchor", "passing"), map(int, numbers), strict=False))}


def stated(**options: Any) -> dict[str, Any]:
    """The options that were given a value; the others are left to the index or the defaults."""
    return {name: value for name, value in options.items() if value is not None}


def wait(no_wait: bool) -> dict[str, Any]:
    """How a job waits for another process that writes to the index: arguments of `RagKV.ingest`, `.gc` and others."""
    return {"timeout": 0 if no_wait else None, "on_wait": note_wait}


def split_names(text: str | None) -> tuple[str, ...] | None:
    """ "ape, block" -> ("ape", "block"); None stays None."""
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def given_names(option: str, text: str) -> list[str]:
    """The names of a list, each once and in order; UsageError if there is none."""
    names = list(dict.fromkeys(split_names(text) or ()))
    if not names:
        raise UsageError(f"{option} is empty; write a list of names with commas between them.")
    return names


def given_numbers(option: str, text: str, *, least: int = 1, most: int | None = None) -> list[int]:
    """The whole numbers of a list, each once and in order; UsageError for anything else, or beyond the bounds."""
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = []
    if not found or min(found) < least or (most is not None and max(found) > most):
        bounds = f"from {least} up" if most is None else f"from {least} to {most}"
        raise UsageError(f"{option} {text!r} is not a list of numbers {bounds}; write one such as 1,8,32.")
    return found


def _option(*names: str, setting: str, **more: Any) -> Any:
    """`typer.Option` with the environment variable of a setting."""
    return typer.Option(*names, envvar=VARIABLES[setting], **more)


Index = Annotated[
    Path,
    _option("--index", help="Folder of the index.", setting="index", callback=_index, autocompletion=indexes),
]
Device = Annotated[
    str | None,
    _option(
        "--device",
        help="cpu, cuda, cuda:1, …; cuda:0,cuda:1 splits the model's layers, auto does if one GPU is too small.",
        setting="device",
        show_default="cuda if there is one",
        callback=_device,
    ),
]
Model = Annotated[
    str | None,
    _option(
        "--model",
        help="Model folder, .gguf file or hub id; `mini` is the bundled one.",
        setting="model",
        show_default="mini",
    ),
]
Dtype = Annotated[
    str | None,
    _option("--dtype", help="auto, float32, bfloat16 or float16.", setting="dtype", show_default="auto"),
]
Engines = Annotated[
    str | None,
    _option(
        "--engines",
        help="Engines to store KV for.",
        setting="engines",
        show_default="ape,block,pced",
        autocompletion=engine_lists,
    ),
]
ChunkTokens = Annotated[
    int | None,
    _option(
        "--chunk-tokens",
        help="Most tokens of a chunk, as the model counts them.",
        setting="chunk_tokens",
        show_default="the model's, or 256",
    ),
]
Codec = Annotated[
    str | None,
    _option(
        "--codec",
        help="How KV is stored: raw, zstd (lossless), int8 or int4 (smaller, lossy).",
        setting="codec",
        show_default="raw",
        autocompletion=codecs,
    ),
]
KV = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help="When a chunk's KV is made: all at ingest, or on-demand, when a question first reads it.",
        show_default="all",
    ),
]
KVBudget = Annotated[
    str | None,
    typer.Option(
        "--kv-budget",
        help="The most KV that is kept, as in 200GB or none: what is least worth keeping leaves first.",
        show_default="none",
    ),
]
Embedder = Annotated[
    str | None,
    _option(
        "--embedder",
        help="Embedding model: `mini`, a folder, a hub id (BAAI/bge-m3), or `none` to search by words only.",
        setting="embedder",
        show_default="mini beside the mini model, else none",
    ),
]
Reranker = Annotated[
    str | None,
    _option(
        "--reranker",
        help="Cross-encoder that sorts the results: `mini`, a folder, a hub id (BAAI/bge-reranker-v2-m3), or `none`.",
        setting="reranker",
        show_default="mini beside the mini embedder, else none",
    ),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Log what happens and show tracebacks; may also be given after the command.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per answer, each on one line.")]
NoServer = Annotated[
    bool,
    typer.Option(
        "--no-server",
        envvar="RAGKV_NO_SERVER",
        help="Do the work in this process, even if a server is up for the index (ragkv serve).",
    ),
]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Fail at once if another process writes to the index; the error names it.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")]

Engine = Annotated[
    str | None,
    _option(
        "--engine",
        help="How the chunks are read: full, single, all, ippd, ape, block, pced, mapreduce, or an engine of your own.",
        setting="default_engine",
        show_default="the index's",
        autocompletion=engines,
    ),
]
TopK = Annotated[
    int | None, _option("--top-k", help="How many chunks to answer from.", setting="top_k", show_default="the index's")
]
RetrievalMode = Annotated[
    str | None,
    typer.Option(
        "--retrieval",
        help="How to search: dense, sparse, colbert, hybrid or bm25.",
        show_default="the index's",
        rich_help_panel=_RETRIEVAL,
        autocompletion=modes,
    ),
]
Rerank = Annotated[
    bool | None,
    typer.Option(
        "--rerank/--no-rerank",
        help="Sort the candidates with the index's reranker, or do not.",
        show_default="the index's",
        rich_help_panel=_RETRIEVAL,
    ),
]
Candidates = Annotated[
    int | None,
    typer.Option(
        help="How many chunks the reranker reads; the best --top-k of them remain.",
        show_default="the index's",
        rich_help_panel=_RETRIEVAL,
    ),
]
WorkFolder = Annotated[
    Path | None,
    typer.Option("--folder", callback=_folder, help="Measure on this disk.", show_default="the temporary folder"),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="FIELD=PATTERN",
        help="Only documents that match, such as source=notes/*.md; may be given several times.",
        show_default=False,
    ),
]
BlockTokens = Annotated[
    str | None,
    typer.Option(
        help="apb: tokens in a block, or in block, anchor and what a block passes on (4096,1024,512).",
        show_default="the paper's, for the document's length",
        metavar="TOKENS",
    ),
]
BatchTokens = Annotated[
    int | None,
    typer.Option(
        help="At most this many tokens go through the model in one step.",
        show_default="the index's, or from the memory at hand",
        rich_help_panel=RUNTIME,
        min=1,
    ),
]
MaxRows = Annotated[
    int | None,
    typer.Option(
        help="At most this many rows run at a time: a question is one, or one for each chunk (pced).",
        show_default="the index's, or from the memory at hand",
        rich_help_panel=RUNTIME,
        min=1,
    ),
]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens of an answer.", rich_help_panel=DECODING)]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 is greedy decoding; above 0, tokens are drawn.", rich_help_panel=DECODING, show_default=False),
]
Seed = Annotated[
    int | None,
    typer.Option(help="With the same seed, the same tokens are drawn.", rich_help_panel=DECODING, show_default=False),
]
