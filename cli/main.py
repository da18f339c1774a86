"""The `ragkv` command: one file per subcommand."""

from __future__ import annotations

from typing import Annotated

import typer

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
    mcp,
    models,
    plan,
    query,
    repair,
    serve,
    show,
    stats,
    stop,
    tune,
    verify,
    warm,
)
from ragkv.cli.console import say
from ragkv.cli.option import Debug
from ragkv.cli.program import Group, log_to_stderr, run

__all__ = ["app", "main"]


app = typer.Typer(
    name="ragkv",
    cls=Group,
    help="Ask your own documents: every chunk is prefilled once, at ingest, and answers start from its stored KV.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
_ASK = "Ask your documents"
app.command(name="ingest", no_args_is_help=True, rich_help_panel=_ASK)(ingest.ingest)
app.command(name="query", no_args_is_help=True, rich_help_panel=_ASK)(query.query)
app.command(name="chat", rich_help_panel=_ASK)(chat.chat)
app.command(name="serve", rich_help_panel=_ASK)(serve.serve)
app.command(name="stop", rich_help_panel=_ASK)(stop.stop)
app.command(name="mcp", rich_help_panel=_ASK)(mcp.mcp)

_INDEX = "Look after an index"
app.command(name="ls", rich_help_panel=_INDEX)(ls.ls)
app.command(name="show", no_args_is_help=True, rich_help_panel=_INDEX)(show.show)
app.command(name="stats", rich_help_panel=_INDEX)(stats.stats)
app.command(name="warm", no_args_is_help=True, rich_help_panel=_INDEX)(warm.warm)
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

_MODELS = "Models"
app.command(name="models", rich_help_panel=_MODELS)(models.models)
app.add_typer(finetune.app, name="finetune", rich_help_panel=_MODELS)


def _version(show: bool) -> None:
    if show:
        say(f"ragkv {ragkv.__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Debug = False,
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    log_to_stderr(debug=debug)


def main() -> None:
    """Entry point of the `ragkv` command."""
    run(app, "ragkv")
