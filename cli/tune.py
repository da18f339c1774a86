"""`ragkv tune`: search the settings of APE that answer the user's own questions best."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.console import count, draw, note, print_json, say
from ragkv.cli.grid import plain
from ragkv.cli.option import DEFAULT_INDEX, Device, DryRun, Index, Json, Quiet, given_numbers
from ragkv.cli.progress import steps

if TYPE_CHECKING:
    from ragkv.evaluation.tune import Search, Setting

__all__ = ["tune"]


def tune(
    questions: Annotated[
        Path, typer.Argument(help='JSONL file: {"question": …, "answers": […]}.', metavar="FILE.jsonl")
    ],
    index: Index = DEFAULT_INDEX,
    prefixes: Annotated[
        str, typer.Option(help="How many newline tokens to try before the documents.")
    ] = "0,2,12,22,42",
    limit: Annotated[
        int | None, typer.Option(help="Ask at most this many questions.", min=1, show_default="all")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Chunks per question.", min=1, show_default="the index's")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 64,
    holdout: Annotated[
        bool, typer.Option("--holdout", help="Search on one half of the questions, and validate on the other.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the draw of questions and of the half that is held out.")] = 0,
    dry_run: DryRun = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search APE's shared prefix, temperature T and scale S on your questions, and write the best into the index.

    The search is greedy, as in the paper: first the length of the prefix, then T, then S, in steps of 0.1. An answer is
    right if it contains a gold answer. Every result is kept in the index, so the same command continues a search that
    was stopped.

    Example: `ragkv tune questions.jsonl --index my-index --holdout`
    """
    from ragkv.evaluation.draw import drawn
    from ragkv.evaluation.journal import Journal
    from ragkv.evaluation.question import golden_questions
    from ragkv.evaluation.subject import Subject
    from ragkv.evaluation.tune import Tuner, split, write_setting
    from ragkv.pipeline import RagKV

    newlines = given_numbers("--prefixes", prefixes, least=0, most=1000)
    golden, without = golden_questions(questions)
    if without and not quiet:
        note(f"{count(without, 'question')} without a gold answer left out.")
    asked = drawn(golden, limit, seed)
    asked, held_out = split(asked, seed) if holdout else (asked, [])
    with RagKV.open(index, device=device) as rag:
        rag.index.require_same_model()
        journal = Journal(rag.folder / "derived" / "tune-ape.jsonl", keep=not dry_run)
        subject = Subject.of(rag)
        tuner = Tuner(rag, subject, journal, top_k=top_k, max_new_tokens=max_new_tokens)
        with steps("tune", silent=quiet or as_json, stages=True) as on_progress:
            search = tuner.search(asked, prefixes=newlines, held_out=held_out, on_progress=on_progress)
        written = not dry_run and search.winner != search.now
        if written:
            write_setting(rag.folder, search.winner)
    moved = search.winner.prefix_newlines != search.now.prefix_newlines
    if as_json:
        print_json({**search.to_json(), "written": written, "ingest_again": written and moved})
        return
    _show(search)
    _conclude(search, index, written=written, moved=moved, dry_run=dry_run)


def _show(search: Search) -> None:
    table = plain("stage", "newlines", "T", "S", "right", "", "")
    table.add_row("full", "", "", "", f"{search.full} of {search.asked}", f"{search.full / search.asked:.1%}", "")
    for trial in search.trials:
        setting = trial.setting
        marks = [word for word, which in (("as it was", search.now), ("best", search.winner)) if setting == which]
        table.add_row(
            trial.stage,
            str(setting.prefix_newlines),
            f"{setting.temperature:g}",
            f"{setting.scale:g}",
            f"{trial.right} of {trial.asked}",
            "given up" if trial.given_up else f"{trial.right / trial.asked:.1%}",
            ", ".join(marks),
            style="bold" if setting == search.winner else None,
        )
    draw(table)


def _conclude(search: Search, index: Path, *, written: bool, moved: bool, dry_run: bool) -> None:
    if search.skipped:
        say(f"{count(search.skipped, 'question')} found no chunk and were left out.")
    held = search.held_out
    if held is None:
        say("Measured on the questions of the search; --holdout validates on others.")
    else:
        say(
            f"Held-out half, {count(held.asked, 'question')}: {held.winner} right with the best setting, "
            f"{held.now} as it was, {held.full} by full attention."
        )
    if search.winner == search.now:
        say(f"{index} already has the best setting.")
        return
    say(f"{'Would write' if dry_run else 'Wrote'} to {index}: {_named(search.winner)} (before: {_named(search.now)}).")
    if moved and written:
        say(
            "The prefix has another length now, so KV that was stored after the old one is of no use: run ragkv ingest "
            "on your documents again, or each question encodes the chunks that it misses."
        )


def _named(setting: Setting) -> str:
    return (
        f"prefix_newlines = {setting.prefix_newlines}, temperature = {setting.temperature:g}, scale = {setting.scale:g}"
    )
