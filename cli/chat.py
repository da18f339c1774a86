"""`ragkv chat`: a conversation in the terminal, or one question per line of a pipe.

If a server is running for the index, it answers; otherwise this process loads the model and answers itself.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, cast

import typer

from ragkv.cli.console import echo, echo_delta, fail, note, note_text, print_json_line
from ragkv.cli.options import (
    DEFAULT_INDEX,
    DecodingOptions,
    Device,
    Engine,
    Index,
    JsonLines,
    NoServer,
    Quiet,
    SearchOptions,
    System,
    given_values,
    shared_options,
    without_server,
)
from ragkv.cli.query import show_sources
from ragkv.config import HISTORY, History, one_of
from ragkv.errors import RagkvError, UsageError
from ragkv.server.local import LocalClient, ServerReply, UnservedError, query_body, question_warnings
from ragkv.types import Answer

if TYPE_CHECKING:
    from ragkv.index.answer import AnswerStream
    from ragkv.pipeline import RagKV

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """What all questions of a conversation have in common: `options` are those of `RagKV.stream`."""

    options: Mapping[str, Any] = field(default_factory=dict)
    history: History | None = None
    history_tokens: int = 512
    rewrite: bool | None = None
    quiet: bool = False


Turns: TypeAlias = Sequence[tuple[str, str]]
"""The questions before, with their answers."""


class ChatBackend:
    """Answers a conversation through the index's server, or in this process if there is none or it has ended."""

    def __init__(self, index: Path, device: str | None, settings: ChatSettings, *, by_itself: bool) -> None:
        self._index = index
        self._device = device
        self._settings = settings
        self._opened = ExitStack()
        self._server = None if by_itself else LocalClient(index, given_values(device=device))
        self._rag: RagKV | None = None

    def __enter__(self) -> ChatBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def choose(self, engine: str | None) -> str:
        """Check the settings, have the model loaded, and show warnings; returns the engine that answers."""
        body = self._body("?", engine, warnings=not self._settings.quiet)
        chosen, warnings = self._by(lambda server: server.check(body), lambda rag: self._checked(rag, engine))
        for warning in warnings:
            note(warning)
        return chosen

    def engines(self) -> list[str]:
        """The names of all engines."""
        return self._by(lambda server: server.engines(), lambda rag: _engine_names())

    def reply(self, question: str, engine: str, turns: Turns) -> ServerReply | AnswerStream:
        """The answer to the next question, after these turns (question, answer)."""
        history = [{"question": asked, "answer": answer} for asked, answer in turns]
        body = self._body(question, engine, history=history)
        return self._by(
            lambda server: server.query(body, note), lambda rag: self._replied(rag, question, engine, turns)
        )

    def _body(self, question: str, engine: str | None, **more: Any) -> dict[str, Any]:
        """The body of a request to the server."""
        chat = self._settings
        history = {"history_mode": chat.history, "history_tokens": chat.history_tokens, "rewrite": chat.rewrite}
        return query_body(question, chat.options, engine=engine, **history, **more)

    def _checked(self, rag: RagKV, engine: str | None) -> tuple[str, list[str]]:
        # a stream does nothing until it is read, but it checks its settings: refuse wrong ones before the model loads
        stream = rag.stream("?", engine=engine, **self._settings.options)
        rag.index.require_same_model()
        rag.model  # noqa: B018 - loaded now, so that the first question need not wait
        return engine or rag.config.default_engine, [] if self._settings.quiet else question_warnings(rag, stream)

    def _replied(self, rag: RagKV, question: str, engine: str, turns: Turns) -> AnswerStream:
        chat = self._settings
        conversation = rag.conversation(history=chat.history, history_tokens=chat.history_tokens, rewrite=chat.rewrite)
        for asked, answer in turns:
            conversation.add(asked, answer)
        return rag.stream(
            conversation.prompt_text(question),
            engine=engine,
            search_for=conversation.search_text(question),
            rewrite=conversation.rewrite_text(question),
            **chat.options,
        )

    def _by(self, there: Callable[[LocalClient], S], here: Callable[[RagKV], T]) -> S | T:
        if self._server is not None:
            try:
                return there(self._server)
            except UnservedError:
                self._server = None
        if self._rag is None:
            from ragkv.pipeline import RagKV

            self._rag = self._opened.enter_context(RagKV.open(self._index, device=self._device))
        return here(self._rag)


