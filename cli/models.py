"""`ragkv models`: which models run exactly, and what one of them needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.console import note, print_json, say, size
from ragkv.cli.grid import print_facts, print_grid
from ragkv.cli.option import Device, Dtype, Json, Quiet
from ragkv.cli.progress import steps
from ragkv.errors import UsageError

if TYPE_CHECKING:
    from ragkv.evaluation.survey import Survey
    from ragkv.planning.portrait import Portrait

__all__ = ["models"]


def models(
    checkpoint: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Model folder, .gguf file or hub id to describe.", show_default=False),
    ] = None,
    families: Annotated[
        str | None,
        typer.Option(
            help="Try these families now, on small random weights: `all`, or names with commas.",
            show_default="what was found for the release",
        ),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show which model families run exactly, or what one model needs.

    Without a model: every decoder family of transformers, and for each engine whether its answers are exact or refused,
    how far off they were, and why. The table was made with the transformers of this release; `--families all` makes it
    anew with yours, in minutes, and ends with code 1 if an answer is wrong.

    With a model: it is loaded and proved; then engines, bytes of KV per token and codec, memory, positions, and what
    will be slow. A model that ragkv cannot run is an error that says why.

    Example: `ragkv models Qwen/Qwen3-4B`
    """
    if checkpoint is not None and families is not None:
        raise UsageError("Give a model or --families, not both; see ragkv models --help.")
    if checkpoint is not None:
        from ragkv.planning.portrait import draw_portrait

        portrait = draw_portrait(checkpoint, dtype=dtype or "auto", device=device)
        print_json(portrait.to_json()) if as_json else _show(portrait)
        return
    found = _recorded(quiet=quiet or as_json) if families is None else _tried(families, quiet=quiet or as_json)
    print_json(found.to_json()) if as_json else _table(found)
    if any(verdict.engine(name) == "wrong" for verdict in found.verdicts for name in verdict.errors):
        raise typer.Exit(1)


def _recorded(*, quiet: bool) -> Survey:
    from importlib.metadata import version

    from ragkv.evaluation.survey import Survey

    found = Survey.recorded()
    if not quiet and (here := version("transformers")) != found.transformers:
        note(f"made with transformers {found.transformers}; yours is {here}: --families all tries its families")
    return found


def _tried(names: str, *, quiet: bool) -> Survey:
    from importlib.metadata import version

    from ragkv.evaluation.survey import Survey, choose, survey

    chosen = choose(names)
    verdicts = []
    with steps("trying", silent=quiet) as show:
        for verdict in survey(chosen):
            verdicts.append(verdict)
            show(len(verdicts), len(chosen), verdict.family)
    return Survey(version("transformers"), tuple(verdicts))


def _table(found: Survey) -> None:
    from ragkv.evaluation.family import ENGINES

    body = [
        [
            verdict.family,
            *(verdict.engine(name) for name in ENGINES),
            "" if verdict.error is None else f"{verdict.error:.0e}",
            verdict.why,
        ]
        for verdict in found.verdicts
    ]
    print_grid(["family", *ENGINES, "error", "why"], body, words=("why",))
    exact = ", ".join(f"{name} {found.exact(name)}" for name in ENGINES)
    say(f"Families of transformers {found.transformers}: {len(found.verdicts)}; exact: {exact}.")


def _context(portrait: Portrait) -> str:
    return size(1000 * portrait.kv_bytes["raw"])


def _show(portrait: Portrait) -> None:
    able = [name for name, reason in portrait.engines.items() if reason is None]
    rows = [
        ("model", f"{portrait.name} ({portrait.family})"),
        ("parameters", f"{portrait.parameters / 1e6:,.1f}M, {portrait.dtype} on {portrait.device}"),
        ("memory", f"{size(portrait.weight_bytes)} of weights, {_context(portrait)} for 1,000 tokens of context"),
        ("positions", "no limit known" if portrait.positions is None else f"{portrait.positions:,}"),
        ("engines", ", ".join(able)),
        *((f"not {name}", reason) for name, reason in portrait.engines.items() if reason is not None),
        *((f"KV, {name}", f"{nbytes:,.0f} bytes/token") for name, nbytes in portrait.kv_bytes.items()),
    ]
    if portrait.state_bytes:
        rows.append(("states", f"{size(portrait.state_bytes)} per chunk, beside its KV"))
    if portrait.expanded_bytes is not None:
        rows.append(("KV, expanded", f"{portrait.expanded_bytes:,.0f} bytes/token, if keys and values were kept"))
    rows += [("slow", reason) for reason in portrait.slow]
    print_facts(rows)
