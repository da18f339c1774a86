"""`python -m ragkv.benchmarks.papers`: the papers' tables, each filled by one command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ragkv.benchmarks.evaluation.answers import DEFAULT_WORK
from ragkv.benchmarks.papers import add_baselines
from ragkv.benchmarks.papers.plots import require_matplotlib
from ragkv.benchmarks.papers.run import (
    TABLES,
    TableResult,
    find_table,
    grid,
    run_table,
    to_json,
    verdict_line,
    write_table,
)
from ragkv.benchmarks.papers.table import COMMAND, RunOptions, count_verdicts
from ragkv.cli.console import draw, echo, kept_steps, note, plain, print_grid, print_json
from ragkv.cli.main import SingleCommand, log_to_stderr, run
from ragkv.cli.options import Debug, Device, Dtype, Quiet
from ragkv.errors import UsageError

DEFAULT_OUTPUT = Path("docs/results")
ALL = "all"

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command(cls=SingleCommand, no_args_is_help=True)
def table(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of a table, or `all`.", metavar="NAME|all", show_default=False),
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the tables and measure nothing.")] = False,
    output: Annotated[
        Path, typer.Option(help="Folder for NAME.json and NAME.md, which are replaced.")
    ] = DEFAULT_OUTPUT,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model folder or hub id; ROLE=FOLDER for the lines of another checkpoint.", show_default="mini"
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Most questions per column.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the tasks and of the intervals.")] = 0,
    embedder: Annotated[str, typer.Option(help="mini, a folder or a hub id.")] = "mini",
    reranker: Annotated[str, typer.Option(help="mini, a folder or a hub id.")] = "mini",
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Draw NAME.svg and NAME.png; needs the extra `plots`.")
    ] = True,
    work: Annotated[
        Path, typer.Option(help="Folder that keeps answers, so that a stopped run continues.")
    ] = DEFAULT_WORK,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list, an object per table.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Fill a table of the papers and write NAME.json and NAME.md, with the origin of the figures and their order.

    Explain differences from the paper in NAME.notes.md, which the command copies into NAME.md (docs/results.md). Every
    answer is kept, so a stopped run continues where it was, and one that was finished is only written again.

    Example: `python -m ragkv.benchmarks.papers pced-1 --limit 20 --output results`
    """
    log_to_stderr(debug=debug)
    if list_only:
        _list()
        return
    if name is None:
        raise UsageError(f"Which table? Choose one of {', '.join(TABLES)}, or all.")
    if pictures:
        require_matplotlib()
    wanted = list(TABLES.values()) if name == ALL else [find_table(name)]
    models = _roles(model or [])
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output {output} is a file; give a folder.")
    options = RunOptions(
        limit=limit, seed=seed, dtype=dtype, embedder=embedder, reranker=reranker, device=device, work=work
    )
    results = []
    for number, table in enumerate(wanted):
        known = set(models)
        if name == ALL:  # other tables have other roles, and checkpoints of their own
            known = {*(() if table.models else ("",)), *(line.role for line in table.lines if line.role)}
        own = {role: folder for role, folder in models.items() if role in known}
        with kept_steps(f"table {table.name}", work, silent=quiet or as_json) as notify:
            result = run_table(table, replace(options, models=own), on_progress=notify)
        written = write_table(result, output, pictures=pictures)
        results.append(result)
        if not as_json:
            if number:
                echo()
            _print(result)
        if not quiet:
            names = [str(written[0]), *(path.name for path in written[1:])]
            note(f"{', '.join(names[:-1])} and {names[-1]} written")
    if as_json:
        print_json([to_json(result) for result in results])


def _roles(given: list[str]) -> dict[str, str]:
    """The folders by role; "" is the one without a role."""
    folders: dict[str, str] = {}
    for text in given:
        role, equals, folder = text.partition("=")
        if not equals or not role.isidentifier():  # the name of a folder may contain "="
            role, folder = "", text
        if role in folders:
            raise UsageError(f"--model: {role or 'the table'} has two models; give one.")
        folders[role] = folder
    return folders


def _print(result: TableResult) -> None:
    echo(result.table.title)
    print_grid(*grid(result))
    if result.verdicts:
        echo(count_verdicts(result.verdicts))
    for verdict in result.verdicts:
        if verdict.word in ("does not hold", "not shown"):
            echo(f"  {verdict_line(verdict)}")


def _list() -> None:
    shown = plain()
    for column in ("table", "title", "lines", "columns"):
        shown.add_column(
            column, no_wrap=column != "title", justify="right" if column in ("lines", "columns") else "left"
        )
    for table in TABLES.values():
        shown.add_row(table.name, table.title, str(len(table.lines)), str(len(table.columns)))
    draw(shown)


def main() -> None:
    """Entry point of `python -m ragkv.benchmarks.papers`."""
    run(app, COMMAND)


if __name__ == "__main__":
    add_baselines()
    main()
