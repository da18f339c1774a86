"""`torchrun … -m ragkv.distributed query`: several processes answer a question together."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ragkv.cli.console import count, echo_text, fail, print_json, print_json_line
from ragkv.cli.main import CommandGroup, log_to_stderr, run
from ragkv.cli.options import (
    BlockTokens,
    Debug,
    DecodingOptions,
    Device,
    Engine,
    Json,
    Quiet,
    SearchOptions,
    block_tuning,
    given_values,
    shared_options,
)
from ragkv.cli.query import context_material, show_sources
from ragkv.errors import RagkvError, RanksError, RetrievalError, UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from ragkv.distributed.session import RankBackend, Session

_RANKS = "Ranks"
_ALIKE = (UsageError, RetrievalError, UnsupportedModelError)
"""Errors that all ranks raise for the same question, after which they continue together."""

app = typer.Typer(
    name="ragkv.distributed",
    cls=CommandGroup,
    help="Answer together: several processes, on one machine or many, each with a part of the KV.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.callback()
def _prepare(debug: Debug = False) -> None:
    log_to_stderr(debug=debug)


@app.command(no_args_is_help=True)
@shared_options
def query(
    *,
    questions: Annotated[
        list[str], typer.Argument(help="What you want to know; - reads questions from rank 0's stdin, one a line.")
    ],
    index: Annotated[
        str,
        typer.Option(
            help="Folder of the index; {rank} stands for the rank's number, where each has documents of its own.",
        ),
    ] = "ragkv-index",
    shards: Annotated[
        bool,
        typer.Option(
            "--shards",
            help="Each rank's index has documents of its own, although --index names no {rank}: as on two machines.",
            rich_help_panel=_RANKS,
        ),
    ] = False,
    context: Annotated[
        list[Path] | None,
        typer.Option(
            help="Answer from the whole text of this file, without an index; every rank has it; may be given several "
            "times.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    block_tokens: BlockTokens = None,
    model: Annotated[
        str | None, typer.Option(help="With --context, the model that answers.", show_default=False)
    ] = None,
    engine: Engine = None,
    search: SearchOptions,
    decoding: Annotated[DecodingOptions, "max_new_tokens", "temperature", "seed"],
    timeout: Annotated[
        float,
        typer.Option(
            help="Seconds after which a rank that keeps the others waiting is given up.", rich_help_panel=_RANKS
        ),
    ] = 20.0,
    patience: Annotated[
        float,
        typer.Option(help="Seconds in which all ranks have to come, and to load their models.", rich_help_panel=_RANKS),
    ] = 300.0,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Start the ranks on a Ray cluster: its address, auto, or local.",
            metavar="ADDRESS",
            rich_help_panel=_RANKS,
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option(help="With --ray, how many ranks; a node with room for each.", min=1, rich_help_panel=_RANKS)
    ] = 2,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answer questions from the chunks of all ranks; rank 0 prints.

    Without {rank} or --shards all ranks have the same index, and each holds the KV of some of its chunks.

    Example: `torchrun --nproc-per-node 4 -m ragkv.distributed query "Who founded Halden Works?" --index 'shard-{rank}'`

    Example: `python -m ragkv.distributed query "Who betrays Orla?" --context book.txt --engine apb --ray auto`
    """
    from ragkv.distributed.session import ContextRankBackend, IndexRankBackend, Session, meeting_place
    from ragkv.pipeline import RagKV

    if timeout <= 0 or patience <= 0:
        raise UsageError("--timeout and --patience are seconds, more than 0.")
    if ray is not None:
        if "-" in questions:
            raise UsageError("--ray answers the questions of the command line: leave - out.")
        raise typer.Exit(_on_ray(ray, ranks, patience))
    signal.signal(signal.SIGTERM, _ended)
    store, rank, size = meeting_place(patience)
    options = given_values(engine=engine, **search.arguments, **decoding.arguments)
    device = device or _own_device()
    with ExitStack() as held:
        try:
            part: RankBackend
            if context:
                options = {name: options[name] for name in ("engine", "max_new_tokens", "decoding") if name in options}
                tuning = block_tuning(block_tokens)
                part = ContextRankBackend(
                    *context_material(context, model, device, tuning=tuning, quiet=quiet or rank > 0)
                )
            else:
                rag = held.enter_context(RagKV.open(Path(index.replace("{rank}", str(rank))), device=device))
                part = IndexRankBackend(rag.index, shards=shards or "{rank}" in index)
            session = Session(part, store, rank, size, timeout=timeout, patience=patience)
            if rank:
                _follow(session)
                return
            place = count(len(context), "file") if context else index
            if code := _lead(session, questions, options, f"{place} over {size} ranks", as_json=as_json, quiet=quiet):
                raise typer.Exit(code)
        except RagkvError as error:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is already ending, with a better message
            if not rank:
                raise
            raise type(error)(f"rank {rank}: {error}") from error


def _lead(
    session: Session, questions: Sequence[str], options: Mapping[str, Any], place: str, *, as_json: bool, quiet: bool
) -> int:
    """Rank 0: have all ranks answer the questions one by one, and show the answers; returns the exit code."""
    code = 0
    many = len(questions) > 1 or "-" in questions
    session.join()
    for question in _each(questions):
        try:
            session.notify({"question": question, "options": options})
            stream = session.stream(question, options)
            for _ in stream:
                continue
            if as_json:
                (print_json_line if many else print_json)(stream.answer.to_json())
            else:
                echo_text(stream.answer.text)
                if not quiet:
                    show_sources(stream.answer, place)
        except _ALIKE as error:  # others may follow
            if as_json and many:
                print_json_line({"question": question, "error": str(error)})
            fail(str(error))
            code = error.exit_code
        except RagkvError as error:
            session.leave(str(error))
            raise
    session.notify({"end": True})
    session.leave()
    return code


def _follow(session: Session) -> None:
    """Any other rank: answer the questions of rank 0 until there are no more."""
    session.join()
    while True:
        try:
            asked = session.next()
            if asked.get("end"):
                session.leave()
                return
            for _ in session.stream(asked["question"], asked["options"]):
                continue
        except _ALIKE:
            continue  # rank 0 raises and reports it too
        except RagkvError as error:
            session.leave(str(error))
            raise


def _on_ray(address: str, ranks: int, patience: float) -> int:
    """Run this command line as ranks on a Ray cluster, and show rank 0's output; returns its exit code."""
    from ragkv.distributed.session import on_ray

    words = [word for word in sys.argv[1:] if word != "--debug"]
    place = next(at for at, word in enumerate(words) if word.partition("=")[0] == "--ray")
    del words[place : place + (1 if "=" in words[place] else 2)]
    code, out, err = on_ray(address, ranks, [sys.executable, "-m", "ragkv.distributed", *words], patience=patience)
    sys.stdout.write(out)
    sys.stderr.write(err)
    return code


def _each(questions: Iterable[str]) -> Iterator[str]:
    """The questions; those of stdin as they arrive."""
    for each in questions:
        if each == "-":
            yield from (line.strip() for line in sys.stdin if line.strip())
        else:
            yield each


def _own_device() -> str | None:
    """The rank's own GPU, if the machine has several."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else None


def _ended(*_: object) -> NoReturn:
    """The handler of SIGTERM, by which torchrun ends all ranks of a machine after one has failed."""
    raise RanksError(
        "This rank was stopped before the answer was complete (SIGTERM), as torchrun does when another rank has "
        "failed or was killed; see what that one says, and start them again."
    )


def main() -> None:
    """Run the command."""
    run(app, "python -m ragkv.distributed")
