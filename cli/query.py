"""`ragkv query`: one question and its answer with sources, or a file of questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ragkv.cli.batch import Batch, ask_all
from ragkv.cli.console import beginning, count, note, print_json, say, say_piece, say_text, size
from ragkv.cli.mininote import tell_question
from ragkv.cli.option import (
    DECODING,
    DEFAULT_INDEX,
    Candidates,
    Device,
    Engine,
    Index,
    Json,
    MaxNewTokens,
    Quiet,
    Rerank,
    RetrievalMode,
    Seed,
    Temperature,
    TopK,
    Where,
    stated,
)
from ragkv.errors import KVMismatchError, UsageError
from ragkv.types import Answer

__all__ = ["query", "show_sources"]

_BATCH = "Many questions"


def query(
    question: Annotated[
        str | None, typer.Argument(help="What you want to know.", metavar="QUESTION", show_default=False)
    ] = None,
    index: Index = DEFAULT_INDEX,
    engine: Engine = None,
    top_k: TopK = None,
    retrieval: RetrievalMode = None,
    rerank: Rerank = None,
    candidates: Candidates = None,
    where: Where = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the most likely tokens that together have this probability.",
            rich_help_panel=DECODING,
            show_default=False,
        ),
    ] = None,
    top_k_tokens: Annotated[
        int | None,
        typer.Option(
            help="Draw from this many of the most likely tokens (--top-k counts chunks).",
            rich_help_panel=DECODING,
            show_default=False,
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the tokens with at least this share of the most likely token's probability.",
            rich_help_panel=DECODING,
            show_default=False,
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Above 1, tokens that the answer already contains become less likely.",
            rich_help_panel=DECODING,
            show_default=False,
        ),
    ] = None,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End the answer before this text; may be given several times.",
            rich_help_panel=DECODING,
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Fail unless the index was made by this model.", show_default=False)
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            help='Answer the questions of a JSONL file: {"question": "…"} on each line, with an "id" if you like.',
            metavar="FILE",
            show_default=False,
            rich_help_panel=_BATCH,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the answers here, one JSON object on each line; answers that are already there are kept.",
            metavar="FILE",
            show_default=False,
            rich_help_panel=_BATCH,
        ),
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is generated.")] = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answer a question from the index, starting from the stored KV.

    Example: `ragkv query "Who founded Halden Works?" --engine pced --top-k 4`

    Example: `ragkv query --questions questions.jsonl --output answers.jsonl`
    """
    from ragkv.pipeline import RagKV

    if (question is None) == (questions is None):
        raise UsageError('Give one question ("Who …?"), or a file of them with --questions FILE.')
    if (questions is None) != (output is None):
        raise UsageError(
            "--questions needs --output, and --output needs --questions: the answers are written to a file."
        )
    if stream and questions is not None:
        raise UsageError("--stream is for one question; leave it out.")
    if stream and as_json:
        raise UsageError("--stream and --json cannot be used together; choose one.")
    with RagKV.open(index, device=device) as rag:
        if model is not None and model != rag.config.model:
            raise KVMismatchError(
                f"The index at {index} was made by model {rag.config.model!r}, not {model!r}; "
                "leave --model out, or ingest the documents into another --index."
            )
        if not quiet:
            tell_question(rag)
        decoding = stated(
            temperature=temperature,
            top_p=top_p,
            top_k_tokens=top_k_tokens,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop or None,
        )
        options: dict[str, Any] = {
            "engine": engine,
            "top_k": top_k,
            "max_new_tokens": max_new_tokens,
            "decoding": decoding,
            "retrieval": retrieval,
            "rerank": rerank,
            "candidates": candidates,
            "where": where or (),
        }
        if questions is not None and output is not None:
            chosen = engine or rag.config.default_engine
            batch = ask_all(
                lambda text: rag.query(text, **options), questions, output, engine=chosen, silent=quiet or as_json
            )
            _tell_batch(batch, as_json=as_json, quiet=quiet)
            return
        assert question is not None
        pieces = rag.stream(question, **options)
        if not quiet and (warning := pieces.warning):
            note(warning)
        for piece in pieces:
            if stream:
                say_piece(piece)
        answer = pieces.answer
    if as_json:
        print_json(answer.to_json())
        return
    say_text("" if stream else answer.text)
    if not quiet:
        show_sources(answer, index)


def _tell_batch(batch: Batch, *, as_json: bool, quiet: bool) -> None:
    """Print the totals; exit with 1 if a question has no answer."""
    if as_json:
        print_json(batch.to_json())
    else:
        for failed in batch.failed:
            note(f"{failed['where']}: {failed['error']}")
        if not quiet:
            kept = f", {batch.kept} answered before" if batch.kept else ""
            read = batch.kv["hits"] - batch.kv["memory_hits"]
            say(
                f"{batch.output}: {count(batch.answered, 'answer')} in {batch.seconds:.1f} s{kept}; "
                f"KV of {count(batch.kv['hits'], 'chunk')} used, {read} read from the store."
            )
    if batch.failed:
        raise typer.Exit(1)


def show_sources(answer: Answer, index: Path) -> None:
    """Print the chunks, best first, and the times. They go to stderr, so that a pipe gets only the answer."""
    note("")
    for rank, source in enumerate(answer.sources, start=1):
        place = "" if source.page is None else f", page {source.page}"
        place += "" if source.heading is None else f", {source.heading}"
        won = "" if source.tokens_won is None else f", {count(source.tokens_won, 'token')}"
        stages = dict(source.stages) | ({} if source.rerank_score is None else {"rerank": source.rerank_score})
        raw = ", ".join(f"{name} {score:.2f}" for name, score in stages.items() if name != "rrf")
        note(f"[{rank}] {source.document}{place} (score {source.score:.3f}: {raw}{won})")
        note(f"    {beginning(source.text, 72)}")
    timing, kv = answer.timing, answer.kv
    loaded = f"KV of {count(kv.hits, 'chunk')} loaded ({size(kv.bytes)}), {kv.misses} encoded anew"
    loaded = loaded if kv.hits or kv.misses else "everything prefilled anew"
    note(
        f"{answer.engine} on {index}: first token {timing.load + timing.first_token:.0f} ms "
        f"(load {timing.load:.0f}), total {timing.total:.0f} ms; {loaded}"
    )