def _engine_names() -> list[str]:
    from ragkv.engines import engine_names

    return engine_names()


_HELP = """/sources       show the full text of the chunks behind the last answer
/engine NAME   answer with another engine from now on; without NAME, list the engines
/clear         forget the conversation; the next question begins a new one
/help          show this list
/quit          end, as Ctrl-D does; Ctrl-C stops a running answer"""


@shared_options
def chat(
    *,
    index: Index = DEFAULT_INDEX,
    engine: Engine = None,
    system: System = None,
    search: SearchOptions,
    decoding: Annotated[DecodingOptions, "max_new_tokens", "temperature", "seed"],
    history: Annotated[
        str | None,
        typer.Option(
            help="What earlier turns are used for: prompt (and search), search, none, or auto.",
            show_default="the index's, or auto",
        ),
    ] = None,
    history_tokens: Annotated[
        int, typer.Option(help="Most tokens of earlier turns in the prompt; 0 for none.", min=0)
    ] = 512,
    rewrite: Annotated[
        bool | None,
        typer.Option(
            "--rewrite/--no-rewrite",
            help="Have the model write a follow-up question anew for the search.",
            show_default="the index's, or no",
        ),
    ] = None,
    device: Device = None,
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
    settings = ChatSettings(
        options=search.arguments | decoding.arguments | {"system": system},
        history=cast("History | None", history),
        history_tokens=history_tokens,
        rewrite=rewrite,
        quiet=quiet,
    )
    with ChatBackend(index, device, settings, by_itself=without_server(no_server)) as backend:
        session = _Session(backend, backend.choose(engine), index=index, as_json=as_json, quiet=quiet)
        if sys.stdin.isatty() and not quiet:
            note(f"{session.engine} on {index}. Type a question, /help for commands, or Ctrl-D to end.")
        for line in _lines():
            if not session.take(line):
                break
    if session.code:
        raise typer.Exit(session.code)


class _Session:
    """A conversation, line by line. `code` is the exit code of the last failure, with which a pipe ends."""

    def __init__(self, backend: ChatBackend, engine: str, *, index: Path, as_json: bool, quiet: bool) -> None:
        self._backend = backend
        self._turns: list[tuple[str, str]] = []
        self._index = index
        self._as_json = as_json
        self._quiet = quiet
        self._last: Answer | None = None
        self.engine = engine
        self.code = 0

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
        except RagkvError as error:  # the conversation goes on
            self._fail(text, error)
        return True

    def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        match name, argument.strip():
            case "/engine", "":
                note(f"{self.engine}; there are {', '.join(self._backend.engines())}")
            case "/engine", engine:
                self.engine = self._backend.choose(engine)
                note(f"{engine} answers from now on")
            case "/clear", "":
                self._turns.clear()
                note("the conversation is forgotten; the next question begins a new one")
            case "/sources", "":
                self._sources()
            case "/help", "":
                note_text(_HELP)
            case _:
                raise UsageError(f"There is no command {text!r}; /help lists them.")

    def _ask(self, question: str) -> None:
        stream = self._backend.reply(question, self.engine, self._turns)
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
            note("cancelled; the conversation goes on without this question")
        elif not self._quiet:
            show_sources(answer, self._index)

    def _sources(self) -> None:
        if self._last is None:
            raise UsageError("There is no answer yet; ask something first.")
        for rank, source in enumerate(self._last.sources, start=1):
            page = "" if source.page is None else f", page {source.page}"
            note(f"[{rank}] {source.document}{page} (score {source.score:.3f}, chunk {source.chunk_id})")
            note_text(source.text)

    def _fail(self, text: str, error: RagkvError) -> None:
        if not sys.stdin.isatty():
            self.code = error.exit_code
        if self._as_json:
            print_json_line({"question": text, "error": str(error)})
        fail(str(error))


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
