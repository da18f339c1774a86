"""`ragkv query`: one question and its answer with sources, or a file of questions; to an index, or about files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli.batch import ask_all, tell_batch
from ragkv.cli.console import beginning, count, note, print_json, say_piece, say_text, size
from ragkv.cli.context import open_contexts, refuse_options
from ragkv.cli.option import (
    DECODING,
    DEFAULT_INDEX,
    RUNTIME,
    BatchTokens,
    BlockTokens,
    Candidates,
    Device,
    Engine,
    Index,
    Json,
    MaxNewTokens,
    MaxRows,
    NoServer,
    Quiet,
    Rerank,
    RetrievalMode,
    Seed,
    Temperature,
    TopK,
    Where,
    block_tuning,
    stated,
)
from ragkv.cli.program import brief
from ragkv.cli.resident import Lodger, Reply, UnservedError, alone
from ragkv.config import RuntimeConfig
from ragkv.errors import UsageError
from ragkv.server.errand import Question, welcome
from ragkv.types import Answer

if TYPE_CHECKING:
    from ragkv.index.answer import AnswerStream
    from ragkv.index.contexts import Contexts
    from ragkv.pipeline import RagKV

__all__ = ["query", "show_sources"]


def query(
    ctx: typer.Context,
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
        str | None,
        typer.Option(
            help="Fail unless the index was made by this model; with --context, the model that answers.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        list[Path] | None,
        typer.Option(
            help="Answer from the whole text of this file, without an index; may be given several times.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    block_tokens: BlockTokens = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            help=(
                'Answer the questions of a JSONL file: {"question": "…"} on each line, and if you like "id", "engine", '
                '"where", "top_k", "max_new_tokens" and "context" (texts to answer from).'
            ),
            metavar="FILE",
            show_default=False,
            rich_help_panel=RUNTIME,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the answers here, one JSON object on each line; answers that are already there are kept.",
            metavar="FILE",
            show_default=False,
            rich_help_panel=RUNTIME,
        ),
    ] = None,
    batch_tokens: BatchTokens = None,
    max_rows: MaxRows = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is generated.")] = False,
    device: Device = None,
    no_server: NoServer = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answer a question from the index, starting from the stored KV; or many questions, or from whole files.

    The questions of a file are answered together, in one batch; a run that was stopped goes on where it was.

    Example: `ragkv query "Who founded Halden Works?" --engine pced --top-k 4`

    Example: `ragkv query --questions questions.jsonl --output answers.jsonl`

    Example: `ragkv query --context contract.pdf "When does it end?" --model Qwen/Qwen3-4B`

    Example: `ragkv query --context book.txt "Who betrays Orla?" --engine apb`
    """
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
    if questions is None:
        brief()
    limits = RuntimeConfig(**stated(batch_tokens=batch_tokens, max_rows=max_rows))
    options: dict[str, Any] = {
        "engine": engine,
        "max_new_tokens": max_new_tokens,
        "decoding": stated(
            temperature=temperature,
            top_p=top_p,
            top_k_tokens=top_k_tokens,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop or None,
        ),
    }
    tuning = block_tuning(block_tokens)
    if tuning and not context:
        raise UsageError("--block-tokens is for --context; an index keeps the lengths that it was ingested with.")
    if not context:
        searched = {"top_k": top_k, "retrieval": retrieval, "rerank": rerank, "candidates": candidates}
        options |= {**searched, "where": where or ()}
    if questions is not None and output is not None:
        with _source(ctx, index, context, model, device, limits, tuning, quiet=quiet) as source:
            chosen = engine or source.config.default_engine
            batch = ask_all(source, questions, output, engine=chosen, options=options, silent=quiet or as_json)
        tell_batch(batch, as_json=as_json, quiet=quiet)
        return
    assert question is not None
    asked = Question(text=question, place=str(index), model=model, options=options, quiet=quiet)
    reply: Reply | AnswerStream | None = None if context or alone(no_server) else _served(index, asked, device, limits)
    with ExitStack() as held:
        if reply is None:
            source = held.enter_context(_source(ctx, index, context, model, device, limits, tuning, quiet=quiet))
            reply = source.stream(question, **options)
            if not quiet and (warning := reply.warning):
                note(warning)
        held.callback(reply.close)
        for piece in reply:
            if stream:
                say_piece(piece)
        answer = reply.answer
    if as_json:
        print_json(answer.to_json())
        return
    say_text("" if stream else answer.text)
    if not quiet:
        show_sources(answer, count(len(context), "file") if context else index)


def _served(index: Path, asked: Question, device: str | None, limits: RuntimeConfig) -> Reply | None:
    """The answer of the server that is up for the index; None when there is none that would answer alike."""
    try:
        return Lodger(index, stated(device=device, **limits.given)).query(asked, note)
    except UnservedError:
        return None


@contextmanager
def _source(
    ctx: typer.Context,
    index: Path,
    context: list[Path] | None,
    model: str | None,
    device: str | None,
    limits: RuntimeConfig,
    tuning: Mapping[str, Mapping[str, int]],
    *,
    quiet: bool,
) -> Iterator[RagKV | Contexts]:
    """The files that are asked about, or the index, opened by this process."""
    if context:
        refuse_options(ctx)
        with open_contexts(context, model, device, limits, tuning=tuning, quiet=quiet) as files:
            yield files
        return
    from ragkv.pipeline import RagKV

    given = limits.given
    with RagKV.open(
        index, device=device, batch_tokens=given.get("batch_tokens"), max_rows=given.get("max_rows")
    ) as rag:
        welcome(rag, str(index), model, note, quiet=quiet)
        yield rag


def show_sources(answer: Answer, index: Path | str) -> None:
    """Print the chunks, best first, and the times. They go to stderr, so that a pipe gets only the answer."""
    note("")
    for rank, source in enumerate(answer.sources, start=1):
        place = "" if source.page is None else f", page {source.page}"
        place += "" if source.heading is None else f", {source.heading}"
        won = "" if source.tokens_won is None else f", {count(source.tokens_won, 'token')}"
        stages = dict(source.stages) | ({} if source.rerank_score is None else {"rerank": source.rerank_score})
        raw = ", ".join(f"{name} {score:.2f}" for name, score in stages.items() if name not in ("relative", "rrf"))
        scored = f"score {source.score:.3f}: {raw}" if raw else "as given"
        note(f"[{rank}] {source.document}{place} ({scored}{won})")
        note(f"    {beginning(source.text, 72)}")
    timing, kv = answer.timing, answer.kv
    loaded = f"KV of {count(kv.hits, 'chunk')} loaded ({size(kv.bytes)}), {kv.misses} encoded anew"
    loaded = loaded if kv.hits or kv.misses else "everything prefilled anew"
    note(
        f"{answer.engine} on {index}: first token {timing.load + timing.first_token:.0f} ms "
        f"(load {timing.load:.0f}), total {timing.total:.0f} ms; {loaded}"
    )
