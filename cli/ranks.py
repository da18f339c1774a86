"""`torchrun … -m ragkv.cli.ranks`: several processes encode a long document together, and rank 0 answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ragkv.cli.console import count, echo_text, print_json
from ragkv.cli.main import SingleCommand, log_to_stderr, run
from ragkv.cli.options import (
    BlockTokens,
    Debug,
    Device,
    Json,
    Quiet,
    RanksArguments,
    block_tuning,
    shared_options,
)
from ragkv.cli.query import context_material, show_sources
from ragkv.errors import RagkvError, UsageError

app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False)


@app.command(cls=SingleCommand, no_args_is_help=True)
@shared_options
def ranks(
    *,
    question: Annotated[str, typer.Argument(help="What you want to know.", show_default=False)],
    context: Annotated[
        list[Path],
        typer.Option(
            help="Answer from the whole text of this file, which every rank has; may be given several times.",
            metavar="FILE",
            show_default=False,
        ),
    ],
    block_tokens: BlockTokens = None,
    model: Annotated[str | None, typer.Option(help="The model that answers.", show_default=False)] = None,
    typed: RanksArguments,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a rank waits for the others: to come, to load, to compute a layer.")
    ] = 300.0,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Answer from long texts by the engine `apb`: the ranks encode the blocks in parallel, and rank 0 prints.

    Example: `torchrun --nproc-per-node 4 -m ragkv.cli.ranks "Who betrays Orla?" --context book.txt`
    """
    import torch

    from ragkv import __version__
    from ragkv.index.answer import validate_task
    from ragkv.index.contexts import Contexts
    from ragkv.ranks import RankExecutor, RankGroup, meeting_place

    log_to_stderr(debug=debug)
    if timeout <= 0:
        raise UsageError("--timeout is a number of seconds above 0.")
    store, rank, size = meeting_place(timeout)
    if device is None and torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    options: dict[str, Any] = {"engine": "apb", **typed}
    try:
        tuning = block_tuning(block_tokens)
        language_model, texts, config = context_material(context, model, device, tuning=tuning, quiet=quiet or rank > 0)
        group = RankGroup(store, rank, size, timeout=timeout, device=language_model.device)
        with Contexts(language_model, texts, config, executor=RankExecutor(group)) as contexts:
            checkpoint = language_model.checkpoint
            task = validate_task(contexts.config, question, **options)
            group.require_same(
                {
                    "version of ragkv": __version__,
                    "model": checkpoint.fingerprint(
                        config.dtype, None if checkpoint.local else language_model.revision
                    ),
                    "prompt": repr(contexts.prompt.facts()),
                    "[tuning.apb]": repr(task.engine.config),
                    "text": repr([text for _, text in texts]),
                    "question": repr((question, options)),
                }
            )
            if rank:
                contexts.request(task, contexts.plan(task.engine, contexts.find(task, lambda _: None)), None, [])
                return
            with contexts.stream(question, **options) as stream:
                for _ in stream:
                    continue
            answer = stream.answer
    except RagkvError as error:
        if not rank:
            raise
        raise type(error)(f"rank {rank}: {error}") from error
    if as_json:
        print_json(answer.to_json())
        return
    echo_text(answer.text)
    if not quiet:
        show_sources(answer, f"{count(len(context), 'file')} over {count(size, 'rank')}")


def main() -> None:
    """Run the command."""
    # before torch is loaded: its C++ code would print a stack for each lost connection, beside ragkv's own error
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    run(app, "python -m ragkv.cli.ranks")


if __name__ == "__main__":
    main()
