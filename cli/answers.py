"""`ragkv eval answers` and `ragkv eval tasks`: measure the accuracy of engines on tasks, and list the tasks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli import completion
from ragkv.cli.console import draw, note, print_json
from ragkv.cli.figure import check_output
from ragkv.cli.grid import plain
from ragkv.cli.option import Device, Quiet, given_names, given_numbers
from ragkv.cli.progress import kept_steps
from ragkv.cli.scoreboard import print_rows, row_remarks, write_rows
from ragkv.errors import UsageError

if TYPE_CHECKING:
    from ragkv.evaluation.answerer import Contender
    from ragkv.evaluation.example import Task
    from ragkv.pipeline import RagKV

__all__ = ["DEFAULT_WORK", "answers", "tasks"]

DEFAULT_WORK = Path("ragkv-eval")
DEFAULT_LIMIT = 100
_FILES = "Files of LOFT, LongBench and RULER"
_SCORES = "Relevance of the chunks"


def answers(
    what: Annotated[
        list[str],
        typer.Argument(
            help="Tasks of `ragkv eval tasks`, with options in parentheses, or files.",
            metavar="TASK|FILE…",
            show_default=False,
        ),
    ],
    engines: Annotated[
        str,
        typer.Option(
            help='Engines, with options in parentheses: "full,pced(gamma=0, beta=0)".',
            autocompletion=completion.engine_lists,
        ),
    ] = "full,ape,block,pced",
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model folder or hub id; may be given several times.", show_default="mini, or the index's"),
    ] = None,
    chunks: Annotated[
        str, typer.Option(help="Chunks per question, for tasks and LOFT; tasks take several sizes: 8,32.")
    ] = "8",
    limit: Annotated[
        int | None, typer.Option(help="Questions per task.", min=1, show_default="100, all of a file")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of tasks, questions and intervals.")] = 0,
    codecs: Annotated[
        str | None,
        typer.Option(
            help="Codecs with which KV is stored and read back.",
            show_default="raw, or the index's",
            autocompletion=completion.codec_lists,
        ),
    ] = None,
    baseline: Annotated[str, typer.Option(help="The engine that the others are compared with, or `none`.")] = "full",
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer.", min=1, show_default="the task's")
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option(help="Ask this index the questions of FILE.jsonl.", show_default="each task brings its chunks"),
    ] = None,
    retrieval: Annotated[
        str | None,
        typer.Option(
            help="How chunks are ranked: given (the task's order, equal scores), dense, sparse, colbert, hybrid, bm25.",
            show_default="given, or the index's",
            rich_help_panel=_SCORES,
        ),
    ] = None,
    rerank: Annotated[
        bool | None,
        typer.Option(
            "--rerank/--no-rerank",
            help="Sort the chunks with the reranker.",
            show_default="no, or the index's",
            rich_help_panel=_SCORES,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Read only the best chunks, this many.",
            min=1,
            show_default="all, or the index's",
            rich_help_panel=_SCORES,
        ),
    ] = None,
    embedder: Annotated[
        str | None,
        typer.Option(help="mini, a folder or a hub id.", show_default="mini beside mini", rich_help_panel=_SCORES),
    ] = None,
    reranker: Annotated[
        str | None,
        typer.Option(help="mini, a folder or a hub id.", show_default="mini beside mini", rich_help_panel=_SCORES),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--format", help="loft, longbench, ruler or ragkv.", show_default="by the file", rich_help_panel=_FILES
        ),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Metric of the answers.", show_default="the data set's", rich_help_panel=_FILES)
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Questions of a LOFT folder.", show_default="test", rich_help_panel=_FILES)
    ] = None,
    chunk_tokens: Annotated[
        int, typer.Option(help="Cut long texts into chunks of this many tokens.", min=8, rich_help_panel=_FILES)
    ] = 512,
    work: Annotated[
        Path, typer.Option(help="Keep answers in this folder, so that the same command continues a stopped run.")
    ] = DEFAULT_WORK,
    device: Device = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="auto, float32, bfloat16 or float16.", show_default="auto; float32 for mini on a CPU"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the figures to FILE.json or FILE.md.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as one JSON list.")] = False,
    quiet: Quiet = False,
) -> None:
    """Measure the accuracy of engines on tasks, and the difference from full attention.

    A task is built in, or a file of LOFT, LongBench or RULER. With --index it is a file of questions with gold answers,
    asked of your index. Every answer is kept, so the same command continues a stopped run (docs/evaluation.md).

    Example: `ragkv eval answers worlds niah_single_1 --engines "full,block,ape,pced(gamma=2.5)" --chunks 8,32`
    """
    from ragkv.evaluation.examination import run
    from ragkv.evaluation.result import require_baseline
    from ragkv.pipeline import RagKV

    check_output(output)
    sizes = given_numbers("--chunks", chunks)
    with ExitStack() as stack:
        choice = _Choice(
            engines=engines, models=model, codecs=codecs, retrieval=retrieval, rerank=rerank, top_k=top_k, device=device
        )
        if index is not None:
            own = {"--dtype": dtype, "--embedder": embedder, "--reranker": reranker}
            files = {"--format": layout, "--metric": metric, "--split": split}
            if given := [name for name, value in (own | files).items() if value]:
                raise UsageError(f"{given[0]} cannot be used with --index; leave it out.")
            rag = stack.enter_context(RagKV.open(index, device=device))
            found = [_questions(Path(name), limit, seed) for name in what]
            asked, source = _of_index(rag, choice)
        else:
            reading: dict[str, Any] = {"format": layout, "metric": metric, "split": split}
            reading |= {"chunk_tokens": chunk_tokens, "chunks": max(sizes)}
            found = [task for name in what for task in _tasks(name, sizes, limit, seed, reading)]
            asked, source = _of_tasks(choice, embedder, reranker, dtype)
        against = None if baseline == "none" or (baseline == "full" and not _has(asked, "full")) else baseline
        if against is not None:
            require_baseline(asked, against)
        with kept_steps("eval answers", work, silent=quiet or as_json) as tell:
            rows = run(
                found,
                asked,
                source=source,
                seed=seed,
                baseline=against,
                max_new_tokens=max_new_tokens,
                work=work,
                on_progress=tell,
            )
    if output is not None:
        write_rows(output, found, rows, seed)
    if as_json:
        print_json([row.to_json() for row in rows])
    else:
        print_rows(rows)
    if not quiet:
        for line in row_remarks(found, rows):
            note(line)


def tasks(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
    quiet: Quiet = False,
) -> None:
    """List the built-in tasks of `ragkv eval answers`, with their options.

    Example: `ragkv eval tasks --json`
    """
    from ragkv.evaluation.catalog import described

    known = described()
    if as_json:
        print_json([{"task": name, "about": about, "options": options} for name, about, options in known])
        return
    table = plain()
    for column in ("task", "is", "options"):
        table.add_column(column, no_wrap=column == "task")
    for name, about, options in known:
        table.add_row(name, about, ", ".join(f"{key}={value}" for key, value in options.items()))
    draw(table)
    if not quiet:
        note('Write options in parentheses: "worlds(split=train)"; --seed, --limit and --chunks apply to all tasks.')


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Whom to compare: what was typed, None where the index or the task decides."""

    engines: str
    models: list[str] | None
    codecs: str | None
    retrieval: str | None
    rerank: bool | None
    top_k: int | None
    device: str | None


