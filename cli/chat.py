"""`ragkv chat`: a conversation on the terminal, or one question per line of a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from ragkv.cli.console import fail, note, note_text, print_json_line, say, say_piece
from ragkv.cli.option import (
    DEFAULT_INDEX,
    Candidates,
    Device,
    Engine,
    Index,
    JsonLines,
    MaxNewTokens,
    NoServer,
    Quiet,
    Rerank,
    RetrievalMode,
    Seed,
    Temperature,
    TopK,
    Where,
    stated,
)
from ragkv.cli.query import show_sources
from ragkv.cli.resident import alone
from ragkv.cli.talker import Talker
from ragkv.errors import RagkvError, UsageError
from ragkv.server.errand import Talk, Turn
from ragkv.types import Answer

__all__ = ["chat"]

_HELP = """/sources       show the full text of the chunks behind the last answer
/engine NAME   answer with another engine from now on; without NAME, list the engines
/clear         forget the conversation; the next question begins a new one
/help          show this list
/quit          end, as Ctrl-D does; Ctrl-C stops a running answer"""


def chat(
    index: Index = DEFAULT_INDEX,
    engine: Engine = None,
    top_k: TopK = None,
    retrieval: RetrievalMode = None,
    rerank: Rerank = None,
    candidates: Candidates = None,
    where: Where = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = None,
    seed: Seed = None,
    history_tokens: Annotated[
        int, typer.Option(help="Most tokens of earlier turns in the prompt; 0 for none.", min=0)
    ] = 512,
    device: Device = None,
    no_server: NoServer = False,
    as_json: JsonLines = False,
    quiet: Quiet = False,
) -> None:
    """Hold a conversation over your documents; answers are streamed and come with their sources.

    The search uses a question together with the two before it. The prompt holds the last turns after the documents, so
    that stored KV can still be used. In a pipe, every line of the input is a question. Type /help for the commands.

    Example: `ragkv chat --index my-index --engine pced`
    """
    settings: dict[str, Any] = {
        "top_k": top_k,
        "retrieval": retrieval,
        "rerank": rerank,
        "candidates": candidates,
        "where": where or (),
        "max_new_tokens": max_new_tokens,
        "decoding": stated(temperature=temperature, seed=seed),
    }
    talk = Talk(settings=settings, history_tokens=history_tokens, quiet=quiet)
    with Talker(index, device, talk, by_itself=alone(no_server)) as talker:
        session = _Session(talker, talker.begin(engine, note), index=index, as_json=as_json, quiet=quiet)
        if sys.stdin.isatty() and not quiet:
            note(f"{session.engine} on {index}. Type a question, /help for commands, or Ctrl-D to end.")
        for line in _lines():
            if not session.take(line):
                break
    if session.code:
        raise typer.Exit(session.code)


class _Session:
    """A conversation, line by line. `code` is the exit code of the last failure, with which a pipe ends."""

    def __init__(self, talker: Talker, engine: str, *, index: Path, as_json: bool, quiet: bool) -> None:
        self._talker = talker
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
                note(f"{self.engine}; there are {', '.join(self._talker.engines())}")
            case "/engine", engine:
                self.engine = self._talker.choose(engine, note)
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
        stream = self._talker.reply(Turn(text=question, engine=self.engine, earlier=self._turns))
        shown = False
        with _stopped_by_ctrl_c(stream.cancel) if sys.stdin.isatty() else nullcontext():
            for piece in stream:
                if not self._as_json:
                    say_piece(piece if shown else piece.lstrip())
                    shown = shown or bool(piece.strip())
        answer = self._last = replace(stream.answer, question=question)
        cancelled = answer.finish_reason == "cancelled"
        if answer.text and not cancelled:
            self._turns.append((question, answer.text))
        if self._as_json:
            print_json_line(answer.to_json())
            return
        say()
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
