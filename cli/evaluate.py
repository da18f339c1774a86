"""`ragkv eval`: measure retrieval and answers on questions whose answers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli import answers
from ragkv.cli.answers import DEFAULT_WORK
from ragkv.cli.console import note, print_json
from ragkv.cli.figure import check_output, print_figures, remarks, write_figures
from ragkv.cli.option import DEFAULT_INDEX, Device, Index, Quiet, given_names, given_numbers
from ragkv.cli.progress import steps
from ragkv.errors import UsageError

__all__ = ["app"]

app = typer.Typer(help="Measure quality on questions whose answers are known.", no_args_is_help=True)

_BENCHMARK = "BEIR and LOFT folders"


app.command(name="answers", no_args_is_help=True)(answers.answers)
app.command(name="tasks")(answers.tasks)


@app.command(no_args_is_help=True)
def retrieval(
    path: Annotated[
        Path,
        typer.Argument(help="A JSONL file of questions, or the folder of a BEIR or LOFT benchmark.", metavar="PATH"),
    ],
    index: Index = DEFAULT_INDEX,
    modes: Annotated[
        str | None,
        typer.Option(help="Some of dense, sparse, colbert, hybrid, bm25.", show_default="all that have vectors"),
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
    limit: Annotated[int | None, typer.Option(help="Ask at most this many questions.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draw of questions and of the intervals.")] = 0,
    layout: Annotated[
        str | None, typer.Option("--format", help="ragkv, beir or loft.", show_default="by the files")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Questions of the benchmark.", show_default="test", rich_help_panel=_BENCHMARK)
    ] = None,
    embedder: Annotated[
        str | None,
        typer.Option(help="mini, a folder or a hub id.", show_default="none, BM25 only", rich_help_panel=_BENCHMARK),
    ] = None,
    reranker: Annotated[
        str | None, typer.Option(help="mini, a folder or a hub id.", show_default="none", rich_help_panel=_BENCHMARK)
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Cut passages off after this many tokens.",
            min=8,
            show_default="the embedder's limit",
            rich_help_panel=_BENCHMARK,
        ),
    ] = None,
    work: Annotated[
        Path,
        typer.Option(
            help="Keep vectors in this folder, so that the same command continues a stopped run.",
            rich_help_panel=_BENCHMARK,
        ),
    ] = DEFAULT_WORK,
    device: Device = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the figures to FILE.json or FILE.md.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON list.")] = False,
    quiet: Quiet = False,
) -> None:
    """Measure recall, hit rate, MRR and nDCG of every mode of retrieval, on your own index or on a benchmark.

    Each line of a question file says what is relevant: `"sources": […]` names documents, `"answer"` or `"evidence"` a
    text that the right chunk contains. docs/evaluation.md says how chunks are judged.

    Example: `ragkv eval retrieval questions.jsonl --modes dense,bm25 --k 1,5,10`
    """
    from ragkv.evaluation.benchmark import read_benchmark
    from ragkv.evaluation.contender import Settings, corpus_searches, index_searches, load_models
    from ragkv.evaluation.relevance import judged_questions
    from ragkv.evaluation.retrieval import measure
    from ragkv.pipeline import RagKV

    depths = sorted(given_numbers("--k", k))
    check_output(output)
    named = None if modes is None else given_names("--modes", modes)
    settings = Settings(modes=named, rerank=rerank, candidates=candidates)
    silent = quiet or as_json
    own = layout == "ragkv" or (layout is None and not path.is_dir())
    if own:
        given = {"--split": split, "--embedder": embedder, "--reranker": reranker, "--max-tokens": max_tokens}
        if wrong := [option for option, value in given.items() if value is not None]:
            raise UsageError(f"{wrong[0]} is only for {_BENCHMARK}; leave it out for a file of questions.")
        with RagKV.open(index, device=device) as rag:
            task = judged_questions(path, rag.store).sample(limit, seed)
            searches = index_searches(rag, settings)
            with steps("eval retrieval", silent=silent) as on_progress:
                figures = measure(task, searches, depths, seed=seed, on_progress=on_progress)
    else:
        task = read_benchmark(path, layout=layout, split=split).sample(limit, seed)
        if embedder is None and modes is None and not quiet:
            note("Without --embedder only BM25 is measured; --embedder NAME adds the other modes.")
        models = load_models(settings, embedder, reranker, device=device, max_tokens=max_tokens)
        with steps("embedding", silent=silent) as on_progress:
            searches = corpus_searches(task, settings, *models, work=work, on_progress=on_progress)
        with steps("eval retrieval", silent=silent) as on_progress:
            figures = measure(task, searches, depths, seed=seed, on_progress=on_progress)
    columns = [*(f"recall@{at}" for at in depths), f"mrr@{depths[-1]}", f"ndcg@{depths[-1]}"]
    if output is not None:
        write_figures(output, task, figures, columns)
    if as_json:
        print_json([figure.to_json() for figure in figures])
    else:
        print_figures(figures, columns)
    if not quiet:
        for line in remarks(task):
            note(line)
