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

_RETRIEVAL = "Retrieval"
_PANEL = "Decoding (unset: as ragkv.toml says, else greedy)"


def query(
    question: Annotated[str, typer.Argument(help="What you want to know.", metavar="QUESTION")],
    index: Index = DEFAULT_INDEX,
    engine: Annotated[
        str | None,
        typer.Option(
            help="full, single, all, ape, block, pced, mapreduce, or one of your own.", show_default="the index's"
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Chunks to answer from.", show_default="the index's")] = None,
    retrieval: Annotated[
        str | None,
        typer.Option(
            help="dense, sparse, colbert, hybrid or bm25.", show_default="the index's", rich_help_panel=_RETRIEVAL
        ),
    ] = None,
    rerank: Annotated[
        bool | None,
        typer.Option(
            "--rerank/--no-rerank",
            help="Let the reranker judge the candidates.",
            show_default="if the index has one",
            rich_help_panel=_RETRIEVAL,
        ),
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option(
            help="Chunks that the reranker reads; the best --top-k of them remain.",
            show_default="the index's",
            rich_help_panel=_RETRIEVAL,
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=PATTERN",
            help="Only documents of which this holds, as source=notes/*.md; may be given several times.",
            show_default=False,
            rich_help_panel=_RETRIEVAL,
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", rich_help_panel=_PANEL)] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 is greedy; above, tokens are drawn.", rich_help_panel=_PANEL, show_default=False),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the likeliest tokens that together have this probability.",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None,
    top_k_tokens: Annotated[
        int | None,
        typer.Option(
            help="Draw from so many of the likeliest tokens (--top-k counts chunks).",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the tokens with at least this share of the best one's probability.",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1: tokens that the answer holds already become less likely.",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="The same seed draws the same answer.", rich_help_panel=_PANEL, show_default=False),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End before this text; may be given several times.", rich_help_panel=_PANEL, show_default=False
        ),
    ] = None,
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
        given = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k_tokens": top_k_tokens,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "seed": seed,
            "stop": stop or None,
        }
        pieces = rag.stream(
            question,
            engine=engine,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            decoding={name: value for name, value in given.items() if value is not None},
            retrieval=retrieval,
            rerank=rerank,
            candidates=candidates,
            where=where or (),
        )
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
        page += "" if source.heading is None else f", {source.heading}"
        won = "" if source.tokens_won is None else f", {count(source.tokens_won, 'token')}"
        first = " ".join(source.text.split())
        stages = dict(source.stages) | ({} if source.rerank_score is None else {"rerank": source.rerank_score})
        raw = ", ".join(f"{name} {score:.2f}" for name, score in stages.items() if name != "rrf")
        note(f"[{rank}] {source.document}{page} (score {source.score:.3f}: {raw}{won})")
        note(f"    {first if len(first) <= 72 else first[:71] + '…'}")
    timing, kv = answer.timing, answer.kv
    loaded = f"KV of {count(kv.hits, 'chunk')} loaded ({size(kv.bytes)}), {kv.misses} encoded anew"
    loaded = loaded if kv.hits or kv.misses else "everything prefilled anew"
    note(
        f"{answer.engine} on {index}: first token {timing.load + timing.first_token:.0f} ms "
        f"(load {timing.load:.0f}), total {timing.total:.0f} ms; {loaded}"
    )
