"""`ragkv query`: answer one question, or a file of questions, from an index or, with `--context`, from files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ragkv.cli.console import beginning, count, echo_delta, echo_text, note, print_json, size
from ragkv.cli.ingest import MINI_NOTE, SMOLLM2_NOTE, show_skipped
from ragkv.cli.main import brief
from ragkv.cli.options import (
    DEFAULT_INDEX,
    RUNTIME,
    VARIABLES,
    BatchTokens,
    BlockTokens,
    DecodingOptions,
    Device,
    Engine,
    Index,
    Json,
    MaxRows,
    NoServer,
    Quiet,
    SearchOptions,
    System,
    UserFile,
    block_tuning,
    given_values,
    shared_options,
    user_file,
    without_server,
)
from ragkv.cli.question_files import answer_all, show_batch
from ragkv.config import IndexConfig, IngestConfig, RuntimeConfig, load_config
from ragkv.errors import IngestError, KVMismatchError, UsageError
from ragkv.server.local import LocalClient, ServerReply, UnservedError, query_body, question_warnings
from ragkv.types import Answer

if TYPE_CHECKING:
    from ragkv.index.answer import AnswerStream
    from ragkv.index.contexts import Contexts
    from ragkv.model.language_model import LanguageModel
    from ragkv.pipeline import RagKV

_FOR_INDEX = ("index", *(each.name for each in fields(SearchOptions)))
"""Options that say where and how to search."""


def refuse_options(ctx: typer.Context) -> None:
    """UsageError for an option that does not apply with `--context`; variables and the user file are ignored."""
    for name in _FOR_INDEX:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} is for searching an index, and --context answers from whole files; use one of them."
            )


def context_material(
    paths: Sequence[Path],
    model: str | None,
    device: str | None,
    *,
    tuning: Mapping[str, Mapping[str, int]],
    quiet: bool,
) -> tuple[LanguageModel, list[tuple[str, str]], IndexConfig]:
    """The parts of `Contexts`: the model that reads the files, their texts by name in the order given, the
    configuration.

    Settings come from variables and the user file, as for a new index; `ippd` answers unless `--engine` says
    otherwise; `tuning` adds to that of its engines. Raises UsageError for a missing file, and IngestError for a file
    that cannot be read.
    """
    from ragkv.index.create import new_config
    from ragkv.index.ingestion import default_model
    from ragkv.model.self_check import load_model

    user = UserFile.read(user_file())
    texts = _texts(paths, user.settings.get("ingest", IngestConfig()), quiet=quiet)
    chosen: dict[str, Any] = {name: value for name in ("model", "dtype") if (value := os.environ.get(VARIABLES[name]))}
    chosen = {**user.settings, **chosen, **({} if model is None else {"model": model})}
    chosen["default_engine"] = "ippd"  # all questions read one prefilled context
    if tuning:
        chosen["tuning"] = {**chosen.get("tuning", {}), **tuning}
    named = "model" in chosen
    if not named:
        chosen["model"] = default_model(paths)
    config = new_config(chosen)
    if not named and not quiet:
        note(MINI_NOTE if config.model == "mini" else SMOLLM2_NOTE)
    return load_model(config.model, dtype=config.dtype, device=device), texts, config


def _texts(paths: Sequence[Path], settings: IngestConfig, *, quiet: bool) -> list[tuple[str, str]]:
    """(name, text) of each file, read as an ingest reads it: by a process of its own, within the limits."""
    from ragkv.ingest import ParseLimits, Skipped
    from ragkv.ingest.sandbox import SourceReader
    from ragkv.ingest.source import find_sources

    sources, skipped = find_sources(paths)
    if named := [each for each in skipped if any(each.path == path.absolute() or each.path == path for path in paths)]:
        raise IngestError(f"Cannot read {named[0].path}: {named[0].reason}.")
    found, left_out = [], []
    with SourceReader(ParseLimits.of(settings)) as reader:
        for source in sources:
            read = reader.read(source)
            found.append((source.name, read.text))
            left_out += [Skipped(path=source.path, reason=reason) for reason in read.left_out]
    if not found:
        raise IngestError(f"No file of {', '.join(map(str, paths))} can be read; give text, Markdown, HTML or PDF.")
    if not quiet:
        show_skipped(skipped, left_out)
    return found


@shared_options
def query(
    ctx: typer.Context,
    *,
    question: Annotated[
        str | None, typer.Argument(help="What you want to know.", metavar="QUESTION", show_default=False)
    ] = None,
    index: Index = DEFAULT_INDEX,
    engine: Engine = None,
    system: System = None,
    search: SearchOptions,
    decoding: DecodingOptions,
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

    The questions of a file are answered together, in one batch; the same command continues a stopped run.

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
    limits = RuntimeConfig(**given_values(batch_tokens=batch_tokens, max_rows=max_rows))
    options = {"engine": engine, "system": system, **decoding.arguments}
    tuning = block_tuning(block_tokens)
    if tuning and not context:
        raise UsageError("--block-tokens is for --context; an index keeps the lengths that it was ingested with.")
    if not context:
        options |= search.arguments
        if model is not None:
            _require_model(index, model)
    if questions is not None and output is not None:
        with _source(ctx, index, context, model, device, limits, tuning, quiet=quiet) as source:
            if not context and not quiet:
                _note_mini(cast("RagKV", source))
            chosen = engine or source.config.default_engine
            batch = answer_all(source, questions, output, engine=chosen, options=options, silent=quiet or as_json)
        show_batch(batch, as_json=as_json, quiet=quiet)
        return
    assert question is not None
    reply: ServerReply | AnswerStream | None = None
    if not context and not without_server(no_server):
        server = LocalClient(index, given_values(device=device, **limits.given))
        with suppress(UnservedError):
            reply = server.query(query_body(question, options, warnings=not quiet), note)
    with ExitStack() as held:
        if reply is None:
            source = held.enter_context(_source(ctx, index, context, model, device, limits, tuning, quiet=quiet))
            reply = source.stream(question, **options)
            rag = None if context else cast("RagKV", source)
            for warning in [] if quiet else question_warnings(rag, reply):
                note(warning)
        held.callback(reply.close)
        for delta in reply:
            if stream:
                echo_delta(delta)
        answer = reply.answer
    if as_json:
        print_json(answer.to_json())
        return
    echo_text("" if stream else answer.text)
    if not quiet:
        show_sources(answer, count(len(context), "file") if context else index)


def _require_model(index: Path, model: str) -> None:
    """KVMismatchError unless `model` made the index."""
    made = load_config(index).model
    if model != made:
        raise KVMismatchError(
            f"The index at {index} was made by model {made!r}, not {model!r}; "
            "leave --model out, or ingest the documents into another --index."
        )


def _note_mini(rag: RagKV) -> None:
    from ragkv.index.ingestion import question_note

    if message := question_note(rag.config, rag.store):
        note(message)


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
    """What this process answers from: the files of `--context`, or the index."""
    if context:
        from ragkv.index.contexts import Contexts

        refuse_options(ctx)
        with Contexts(*context_material(context, model, device, tuning=tuning, quiet=quiet), limits=limits) as files:
            yield files
        return
    from ragkv.pipeline import RagKV

    given = limits.given
    with RagKV.open(
        index, device=device, batch_tokens=given.get("batch_tokens"), max_rows=given.get("max_rows")
    ) as rag:
        yield rag


def show_sources(answer: Answer, index: Path | str) -> None:
    """Print the chunks, best first, and the times. They go to stderr, so that a pipe gets only the answer."""
    note("")
    for query in answer.queries:
        written = query.rpartition(answer.question)[2].strip() if answer.question in query else ""
        note(f"searched {'again, the question with' if written else 'for'}: {beginning(written or query, 200)}")
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
    loaded += "" if answer.charge is None else f", {answer.charge:.1%} recomputed"
    weights = ", int8 weights," if answer.dtype == "int8" else ""
    note(
        f"{answer.engine}{weights} on {index}: first token {timing.load + timing.first_token:.0f} ms "
        f"(load {timing.load:.0f}), total {timing.total:.0f} ms; {loaded}"
    )
    if answer.finish_reason == "length":
        most = answer.decoding["max_new_tokens"]
        note(f"The answer was cut: it reached --max-new-tokens {most}, or the model's last position.")
