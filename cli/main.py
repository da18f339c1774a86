"""The `ragkv` command: one file per subcommand, errors as one sentence, exit codes 0, 1 and 2."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

import ragkv
from ragkv.cli import (
    backup,
    bench,
    chat,
    compact,
    config,
    delete,
    doctor,
    evaluate,
    finetune,
    gc,
    ingest,
    ls,
    plan,
    query,
    repair,
    show,
    stats,
    tune,
    verify,
)
from ragkv.cli.console import LogLine, fail, guarded, note, say
from ragkv.errors import RagkvError, UsageError

__all__ = ["app", "main"]


_WrongUsage: type[Exception] = typer.BadParameter.__mro__[1]
"""click's UsageError. typer brings a click of its own or takes the installed one, and does not export the class."""


class _Commands(TyperGroup):
    """Reports wrong usage in one sentence, and says after an interrupt that committed work is kept."""

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        try:
            return super().make_context(*arguments, **more)
        except _WrongUsage as error:
            raise _in_one_sentence(error) from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _WrongUsage as error:
            raise _in_one_sentence(error) from error
        except KeyboardInterrupt:
            note("ragkv: interrupted; what was committed is kept, and the same command continues from there.")
            raise typer.Exit(130) from None


def _in_one_sentence(error: Any) -> Exception:
    """The parser's message with the command whose help to read; "no arguments" passes through and shows the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return cast("Exception", error)
    command = "ragkv" if error.ctx is None else error.ctx.command_path
    said = " ".join(error.format_message().split())
    return UsageError(f"{said.rstrip('.')}{'' if said.endswith('?') else ';'} see {command} --help.")


app = typer.Typer(
    name="ragkv",
    cls=_Commands,
    help="Ask your own documents: every chunk is prefilled once, at ingest, and answers start from its stored KV.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
_ASK = "Ask your documents"
app.command(name="ingest", no_args_is_help=True, rich_help_panel=_ASK)(ingest.ingest)
app.command(name="query", no_args_is_help=True, rich_help_panel=_ASK)(query.query)
app.command(name="chat", rich_help_panel=_ASK)(chat.chat)

_INDEX = "Look after an index"
app.command(name="ls", rich_help_panel=_INDEX)(ls.ls)
app.command(name="show", no_args_is_help=True, rich_help_panel=_INDEX)(show.show)
app.command(name="stats", rich_help_panel=_INDEX)(stats.stats)
app.command(name="delete", no_args_is_help=True, rich_help_panel=_INDEX)(delete.delete)
app.command(name="verify", rich_help_panel=_INDEX)(verify.verify)
app.command(name="repair", rich_help_panel=_INDEX)(repair.repair)
app.command(name="gc", rich_help_panel=_INDEX)(gc.gc)
app.command(name="compact", rich_help_panel=_INDEX)(compact.compact)
app.command(name="backup", no_args_is_help=True, rich_help_panel=_INDEX)(backup.backup)
app.add_typer(config.app, name="config", rich_help_panel=_INDEX)

_JUDGE = "Judge and tune"
app.command(name="plan", no_args_is_help=True, rich_help_panel=_JUDGE)(plan.plan)
app.command(name="doctor", rich_help_panel=_JUDGE)(doctor.doctor)
app.command(name="tune", no_args_is_help=True, rich_help_panel=_JUDGE)(tune.tune)
app.add_typer(evaluate.app, name="eval", rich_help_panel=_JUDGE)
app.add_typer(bench.app, name="bench", rich_help_panel=_JUDGE)

app.add_typer(finetune.app, name="finetune", rich_help_panel="Models")


def _version(show: bool) -> None:
    if show:
        say(f"ragkv {ragkv.__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Log what happens and show tracebacks; may also be given after the command.")
    ] = False,
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLine("%(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore", "urllib3", "filelock", "bm25s"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def main() -> None:
    """Entry point: ragkv's own errors and broken pipes end without a traceback, unless `--debug` is given."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]
    if debug:  # users may write it anywhere, but the parser accepts it only before the command's name
        arguments = ["--debug", *(word for word in arguments[:end] if word != "--debug"), *arguments[end:]]
    with guarded():
        try:
            app(arguments, prog_name="ragkv")
        except RagkvError as error:
            if debug:
                raise
            fail(str(error))
            sys.exit(error.exit_code)
        except BrokenPipeError:
            sys.stderr.close()  # the reader has left (`| head`); Python would complain about it at exit
            sys.exit(0)
