"""How a command line of ragkv runs: its log, its errors as one sentence, its exit codes 0, 1 and 2."""

from __future__ import annotations

import atexit
import errno
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from ragkv.cli.console import LogLine, fail, guarded, note
from ragkv.errors import RagkvError, UsageError

__all__ = ["Group", "Single", "brief", "log_to_stderr", "run"]

_WrongUsage: type[Exception] = typer.BadParameter.__mro__[1]
"""click's UsageError. typer brings a click of its own or takes the installed one, and does not export the class."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
_MOVED = {
    ("ragkv eval", "table"): "python -m ragkv.benchmarks.papers fills the papers' tables now, in a checkout of ragkv's "
    "repository (docs/results.md).",
    ("ragkv finetune", "mini"): "python -m ragkv.benchmarks.mini trains mini now, in a checkout of ragkv's repository "
    "(docs/mini.md).",
}
"""Commands of earlier versions, by their group and name: what replaces them."""


class Group(TyperGroup):
    """Reports wrong usage in one sentence, and says after an interrupt that committed work is kept."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _in_one_sentence():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        with _in_one_sentence():
            return super().invoke(ctx)


class Single(TyperCommand):
    """The same for a program that is one command."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        with _in_one_sentence():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        with _in_one_sentence():
            return super().invoke(ctx)


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    try:
        yield
    except _WrongUsage as error:
        raise _sentence(error) from error
    except KeyboardInterrupt:
        note("ragkv: interrupted; what was committed is kept, and the same command continues from there.")
        raise typer.Exit(130) from None


def _sentence(error: Any) -> Exception:
    """The parser's message with the command whose help to read; "no arguments" passes through and shows the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return cast("Exception", error)
    command = "ragkv" if error.ctx is None else error.ctx.command_path
    said = " ".join(error.format_message().split())
    for (group, name), instead in _MOVED.items():
        if command == group and said.startswith(f"No such command '{name}'"):
            return UsageError(instead)
    return UsageError(f"{said.rstrip('.')}{'' if said.endswith('?') else ';'} see {command} --help.")


def log_to_stderr(*, debug: bool) -> None:
    """Write the log to stderr: warnings, or with `debug` everything."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLine("%(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore", "urllib3", "filelock", "bm25s"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def brief() -> None:
    """Collect cyclic garbage rarely until the program ends, which is soon.

    What a command imports is a million objects that stay. To look through them time and again, and once more at the
    end, takes a quarter of the processor time of a question.
    """
    gc.set_threshold(50_000, 20, 20)
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def run(app: typer.Typer, name: str) -> None:
    """Run `app` on the words after the program's `name`.

    ragkv's own errors, broken pipes and a full disk under stdout end without a traceback, unless `--debug` is given.
    `app` has that option.
    """
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]
    if debug:  # users may write it anywhere, but the parser accepts it only before the command's name
        arguments = ["--debug", *(word for word in arguments[:end] if word != "--debug"), *arguments[end:]]
    collecting = gc.get_threshold()
    _open_streams()
    with guarded():
        try:
            app(arguments, prog_name=name)
        except RagkvError as error:
            if debug:
                raise
            fail(str(error))
            sys.exit(error.exit_code)
        except BrokenPipeError:
            sys.stderr.close()  # the reader has left (`| head`); Python would complain about it at exit
            sys.exit(0)
        except OSError as error:
            # what commands do with files says which file it was; this was stdout
            if debug or error.errno not in _FULL or error.filename is not None:
                raise
            _give_up_stdout()
            fail(f"The result cannot be written: {error.strerror}.")
            sys.exit(1)
        finally:
            gc.set_threshold(*collecting)


def _open_streams() -> None:
    """Put nothing where a standard stream was closed (`>&-`): else the next file opened would have its number, and
    get what is written there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _give_up_stdout() -> None:
    """Have stdout forget what it could not write: at its exit, Python would try again, and complain."""
    with suppress(OSError):  # it is no file at all, or takes the rest now
        sys.stdout.flush()
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