def _of_index(rag: RagKV, choice: _Choice) -> tuple[list[Contender], Any]:
    """The contenders, and the source of the chunks that they read: the index."""
    from ragkv.config import NONE
    from ragkv.evaluation.answerer import contenders
    from ragkv.evaluation.source import IndexSource
    from ragkv.evaluation.spec import parse_specs

    config = rag.config
    asked = contenders(
        parse_specs(choice.engines),
        models=choice.models or [config.model],
        codecs=given_names("--codecs", choice.codecs or config.codec),
        retrievals=given_names("--retrieval", choice.retrieval or config.retrieval),
        rerank=[config.rerank and config.reranker != NONE if choice.rerank is None else choice.rerank],
        top_k=choice.top_k or config.top_k,
        prompt=config.prompt,
        tuning=config.tuning,
    )
    return asked, IndexSource(rag, device=choice.device)


def _of_tasks(
    choice: _Choice, embedder: str | None, reranker: str | None, dtype: str | None
) -> tuple[list[Contender], Any]:
    """The contenders, and the source of the chunks that they read: the task itself."""
    from ragkv.evaluation.answerer import GIVEN, RAW, contenders
    from ragkv.evaluation.scorer import Scorer
    from ragkv.evaluation.source import OwnSource
    from ragkv.evaluation.spec import parse_specs
    from ragkv.model.checkpoint import MINI

    models = choice.models or [MINI]
    beside = MINI if set(models) == {MINI} else None  # the mini embedder knows nothing of the real world
    asked = contenders(
        parse_specs(choice.engines),
        models=models,
        codecs=given_names("--codecs", choice.codecs or RAW),
        retrievals=given_names("--retrieval", choice.retrieval or GIVEN),
        rerank=[bool(choice.rerank)],
        top_k=choice.top_k,
        dtype=dtype,
    )
    scorer = Scorer(embedder=embedder or beside, reranker=reranker or beside, device=choice.device)
    return asked, OwnSource(scorer, device=choice.device)


def _has(asked: list[Contender], name: str) -> bool:
    return any(one.label == name for one in asked)


def _tasks(text: str, sizes: list[int], limit: int | None, seed: int, reading: dict[str, Any]) -> list[Task]:
    """The tasks of a file, or a built-in task at every size."""
    from ragkv.evaluation.catalog import make_task
    from ragkv.evaluation.spec import parse_specs

    path = Path(text)
    if path.exists():
        from ragkv.evaluation.loader import load_tasks

        return load_tasks(path, limit=limit, seed=seed, **reading)
    named = parse_specs(text)
    return [make_task(one, seed=seed, limit=limit or DEFAULT_LIMIT, chunks=size) for one in named for size in sizes]


def _questions(path: Path, limit: int | None, seed: int) -> Task:
    """The questions of a file that have gold answers."""
    from ragkv.evaluation.draw import drawn
    from ragkv.evaluation.example import Example, Task
    from ragkv.evaluation.question import golden_questions

    golden, _ = golden_questions(path)
    return Task(
        name=path.stem,
        metric="subspan_em",
        examples=[
            Example(example_id=str(at), question=question.text, chunks=(), answers=question.answers)
            for at, question in enumerate(drawn(golden, limit, seed))
        ],
    )
