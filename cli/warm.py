"""`ragkv warm`: make KV ahead of the questions that will read it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ragkv.cli.console import count, note, print_json, say, size
from ragkv.cli.option import (
    DEFAULT_INDEX,
    Device,
    Engine,
    Index,
    Json,
    Quiet,
    RetrievalMode,
    TopK,
    Where,
    stated,
)
from ragkv.cli.progress import steps
from ragkv.cli.questionfile import read_questions
from ragkv.errors import UsageError

if TYPE_CHECKING:
    from ragkv.index.task import Asked
    from ragkv.index.warming import Warming
    from ragkv.pipeline import RagKV

__all__ = ["warm"]


def warm(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Documents: ids, source names, paths, or patterns such as 'docs/*'.",
            metavar="DOCUMENT",
            show_default=False,
        ),
    ] = None,
    index: Index = DEFAULT_INDEX,
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions", help="A JSONL file of questions, as for `ragkv query`: what they would read.", metavar="FILE"
        ),
    ] = None,
    most: Annotated[
        int | None, typer.Option("--most", help="So many chunks, those that questions have read most.", min=1)
    ] = None,
    where: Where = None,
    engine: Engine = None,
    top_k: TopK = None,
    retrieval: RetrievalMode = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make the KV that questions will read, within the index's kv_budget, so that they need not make it.

    What has the KV already is left alone, so that the same command goes on after it was stopped. Over the budget,
    what is worth least leaves first; what is worth less than all that is kept is not made. --engine, --top-k and
    --retrieval are those of the questions; documents are made for the engines that the index was made for.

    Example: `ragkv warm --questions log.jsonl --index my-index`

    Example: `ragkv warm 'manuals/*' --index my-index`
    """
    from ragkv.pipeline import RagKV

    if sum((questions is not None, most is not None, bool(names or where))) != 1:
        raise UsageError("Say what to make KV for: documents (or --where), --questions FILE, or --most N; one of them.")
    with RagKV.open(index, readonly=False, device=device) as rag, steps("warm", silent=quiet or as_json) as show:
        options = stated(top_k=top_k, retrieval=retrieval)
        if questions is not None:
            asked = _asked(rag, questions, engine, options, quiet=quiet)
            none = "no question finds a chunk whose KV its engine reads"
            wanted = rag.wanted(questions=asked, on_question=lambda done: show(done, len(asked), "search"))
        elif most is not None:
            none = "no question has read a chunk yet"
            wanted = rag.wanted(most=most)
        else:
            none = "these documents have no text"
            wanted = rag.wanted(documents=names or (), where=where or ())
        report = rag.warm(wanted, on_progress=lambda done: show(done.present + done.made, done.wanted, "encode"))
    if as_json:
        print_json(report.to_json())
    elif not quiet:
        _tell(report, index, none)


def _asked(rag: RagKV, path: Path, engine: str | None, options: dict[str, Any], *, quiet: bool) -> list[Asked]:
    """The questions of the file, each with its options; one that brings its own texts reads none of the index."""
    lines, bad = read_questions(path, engine or rag.config.default_engine)
    for line in bad if not quiet else ():
        note(f"{line.where}: {line.error}")
    return [cast("Asked", {**options, **line.options, "question": line.text}) for line in lines if not line.context]


def _tell(report: Warming, index: Path, none: str) -> None:
    if not report.wanted:
        say(f"{index}: nothing to make: {none}.")
        return
    there, made = (f"{number:,} {'was' if number == 1 else 'were'}" for number in (report.present, report.made))
    say(
        f"{index}: of {count(report.wanted, 'chunk KV')}, {there} there and {made} made"
        + (f" ({size(report.bytes)}, in {report.seconds:.1f} s)." if report.made else ".")
    )
    if report.refused:
        say(f"{report.refused:,} found no room: the budget is full of KV that is worth more.")
