"""`python -m ragkv.benchmarks.evaluation`: answers, retrieval, codecs and model families, measured on benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

import ragkv
from ragkv.benchmarks.evaluation.answers import DEFAULT_WORK
from ragkv.benchmarks.evaluation.codec import measure_codec
from ragkv.benchmarks.evaluation.output import check_target, markdown_table, percent, points, write_whole
from ragkv.cli.bench import bench_command
from ragkv.cli.console import count, echo, kept_steps, note, print_grid, print_json, steps
from ragkv.cli.doctor import Limit, Seed, codecs_option, engines_option
from ragkv.cli.main import CommandGroup, log_to_stderr
from ragkv.cli.main import run as run_program
from ragkv.cli.options import (
    DEFAULT_INDEX,
    Debug,
    Device,
    Index,
    Json,
    Quiet,
    given_names,
    given_numbers,
    mode_lists,
)
from ragkv.config import DTYPES, MOST_STEPS, one_of
from ragkv.doctor.questions import draw_sample, golden_questions
from ragkv.doctor.specs import parse_specs
from ragkv.errors import UsageError
from ragkv.model.checkpoint import MINI
from ragkv.util.display import json_text

if TYPE_CHECKING:
    from ragkv.benchmarks.evaluation.answers import ChunkSource, ScoreRow
    from ragkv.benchmarks.evaluation.metrics import Task
    from ragkv.doctor.retrieval import RetrievalTask
    from ragkv.doctor.verdicts import MetricValue

Cells: TypeAlias = list[str]
_Table: TypeAlias = tuple[str, Cells, list[Cells]]
"""Title, head and body."""


def check_output(output: Path | None) -> None:
    """Refuse a file that cannot be written, before hours of work."""
    if output is None:
        return
    if output.suffix not in (".json", ".md"):
        raise UsageError(f"--output {output} must end in .json or .md.")
    check_target("--output", output)


def write_figures(output: Path, task: RetrievalTask, figures: Sequence[MetricValue], columns: Sequence[str]) -> None:
    """Write all figures and what they were measured on as .json, or the table as .md; whole or not at all."""
    report = {
        "rows": [asdict(figure) for figure in figures],
        "questions": len(task.judgements),
        "unjudged": list(task.unjudged),
        "passages": None if task.passages is None else len(task.passages),
        "notes": list(task.notes),
    }
    _write(output, report, [(task.name, ["engine", *columns], _cells(figures, columns))], remarks(task))


def _write(output: Path, report: Mapping[str, Any], tables: Sequence[_Table], lines: Sequence[str]) -> None:
    """Write the report as .json, or the tables and lines as .md."""
    if output.suffix == ".json":
        text = json_text(report, indent=1) + "\n"
    else:
        text = "".join(f"# {title}\n\n{markdown_table(head, body)}\n" for title, head, body in tables)
        text += "".join(f"- {line}\n" for line in lines)
    write_whole(output, text, instead="give another --output")


def remarks(task: RetrievalTask) -> list[str]:
    """Remarks on the figures: the number of questions, and which were not measured."""
    corpus = "" if task.passages is None else f", {count(len(task.passages), 'passage')}"
    lines = [f"{task.name}: {count(len(task.judgements), 'question')}{corpus}; ± is half the 95 % bootstrap interval"]
    if task.unjudged:
        some = ", ".join(task.unjudged[:5]) + (", …" if len(task.unjudged) > 5 else "")
        lines.append(f"{count(len(task.unjudged), 'question')} without a relevant passage, not measured: {some}")
    return [*lines, *task.notes]


def _cells(figures: Sequence[MetricValue], columns: Sequence[str]) -> list[list[str]]:
    """The name and the figures of each engine, in the order of `figures`."""
    by_engine: dict[str, dict[str, MetricValue]] = {}
    for figure in figures:
        by_engine.setdefault(figure.engine, {})[figure.metric] = figure
    return [[engine, *(_shown(found[column]) for column in columns)] for engine, found in by_engine.items()]


def _shown(figure: MetricValue) -> str:
    low, high = figure.ci95
    return f"{figure.value:.3f} ±{(high - low) / 2:.2f}".replace("±0.", "±.")


_VARIED = ("model", "codec", "retrieval", "top_k", "steps")
"""Settings that get a column if the rows differ in them."""


def print_rows(rows: Sequence[ScoreRow]) -> None:
    """Print the accuracies, then the differences from the baseline."""
    for number, (title, head, body) in enumerate(_tables(rows)):
        if number:
            echo()
            echo(title)
        print_grid(head, body)


def write_rows(output: Path, tasks: Sequence[Task], rows: Sequence[ScoreRow], seed: int) -> None:
    """Write all rows and what they were measured on as .json, or the tables as .md; whole or not at all."""
    report = {
        "ragkv": ragkv.__version__,
        "seed": seed,
        "tasks": [
            {
                "task": task.name,
                "metric": task.metric,
                "examples": len(task.examples),
                "max_new_tokens": task.max_new_tokens,
                "seed": task.seed,
            }
            for task in tasks
        ],
        "rows": [row.to_json() for row in rows],
    }
    _write(output, report, _tables(rows), row_remarks(tasks, rows))


def row_remarks(tasks: Sequence[Task], rows: Sequence[ScoreRow]) -> list[str]:
    """Remarks on the figures: the questions of each task, and which were not counted."""
    lines = [
        f"{task.name}: {count(len(task.examples), 'question')}, {task.metric}, at most {task.max_new_tokens} tokens"
        + ("" if task.seed is None else f", seed {task.seed}")
        for task in tasks
    ]
    for row in rows:
        if row.too_long and not row.kind:
            missing = count(row.too_long, "question")
            lines.append(f"{row.task}, {row.engine}, {row.model}: no room in the model for {missing}, not counted")
    return [*lines, "± is half the 95 % bootstrap interval over questions"]


def _tables(rows: Sequence[ScoreRow]) -> list[_Table]:
    tables = [("Accuracy, %", *_table(rows, _value))]
    if len({row.steps for row in rows}) > 1 and any(row.evidence is not None for row in rows):
        tables.append(("All of the evidence among the chunks, %", *_table(rows, _evidence)))
    if any(row.difference is not None for row in rows):
        names = ", ".join(dict.fromkeys(row.baseline for row in rows if row.baseline))
        tables.append((f"Difference from {names}, points", *_table([row for row in rows if row.baseline], _difference)))
    return tables


def _table(rows: Sequence[ScoreRow], shown: Callable[[ScoreRow], str]) -> tuple[Cells, list[Cells]]:
    columns = list(dict.fromkeys((row.task, row.kind) for row in rows))
    varied = [name for name in _VARIED if len({_setting(row, name) for row in rows}) > 1]
    lines: dict[int, dict[tuple[str, str], ScoreRow]] = {}
    for row in rows:
        lines.setdefault(id(row.candidate), {})[row.task, row.kind] = row
    head = ["engine", *varied, *(f"{task}: {kind}" if kind else task for task, kind in columns)]
    body = []
    for found in lines.values():
        first = next(iter(found.values()))
        cells = [first.engine, *(_setting(first, name) for name in varied)]
        body.append(cells + [shown(found[column]) if column in found else "" for column in columns])
    return head, body


def _setting(row: ScoreRow, name: str) -> str:
    value = getattr(row.candidate, "scoring" if name == "retrieval" else name)
    return "all" if value is None else str(value)


def _value(row: ScoreRow) -> str:
    if row.value is None or row.ci95 is None:
        return "no room" if row.too_long else "-"
    return percent(row.value, row.ci95)


def _evidence(row: ScoreRow) -> str:
    return "" if row.evidence is None else f"{row.evidence:.1%}".removesuffix("%")


def _difference(row: ScoreRow) -> str:
    if row.difference is None or row.difference_ci95 is None:
        return ""
    return points(row.difference, row.difference_ci95)


DEFAULT_LIMIT = 100
_SCORES = "Relevance of the chunks"
_BENCHMARK = "BEIR's folders"
_MODEL = "mini, a folder or a hub id."


def _option(panel: str, about: str, default: str | None = None, *names: str, **more: Any) -> Any:
    """An option of a panel of the help; `default` says what an unset one means."""
    return typer.Option(*names, help=about, show_default=default or True, rich_help_panel=panel, **more)


Output = Annotated[Path | None, typer.Option(help="Write the figures to FILE.json or FILE.md.", show_default=False)]

app = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.callback()
def choose(debug: Debug = False) -> None:
    """Measure the quality of answers, of retrieval and of codecs, and try families of models."""
    log_to_stderr(debug=debug)


@app.command(no_args_is_help=True)
def answers(
    what: Annotated[
        list[str],
        typer.Argument(
            help="Tasks of docs/evaluation.md, with options in parentheses, or files.",
            metavar="TASK|FILE…",
            show_default=False,
        ),
    ],
    engines: Annotated[str, engines_option()] = "full,ape,block,pced",
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model folder or hub id; may be given several times.", show_default="mini, or the index's"),
    ] = None,
    chunks: Annotated[str, typer.Option(help="Chunks per question of a task; several sizes: 8,32.")] = "8",
    limit: Limit = None,
    seed: Seed = 0,
    codecs: Annotated[
        str | None, codecs_option("Codecs with which KV is stored and read back.", "raw, or the index's")
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
        _option(
            _SCORES,
            "How chunks are ranked: given (the task's order, equal scores), dense, sparse, colbert, hybrid, bm25.",
            "given, or the index's",
        ),
    ] = None,
    rerank: Annotated[
        bool | None,
        _option(_SCORES, "Sort the chunks with the reranker.", "no, or the index's", "--rerank/--no-rerank"),
    ] = None,
    top_k: Annotated[
        int | None, _option(_SCORES, "Read only the best chunks, this many.", "all, or the index's", min=1)
    ] = None,
    steps: Annotated[
        str,
        _option(_SCORES, "Search up to this many times, for queries that the model writes; several numbers: 1,2,3."),
    ] = "1",
    embedder: Annotated[str | None, _option(_SCORES, _MODEL, "mini beside mini")] = None,
    reranker: Annotated[str | None, _option(_SCORES, _MODEL, "mini beside mini")] = None,
    metric: Annotated[
        str | None, typer.Option(help="Metric of the answers to a file's questions.", show_default="contains")
    ] = None,
    work: Annotated[
        Path, typer.Option(help="Keep answers in this folder, so that the same command continues a stopped run.")
    ] = DEFAULT_WORK,
    device: Device = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="auto, float32, bfloat16, float16 or int8.", show_default="auto; float32 for mini on a CPU"),
    ] = None,
    output: Output = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as one JSON list.")] = False,
    quiet: Quiet = False,
) -> None:
    """Measure the accuracy of engines on tasks, and the difference from full attention.

    A task is built in, or a JSONL file of questions with their chunks. With --index it is a file of questions with
    gold answers, asked of your index. Every answer is kept, so the same command continues a stopped run.

    Example: `python -m ragkv.benchmarks.evaluation answers worlds --engines "full,block,pced(gamma=2.5)" --chunks 8,32`
    """
    from ragkv.benchmarks.evaluation.answers import (
        GIVEN,
        IndexSource,
        TaskSource,
        all_candidates,
        require_baseline,
        run,
    )
    from ragkv.pipeline import RagKV

    check_output(output)
    if dtype is not None:
        one_of("--dtype", dtype, DTYPES)
    sizes, searches = given_numbers("--chunks", chunks), given_numbers("--steps", steps, most=MOST_STEPS)
    with ExitStack() as stack:
        source: ChunkSource
        if index is not None:
            own = {"--model": model, "--codecs": codecs, "--dtype": dtype, "--metric": metric}
            own |= {"--embedder": embedder, "--reranker": reranker}
            if wrong := [name for name, value in own.items() if value]:
                raise UsageError(f"{wrong[0]} cannot be used with --index; leave it out.")
            rag = stack.enter_context(RagKV.open(index, device=device, readonly=True))
            tasks_asked = [_questions(Path(name), limit, seed) for name in what]
            source = IndexSource(rag)
            settings = source.settings | {"tuning": rag.config.tuning}
        else:
            tasks_asked = [task for name in what for task in _tasks(name, sizes, limit, seed, metric)]
            beside = MINI if set(model or [MINI]) == {MINI} else None  # mini's embedder knows nothing of the real world
            source = TaskSource(embedder=embedder or beside, reranker=reranker or beside, device=device)
            settings = {"model": MINI, "codec": codecs or "raw", "retrieval": GIVEN, "dtype": dtype}
        settings |= {name: value for name, value in (("rerank", rerank), ("top_k", top_k)) if value is not None}
        own_model, own_codec, own_retrieval = (settings.pop(name) for name in ("model", "codec", "retrieval"))
        asked = all_candidates(
            parse_specs(engines),
            models=model or [own_model],
            codecs=given_names("--codecs", own_codec),
            retrievals=given_names("--retrieval", retrieval or own_retrieval),
            steps=searches,
            **settings,
        )
        absent = baseline == "full" and all(one.label != "full" for one in asked)
        against = None if baseline == "none" or absent else baseline
        if against is not None:
            require_baseline(asked, against)
        with kept_steps("eval answers", work, silent=quiet or as_json) as notify:
            rows = run(
                tasks_asked,
                asked,
                source=source,
                seed=seed,
                baseline=against,
                max_new_tokens=max_new_tokens,
                work=work,
                on_progress=notify,
            )
    if output is not None:
        write_rows(output, tasks_asked, rows, seed)
    if as_json:
        print_json([row.to_json() for row in rows])
    else:
        print_rows(rows)
    if not quiet:
        for line in row_remarks(tasks_asked, rows):
            note(line)


def _tasks(text: str, sizes: list[int], limit: int | None, seed: int, metric: str | None) -> list[Task]:
    """The tasks of a file, or a built-in task at every size."""
    from ragkv.benchmarks.evaluation.tasks import make_task

    path = Path(text)
    if path.exists():
        from ragkv.benchmarks.evaluation.files import load_task

        return [load_task(path, metric=metric or "contains", limit=limit, seed=seed)]
    named = parse_specs(text)
    return [make_task(one, seed=seed, limit=limit or DEFAULT_LIMIT, chunks=size) for one in named for size in sizes]


def _questions(path: Path, limit: int | None, seed: int) -> Task:
    """The questions of a file that have gold answers."""
    from ragkv.benchmarks.evaluation.metrics import Task

    golden, _ = golden_questions(path)
    return Task.of(draw_sample(golden, limit, seed), name=path.stem, metric="subspan_em")


@app.command(no_args_is_help=True)
def retrieval(
    path: Annotated[
        Path,
        typer.Argument(help="A JSONL file of questions, or the folder of a BEIR benchmark.", metavar="PATH"),
    ],
    index: Index = DEFAULT_INDEX,
    modes: Annotated[
        str | None,
        typer.Option(
            help="Some of dense, sparse, colbert, hybrid, bm25.",
            show_default="all that have vectors",
            autocompletion=mode_lists,
        ),
    ] = None,
    rerank: Annotated[
        bool | None,
        typer.Option(
            "--rerank/--no-rerank", help="Measure only with, or only without the reranker.", show_default="both"
        ),
    ] = None,
    k: Annotated[str, typer.Option("--k", help="How many of the first results to look at.")] = "1,5,10",
    candidates: Annotated[
        int | None, typer.Option(help="Chunks that the reranker reads.", min=1, show_default="the index's, or 50")
    ] = None,
    limit: Limit = None,
    seed: Seed = 0,
    split: Annotated[str | None, _option(_BENCHMARK, "Questions of the benchmark.", "test")] = None,
    embedder: Annotated[str | None, _option(_BENCHMARK, _MODEL, "none, BM25 only")] = None,
    reranker: Annotated[str | None, _option(_BENCHMARK, _MODEL, "none")] = None,
    max_tokens: Annotated[
        int | None,
        _option(_BENCHMARK, "Cut passages off after this many tokens.", "the embedder's limit", min=8),
    ] = None,
    device: Device = None,
    output: Output = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON list.")] = False,
    quiet: Quiet = False,
) -> None:
    """Measure recall, hit rate, MRR and nDCG of every mode of retrieval, on your own index or on a benchmark.

    Each line of a question file says what is relevant: `"sources": […]` names documents, `"answer"` or `"evidence"` a
    text that the right chunk contains. docs/evaluation.md says how chunks are judged.

    Example: `python -m ragkv.benchmarks.evaluation retrieval questions.jsonl --modes dense,bm25 --k 1,5,10`
    """
    from ragkv.benchmarks.evaluation.files import read_benchmark
    from ragkv.benchmarks.evaluation.retrieval import corpus_searches, load_models, measure
    from ragkv.doctor.retrieval import index_searches, judged_questions
    from ragkv.pipeline import RagKV

    depths = sorted(given_numbers("--k", k))
    check_output(output)
    named = None if modes is None else given_names("--modes", modes)
    silent = quiet or as_json
    if not path.is_dir():
        others = {"--split": split, "--embedder": embedder, "--reranker": reranker, "--max-tokens": max_tokens}
        if wrong := [option for option, value in others.items() if value is not None]:
            raise UsageError(f"{wrong[0]} is only for {_BENCHMARK}; leave it out for a file of questions.")
        with RagKV.open(index, device=device) as rag:
            task = judged_questions(path, rag.store).sample(limit, seed)
            searches = index_searches(rag, named, rerank=rerank, candidates=candidates)
            with steps("eval retrieval", silent=silent) as on_progress:
                figures = measure(task, searches, depths, seed=seed, on_progress=on_progress)
    else:
        task = read_benchmark(path, split=split or "test").sample(limit, seed)
        if embedder is None and modes is None and not quiet:
            note("Without --embedder only BM25 is measured; --embedder NAME adds the other modes.")
        models = load_models(embedder, reranker, named, rerank=rerank, device=device, max_tokens=max_tokens)
        with steps("embedding", silent=silent) as on_progress:
            searches = corpus_searches(
                task, *models, named, rerank=rerank, candidates=candidates, on_progress=on_progress
            )
        with steps("eval retrieval", silent=silent) as on_progress:
            figures = measure(task, searches, depths, seed=seed, on_progress=on_progress)
    columns = [*(f"recall@{at}" for at in depths), f"mrr@{depths[-1]}", f"ndcg@{depths[-1]}"]
    if output is not None:
        write_figures(output, task, figures, columns)
    if as_json:
        print_json([asdict(figure) for figure in figures])
    else:
        print_grid(["engine", *columns], _cells(figures, columns))
    if not quiet:
        for line in remarks(task):
            note(line)


@app.command()
def families(
    names: Annotated[str, typer.Argument(help="`all`, or names with commas.")] = "all",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Try every engine on small random models of the families of transformers, and judge whether answers are exact.

    It ends with code 1 if an answer is wrong. `make models` writes the table of docs/models.md with it.

    Example: `python -m ragkv.benchmarks.evaluation families llama,gpt_oss`
    """
    from importlib.metadata import version

    from ragkv.benchmarks.evaluation.families import COLUMNS, Survey, select_families, survey

    chosen = select_families(names)
    verdicts = []
    with steps("trying", silent=quiet or as_json) as show:
        for verdict in survey(chosen):
            verdicts.append(verdict)
            show(len(verdicts), len(chosen), verdict.family)
    result = Survey(version("transformers"), tuple(verdicts))
    if as_json:
        print_json(result.to_json())
    else:
        print_grid(COLUMNS, [verdict.cells() for verdict in verdicts], words=("RoPE", "layers", "why refused"))
        echo(f"Families of transformers {result.transformers}: {len(verdicts)}; exact: {result.exact_counts()}.")
    if any(verdict.engine(name) == "wrong" for verdict in verdicts for name in verdict.errors):
        raise typer.Exit(1)


app.command("codec")(bench_command("codec", measure_codec))


def main() -> None:
    """Entry point of `python -m ragkv.benchmarks.evaluation`."""
    run_program(app, "python -m ragkv.benchmarks.evaluation")


if __name__ == "__main__":
    main()
