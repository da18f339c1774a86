"""`ragkv query` answers one question, or a file of questions, from an index or, with `--context`, from files. `ragkv
chat` is a conversation in the terminal, or one question per line of a pipe.

If a server is running for the index, it answers; otherwise this process loads the model and answers itself.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from ragkv.cli.console import (
    count,
    echo,
    echo_delta,
    echo_text,
    fail,
    loading,
    note,
    note_quote,
    note_text,
    print_json,
    print_json_line,
    size,
)
from ragkv.cli.ingest import MINI_NOTE, SMOLLM2_NOTE, show_skipped
from ragkv.cli.main import brief
from ragkv.cli.options import (
    DEFAULT_INDEX,
    RUNTIME,
    VARIABLES,
    BatchTokens,
    BlockTokens,
    ChatArguments,
    Device,
    Index,
    Json,
    JsonLines,
    MaxSequences,
    NoServer,
    QuestionArguments,
    Quiet,
    Resident,
    Threads,
    UserFile,
    block_tuning,
    given_values,
    one_among,
    shared_options,
    source_of,
    user_file,
    without_server,
)
from ragkv.cli.question_files import answer_all, show_counts
from ragkv.config import HISTORY, IndexConfig, IngestConfig, RuntimeConfig, load_config, one_of
from ragkv.errors import IngestError, KVMismatchError, RagkvError, UsageError
from ragkv.question import question_options
from ragkv.server.local import LocalClient, ServerReply, UnservedError, first_time, query_body, question_warnings
from ragkv.types import Answer
from ragkv.util.display import beginning
from ragkv.util.options import at_door

if TYPE_CHECKING:
    from ragkv.index.answer import AnswerStream
    from ragkv.index.contexts import Contexts
    from ragkv.model.language_model import LanguageModel
    from ragkv.pipeline import RagKV

S = TypeVar("S")
T = TypeVar("T")
_FOR_INDEX = ("index", "steps", *(each.name for each in at_door(question_options(), "search")))
"""Options for where and how to search."""


def refuse_options(ctx: typer.Context) -> None:
    """UsageError for an option that does not apply with `--context`; variables and the user file are ignored."""
    for name in _FOR_INDEX:
        if source_of(ctx, name) == "COMMANDLINE":
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
    from ragkv.index.index import load_language_model
    from ragkv.index.ingestion import default_model

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
    return load_language_model(config, device), texts, config


def _texts(paths: Sequence[Path], settings: IngestConfig, *, quiet: bool) -> list[tuple[str, str]]:
    """(name, text) of each file, read like at an ingest: in a separate process, within the limits."""
    from ragkv.ingest import ParseLimits, Skipped
    from ragkv.ingest.sandbox import SourceReader
    from ragkv.ingest.source import find_sources

    sources, skipped = find_sources(paths)
    if named := [each for each in skipped if any(each.path == path.absolute() or each.path == path for path in paths)]:
        raise IngestError(f"Cannot read {named[0].path}: {named[0].reason}.")
    texts, left_out = [], []
    with SourceReader(ParseLimits.of(settings)) as reader:
        for source in sources:
            read = reader.read(source)
            texts.append((source.name, read.text))
            left_out += [Skipped(path=source.path, reason=reason) for reason in read.left_out]
    if not texts:
        raise IngestError(f"No file of {', '.join(map(str, paths))} can be read; give text, Markdown, HTML or PDF.")
    if not quiet:
        show_skipped(skipped, left_out)
    return texts


@shared_options
def query(
    ctx: typer.Context,
    *,
    question: Annotated[
        str | None, typer.Argument(help="What you want to know.", metavar="QUESTION", show_default=False)
    ] = None,
    index: Index = DEFAULT_INDEX,
    options: QuestionArguments,
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
    max_sequences: MaxSequences = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is generated.")] = False,
    device: Device = None,
    threads: Threads = None,
    resident: Resident = None,
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
    if str(output) == "-":
        raise UsageError("Answers are written to a file, not to stdout; name one, as in --output answers.jsonl.")
    if stream and questions is not None:
        raise UsageError("--stream is for one question; leave it out.")
    if stream and as_json:
        raise UsageError("--stream and --json cannot be used together; choose one.")
    if questions is None:
        brief()
    limits = RuntimeConfig(**given_values(batch_tokens=batch_tokens, max_sequences=max_sequences))
    tuning = block_tuning(block_tokens)
    if tuning and not context:
        raise UsageError("--block-tokens is for --context; an index keeps the lengths that it was ingested with.")
    if not context and model is not None:
        _require_model(index, model)
    if questions is not None and output is not None:
        with _source(ctx, index, context, model, device, limits, tuning, quiet=quiet) as source:
            if not context and not quiet:
                from ragkv.index.ingestion import question_note

                if message := question_note(source.config, cast("RagKV", source).store):
                    note(message)
            chosen = options.get("engine") or source.config.default_engine
            counts = answer_all(source, questions, output, engine=chosen, options=options, silent=quiet or as_json)
        show_counts(counts, as_json=as_json, quiet=quiet)
        return
    assert question is not None
    reply: ServerReply | AnswerStream | None = None
    if not context and not without_server(no_server):
        server = LocalClient(index, given_values(device=device, **limits.given))
        with suppress(UnservedError):
            reply = server.query(query_body(question, options, warnings=not quiet), note)
    leaving = reply is None and not context and not without_server(no_server) and _by_a_person()
    with ExitStack() as held:
        if reply is None:
            with loading(model if context else load_config(index).model, silent=quiet):
                source = held.enter_context(_source(ctx, index, context, model, device, limits, tuning, quiet=quiet))
                reply = source.stream(question, **options)
                warnings = [] if quiet else question_warnings(None if context else cast("RagKV", source), reply)
            for warning in warnings:
                note(warning)
        held.callback(reply.close)
        for delta in reply:
            if stream:
                echo_delta(delta)
        answer = reply.answer
    if as_json:
        print_json(answer.to_json())
    else:
        echo_text("" if stream else answer.text)
        if not quiet:
            show_sources(answer, count(len(context), "file") if context else index)
    if leaving and (UserFile.read(user_file()).table.get("resident", True) if resident is None else resident):
        _leave_server(ctx, index, given_values(device=device, threads=threads, **limits.given), quiet=quiet)


def _by_a_person() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")


def _leave_server(ctx: typer.Context, index: Path, options: Mapping[str, Any], *, quiet: bool) -> None:
    """Leave a process behind that answers the next questions, and say so the first time."""
    from ragkv.cli.serve import IDLE_SECONDS, leave_server

    with suppress(OSError):  # nobody can be told, because the index cannot be written
        if leave_server(index, options) and not quiet and first_time(index):
            where = f" --index {shlex.quote(str(index))}" if source_of(ctx, "index") == "COMMANDLINE" else ""
            kept = f"ragkv keeps {load_config(index).model} loaded for {IDLE_SECONDS // 60} minutes"
            note(f"{kept} for the next question; `ragkv stop{where}` ends it, --no-resident prevents it.")


def _require_model(index: Path, model: str) -> None:
    """KVMismatchError unless `model` made the index."""
    made = load_config(index).model
    if model != made:
        raise KVMismatchError(
            f"The index at {index} was made by model {made!r}, not {model!r}; "
            "leave --model out, or ingest the documents into another --index."
        )


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
    """The source of this process's answers: the files of `--context`, or the index."""
    if context:
        from ragkv.index.contexts import Contexts

        refuse_options(ctx)
        with Contexts(*context_material(context, model, device, tuning=tuning, quiet=quiet), limits=limits) as files:
            yield files
        return
    from ragkv.pipeline import RagKV

    given = limits.given
    with RagKV.open(
        index, device=device, batch_tokens=given.get("batch_tokens"), max_sequences=given.get("max_sequences")
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
        note_quote(source.snippet)
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


_HELP = """/sources       show the full text of the chunks behind the last answer
/engine NAME   answer with another engine from now on; without NAME, list the engines
/clear         forget the conversation; the next question begins a new one
/help          show this list
/quit          end, as Ctrl-D does; Ctrl-C stops a running answer"""


@shared_options
def chat(
    *,
    index: Index = DEFAULT_INDEX,
    options: ChatArguments,
    history: Annotated[
        str | None,
        typer.Option(
            help="What earlier turns are used for: prompt (and search), search, none, or auto.",
            show_default="the index's, or auto",
            autocompletion=one_among(HISTORY),
        ),
    ] = None,
    history_tokens: Annotated[
        int, typer.Option(help="Most tokens of earlier turns in the prompt; 0 for none.", min=0)
    ] = 512,
    rewrite: Annotated[
        bool | None,
        typer.Option(
            "--rewrite/--no-rewrite",
            help="Have the model rewrite a follow-up question for the search.",
            show_default="the index's, or no",
        ),
    ] = None,
    device: Device = None,
    threads: Threads = None,
    no_server: NoServer = False,
    as_json: JsonLines = False,
    quiet: Quiet = False,
) -> None:
    """Hold a conversation over your documents; answers are streamed and come with their sources.

    The search uses a question together with the two before it, or with --rewrite what the model makes of it. If the
    model can use them, the prompt holds the last turns, after the documents, so that stored KV can still be used. In a
    pipe, every line of the input is a question. Type /help for the commands.

    Example: `ragkv chat --index my-index --engine pced`
    """
    if history is not None:
        one_of("--history", history, HISTORY)
    turns = {"history": history, "history_tokens": history_tokens, "rewrite": rewrite}
    common = {name: value for name, value in options.items() if name != "engine"}
    own = without_server(no_server)
    with Chat(index, device, common, turns, by_itself=own, as_json=as_json, quiet=quiet) as session:
        session.choose(options.get("engine"))
        if sys.stdin.isatty() and not quiet:
            note(f"{session.engine} on {index}. Type a question, /help for commands, or Ctrl-D to end.")
        for line in _lines():
            if not session.take(line):
                break
    if session.code:
        raise typer.Exit(session.code)


class Chat:
    """A conversation, line by line, through the index's server, or in this process if there is none or it has ended.

    `code` is the exit code of the last failure, with which a pipe ends.
    """

    def __init__(
        self,
        index: Path,
        device: str | None,
        options: Mapping[str, Any],
        turns: Mapping[str, Any],
        *,
        by_itself: bool,
        as_json: bool,
        quiet: bool,
    ) -> None:
        self._index = index
        self._device = device
        self._options = options
        self._conversation = turns
        self._as_json = as_json
        self._quiet = quiet
        self._opened = ExitStack()
        self._server = None if by_itself else LocalClient(index, given_values(device=device))
        self._rag: RagKV | None = None
        self._turns: list[tuple[str, str]] = []
        self._last: Answer | None = None
        self.engine = ""
        self.code = 0

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def choose(self, engine: str | None) -> None:
        """Answer with this engine from now on: check the settings, load the model, and show warnings."""
        body = self._body("?", engine, warnings=not self._quiet)
        self.engine, warnings = self._by(lambda server: server.check(body), lambda rag: self._check(rag, engine))
        for warning in warnings:
            note(warning)

    def _check(self, rag: RagKV, engine: str | None) -> tuple[str, list[str]]:
        # a stream does nothing until it is read, but it checks its settings: refuse wrong ones before the model loads
        stream = rag.stream("?", engine=engine, **self._options)
        rag.index.require_same_model()
        rag.model  # noqa: B018 - loaded now, so that the first question need not wait
        return engine or rag.config.default_engine, [] if self._quiet else question_warnings(rag, stream)

    def _body(self, question: str, engine: str | None, **more: Any) -> dict[str, Any]:
        """The body of a request to the server."""
        turns = {"history_mode" if name == "history" else name: value for name, value in self._conversation.items()}
        return query_body(question, self._options, engine=engine, **turns, **more)

    def _reply(self, question: str) -> ServerReply | AnswerStream:
        turns = [{"question": asked, "answer": answer} for asked, answer in self._turns]
        body = self._body(question, self.engine, history=turns)
        return self._by(lambda server: server.query(body, note), lambda rag: self._stream(rag, question))

    def _stream(self, rag: RagKV, question: str) -> AnswerStream:
        conversation = rag.conversation(**self._conversation)
        for asked, answer in self._turns:
            conversation.add(asked, answer)
        return rag.stream(conversation.ask(question, engine=self.engine, **self._options))

    def _by(self, there: Callable[[LocalClient], S], here: Callable[[RagKV], T]) -> S | T:
        if self._server is not None:
            try:
                return there(self._server)
            except UnservedError:
                self._server = None
        if self._rag is not None:
            return here(self._rag)
        with loading(load_config(self._index).model, silent=self._quiet):
            from ragkv.pipeline import RagKV

            self._rag = self._opened.enter_context(RagKV.open(self._index, device=self._device))
            return here(self._rag)

    def take(self, line: str) -> bool:
        """Answer a line or run its command; False if it ends the conversation."""
        text = line.strip()
        if text == "/quit":
            return False
        try:
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._ask(text)
        except RagkvError as error:  # the conversation continues
            if not sys.stdin.isatty():
                self.code = error.exit_code
            if self._as_json:
                print_json_line({"question": text, "error": str(error)})
            fail(str(error))
        return True

    def _command(self, text: str) -> None:
        from ragkv.util.plugins import ENGINES  # it reads the metadata of packages

        name, _, argument = text.partition(" ")
        match name, argument.strip():
            case "/engine", "":
                names = ENGINES.names()
                note(f"{self.engine}; there are {', '.join(names)}")
            case "/engine", engine:
                self.choose(engine)
                note(f"{engine} answers from now on")
            case "/clear", "":
                self._turns.clear()
                note("the conversation is forgotten; the next question begins a new one")
            case "/sources", "":
                if self._last is None:
                    raise UsageError("There is no answer yet; ask something first.")
                for rank, source in enumerate(self._last.sources, start=1):
                    page = "" if source.page is None else f", page {source.page}"
                    note(f"[{rank}] {source.document}{page} (score {source.score:.3f}, chunk {source.chunk_id})")
                    note_text(source.text)
            case "/help", "":
                note_text(_HELP)
            case _:
                raise UsageError(f"There is no command {text!r}; /help lists them.")

    def _ask(self, question: str) -> None:
        stream = self._reply(question)
        shown = False
        with _stopped_by_ctrl_c(stream.cancel) if sys.stdin.isatty() else nullcontext():
            for delta in stream:
                if not self._as_json:
                    echo_delta(delta if shown else delta.lstrip())
                    shown = shown or bool(delta.strip())
        answer = self._last = replace(stream.answer, question=question)
        cancelled = answer.finish_reason == "cancelled"
        if answer.text and not cancelled:
            self._turns.append((question, answer.text))
        if self._as_json:
            print_json_line(answer.to_json())
            return
        echo()
        if cancelled:
            note("cancelled; the conversation continues without this question")
        elif not self._quiet:
            show_sources(answer, self._index)


def _lines() -> Iterator[str]:
    """The lines that a person types until Ctrl-D, or the lines of a pipe."""
    if not sys.stdin.isatty():
        try:
            yield from sys.stdin
        except UnicodeDecodeError as error:
            raise UsageError(f"The input is not UTF-8 text ({error.reason}); give one question per line.") from None
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history for `input`; not on Windows)
    prompt = "> "
    while True:
        try:
            if not sys.stdout.isatty():  # `input` writes its prompt to stdout, where only answers belong
                sys.stderr.write(prompt)
                sys.stderr.flush()
            yield input(prompt if sys.stdout.isatty() else "")
        except UnicodeDecodeError:
            note("that is not UTF-8 text; type it again")
        except EOFError:
            sys.stderr.write("\n")
            return
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            note("nothing is running; Ctrl-D or /quit ends")


@contextmanager
def _stopped_by_ctrl_c(cancel: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C asks the answer to end at its next token; the second ends it at once."""
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cancel()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    except KeyboardInterrupt:
        cancel()
    finally:
        signal.signal(signal.SIGINT, before)
