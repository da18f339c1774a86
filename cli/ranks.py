"""`torchrun … -m ragkv.distributed query`: a question that several processes answer together."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ragkv.cli.console import count, fail, note, print_json, print_json_line, say_text
from ragkv.cli.context import context_material
from ragkv.cli.option import (
    BlockTokens,
    Candidates,
    Debug,
    Device,
    Engine,
    Json,
    MaxNewTokens,
    Quiet,
    Rerank,
    RetrievalMode,
    Seed,
    Temperature,
    TopK,
    Where,
    block_tuning,
    stated,
)
from ragkv.cli.program import Group, log_to_stderr, run
from ragkv.cli.query import show_sources
from ragkv.errors import RagkvError, RanksError, RetrievalError, UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from ragkv.distributed.rankpart import RankPart
    from ragkv.distributed.session import Session
    from ragkv.types import Answer

__all__ = ["app", "main"]

_RANKS = "Ranks"
_ALIKE = (UsageError, RetrievalError, UnsupportedModelError)
"""What all ranks meet in the same question at the same time: they stay together."""

app = typer.Typer(
    name="ragkv.distributed",
    cls=Group,
    help="Answer together: several processes, on one machine or many, each with a part of the KV.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.callback()
def _prepare(debug: Debug = False) -> None:
    log_to_stderr(debug=debug)


@app.command(no_args_is_help=True)
def query(
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
    top_k: TopK = None,
    retrieval: RetrievalMode = None,
    rerank: Rerank = None,
    candidates: Candidates = None,
    where: Where = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = None,
    seed: Seed = None,
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
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="When a rank is lost, wait until it was started again, and go on with the next question.",
            rich_help_panel=_RANKS,
        ),
    ] = False,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answer questions from the chunks of all ranks; rank 0 prints.

    Without {rank} or --shards all ranks have the same index, and each holds the KV of some of its chunks.

    Example: `torchrun --nproc-per-node 4 -m ragkv.distributed query "Who founded Halden Works?" --index 'shard-{rank}'`
    """
    from ragkv.distributed.rankcontexts import ContextPart
    from ragkv.distributed.rankpart import IndexPart
    from ragkv.distributed.session import Session, meeting_place
    from ragkv.pipeline import RagKV

    if timeout <= 0 or patience <= 0:
        raise UsageError("--timeout and --patience are seconds, more than 0.")
    signal.signal(signal.SIGTERM, _ended)
    store, rank, size = meeting_place(patience)
    options = {
        **stated(engine=engine, top_k=top_k, retrieval=retrieval, rerank=rerank, candidates=candidates),
        "where": list(where or ()),
        "max_new_tokens": max_new_tokens,
        "decoding": stated(temperature=temperature, seed=seed),
    }
    device = device or _own_device()
    try:
        with ExitStack() as held:
            part: RankPart
            if context:
                options = {name: options[name] for name in ("engine", "max_new_tokens", "decoding") if name in options}
                tuning = block_tuning(block_tokens)
                part = ContextPart(*context_material(context, model, device, tuning=tuning, quiet=quiet or rank > 0))
            else:
                rag = held.enter_context(RagKV.open(Path(index.replace("{rank}", str(rank))), device=device))
                part = IndexPart(rag.index, shards=shards or "{rank}" in index)
            session = Session(part, store, rank, size, timeout=timeout, patience=patience, keep=keep)
            if rank:
                _follow(session)
                return
            place = count(len(context), "file") if context else index
            shown = _Shown(place, size, as_json=as_json, quiet=quiet, many=len(questions) > 1 or "-" in questions)
            if code := _lead(session, questions, options, shown):
                raise typer.Exit(code)
    except RagkvError as error:
        if not rank:
            raise
        raise type(error)(f"rank {rank}: {error}") from error


def _lead(session: Session, questions: Iterable[str], options: Mapping[str, Any], shown: _Shown) -> int:
    """Rank 0: have all ranks answer one question after another; the exit code."""
    code = 0
    session.join()
    for question in _each(questions, session.join):
        session.join()
        try:
            session.tell({"question": question, "options": options})
            stream = session.stream(question, options)
            for _ in stream:
                continue
            shown.show(stream.answer)
        except RagkvError as error:
            if not isinstance(error, _ALIKE):
                session.leave(str(error))
                if not session.keep:
                    raise
            shown.failed(question, error)
            code = error.exit_code
    if session.together:  # else nobody is there to be told
        session.tell({"end": True})
    session.leave()
    return code


def _follow(session: Session) -> None:
    """Any other rank: answer what rank 0 asks, until it asks no more."""
    while True:
        session.join()
        try:
            asked = session.next()
            if asked.get("end"):
                session.leave()
                return
            for _ in session.stream(asked["question"], asked["options"]):
                continue
        except _ALIKE:
            continue  # rank 0 meets it too, and says so
        except RagkvError as error:
            session.leave(str(error))
            if not session.keep:
                raise
            note(f"rank {session.rank}: {error}")


class _Shown:
    """How rank 0 shows an answer."""

    def __init__(self, index: str, size: int, *, as_json: bool, quiet: bool, many: bool) -> None:
        self._place = f"{index} over {size} ranks"
        self._as_json = as_json
        self._quiet = quiet
        self._many = many

    def show(self, answer: Answer) -> None:
        if self._as_json:
            (print_json_line if self._many else print_json)(answer.to_json())
            return
        say_text(answer.text)
        if not self._quiet:
            show_sources(answer, self._place)

    def failed(self, question: str, error: RagkvError) -> None:
        """A question that was not answered; there may be others."""
        if self._as_json and self._many:
            print_json_line({"question": question, "error": str(error)})
        fail(str(error))


def _each(questions: Iterable[str], idle: Callable[[], None]) -> Iterator[str]:
    """The questions, those of stdin as they come; `idle` is called every second while none does."""
    for each in questions:
        if each != "-":
            yield each
            continue
        lines: SimpleQueue[str | None] = SimpleQueue()
        threading.Thread(target=_read, args=(lines,), name="ragkv-stdin", daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=1.0)
            except Empty:
                idle()
                continue
            if line is None:
                break
            yield line


def _read(lines: SimpleQueue[str | None]) -> None:
    for line in sys.stdin:
        if line.strip():
            lines.put(line.strip())
    lines.put(None)


def _own_device() -> str | None:
    """With several GPUs on a machine, each of its ranks has one of its own."""
    import torch

    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else None


def _ended(*_: object) -> NoReturn:
    """torchrun ends all ranks of a machine when one of them has failed."""
    raise RanksError(
        "This rank was told to end before the answer was complete (SIGTERM), as torchrun does when another rank has "
        "failed or was killed; see what that one says, and start them again."
    )


def main() -> None:
    """Run the command."""
    run(app, "python -m ragkv.distributed")
