"""`ragkv models` shows what a model needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.console import print_facts, print_json, size
from ragkv.cli.options import Device, Dtype, Json, Quiet
from ragkv.config import DTYPES, one_of

if TYPE_CHECKING:
    from ragkv.index.requirements import ModelRequirements


def models(
    checkpoint: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder, .gguf file or hub id to describe.", show_default=False)
    ],
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what a model needs, and which engines run on it exactly.

    The model is loaded by the runtime that it has by default, and self-checked; then engines, bytes of KV per token and
    codec, memory, positions, and what will be slow. A model that ragkv cannot run is an error that says why.
    docs/models.md has a table of the families.

    Example: `ragkv models Qwen/Qwen3-4B`
    """
    if dtype is not None:
        one_of("--dtype", dtype, DTYPES)
    from ragkv.index.requirements import model_requirements

    requirements = model_requirements(checkpoint, dtype=dtype or "auto", device=device)
    print_json(requirements.to_json()) if as_json else _show(requirements)


def _show(requirements: ModelRequirements) -> None:
    context = next(iter(requirements.kv_bytes.values()))
    able = [name for name, reason in requirements.engines.items() if reason is None]
    rows = [
        ("model", f"{requirements.name} ({requirements.family})"),
        ("parameters", f"{requirements.parameters / 1e6:,.1f}M, {requirements.dtype} on {requirements.device}"),
        ("runtime", requirements.runtime),
        (
            "memory",
            f"{size(requirements.weight_bytes)} of weights, {size(1000 * context)} for 1,000 tokens of context",
        ),
        ("positions", "no limit known" if requirements.positions is None else f"{requirements.positions:,}"),
        ("engines", ", ".join(able)),
        *((f"not {name}", reason) for name, reason in requirements.engines.items() if reason is not None),
        *((f"KV, {name}", f"{nbytes:,.0f} bytes/token") for name, nbytes in requirements.kv_bytes.items()),
    ]
    if requirements.state_bytes:
        rows.append(("states", f"{size(requirements.state_bytes)} per chunk, beside its KV"))
    if requirements.expanded_bytes is not None:
        rows.append(("KV, expanded", f"{requirements.expanded_bytes:,.0f} bytes/token, if keys and values were kept"))
    rows += [("slow", reason) for reason in requirements.slow]
    print_facts(rows)
