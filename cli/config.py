"""`ragkv config`: every setting's value, and who said so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ragkv.boundary.toml import read_toml
from ragkv.cli.console import draw, note, print_json, say
from ragkv.cli.option import (
    DEFAULT_INDEX,
    ChunkTokens,
    Codec,
    Device,
    Dtype,
    Embedder,
    Engine,
    Engines,
    Index,
    Json,
    Model,
    Quiet,
    Reranker,
    TopK,
    split_names,
)
from ragkv.cli.setting import CHOSEN, FLAGS, USED, VARIABLES, Setting, UserFile, in_force, user_file
from ragkv.config import CONFIG_FILE, IndexConfig, load_config
from ragkv.errors import KVMismatchError

__all__ = ["app"]

app = typer.Typer(help="Show settings and where they come from.", no_args_is_help=True)


@app.callback()
def choose() -> None:
    """Show settings and where they come from."""


@app.command()
def path(as_json: Json = False, quiet: Quiet = False) -> None:
    """Print where your own file of defaults is, or would be.

    It is TOML with the keys of `ragkv.toml` for indexes that are yet to be made, and `index` and `device`.

    Example: `$EDITOR "$(ragkv config path)"`
    """
    found = user_file()
    if as_json:
        print_json({"path": str(found), "exists": found.is_file()})
        return
    say(found)
    if not (found.is_file() or quiet):
        note("it is not there yet: make it to have defaults of your own")


@app.command()
def show(
    ctx: typer.Context,
    index: Index = DEFAULT_INDEX,
    device: Device = None,
    model: Model = None,
    dtype: Dtype = None,
    engines: Engines = None,
    chunk_tokens: ChunkTokens = None,
    codec: Codec = None,
    embedder: Embedder = None,
    reranker: Reranker = None,
    engine: Engine = None,
    top_k: TopK = None,
    changed: Annotated[bool, typer.Option("--changed", help="Leave out what is as by default.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show every setting in force and where it comes from: flag, environment, index, file, default, in that order.

    Of an index that exists, what it was built with; a flag or variable that contradicts it is refused. Where there is
    none, what a new one would be made with.

    Example: `ragkv config show --index my-index --changed`
    """
    from ragkv.index.creation import is_empty, kept_settings, new_config

    given: dict[str, Any] = {
        "index": index,
        "device": device,
        "model": model,
        "dtype": dtype,
        "engines": None if engines is None else split_names(engines),
        "chunk_tokens": chunk_tokens,
        "codec": codec,
        "embedder": embedder,
        "reranker": reranker,
        "default_engine": engine,
        "top_k": top_k,
    }
    flags, variables = _by_source(ctx, given, "COMMANDLINE"), _by_source(ctx, given, "ENVIRONMENT")
    user = UserFile.read(user_file())
    toml = index / CONFIG_FILE
    config, kept = load_config(index) if toml.exists() else None, None
    contradicted = config is not None and any(_differs(name, value, config) for name, value in flags.items())
    if config is not None and not (contradicted and is_empty(index)):
        _refuse(flags, config, index)
        kept = (toml, read_toml(toml))
    else:  # `ragkv ingest` makes an index without documents anew
        plain = {name: value for name, value in {**variables, **flags}.items() if name not in USED}
        plain = (kept_settings(index) if toml.exists() else {}) | plain
        config = new_config({**user.settings, **plain})
    found = in_force(
        flags=flags,
        variables=variables,
        user=user,
        config=config,
        used={"index": DEFAULT_INDEX, "device": None},
        index=kept,
    )
    ignored = [] if kept is None else [name for name in variables if _differs(name, variables[name], config)]
    shown = [one for one in found if one.origin != "default" or not changed]
    if as_json:
        print_json(_json(index, user, shown, exists=kept is not None, ignored=ignored))
        return
    if not quiet:
        what = "what it was built with" if kept else "there is no index; what a new one would be made with"
        note(f"{index}: {what}")
        note(f"{user.path}: " + ("read" if user.path.is_file() else "not there"))
    _table(shown)
    for name in ignored:
        note(f"{VARIABLES[name]}={os.environ[VARIABLES[name]]} contradicts the index; ragkv ingest refuses it")


def _by_source(ctx: typer.Context, given: dict[str, Any], source: str) -> dict[str, Any]:
    """Those of the values that came from there; a parameter has its option's name."""
    found = {}
    for name, value in given.items():
        origin = ctx.get_parameter_source(FLAGS[name].removeprefix("--").replace("-", "_"))
        if origin is not None and origin.name == source:
            found[name] = value
    return found


def _differs(name: str, value: Any, config: IndexConfig) -> bool:
    return name not in CHOSEN and getattr(config, name) != value


def _refuse(flags: dict[str, Any], config: IndexConfig, index: Path) -> None:
    """As `ragkv ingest` would."""
    for name, value in flags.items():
        if _differs(name, value, config):
            raise KVMismatchError(
                f"The index at {index} was made with {name} = {_shown(getattr(config, name))}, not {_shown(value)}; "
                f"leave {FLAGS[name]} out, or name an --index that is yet to be made."
            )


def _json(index: Path, user: UserFile, shown: list[Setting], *, exists: bool, ignored: list[str]) -> dict[str, Any]:
    return {
        "index": str(index),
        "index_exists": exists,
        "user_file": str(user.path),
        "user_file_exists": user.path.is_file(),
        "settings": [
            {
                "name": one.name,
                "value": str(one.value) if isinstance(one.value, Path) else one.value,
                "origin": one.origin,
                "where": one.where,
            }
            for one in shown
        ],
        "contradicted": {VARIABLES[name]: os.environ[VARIABLES[name]] for name in ignored},
    }


def _table(shown: list[Setting]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", no_wrap=True)
    for one in shown:
        named = f"{one.origin} {one.where}" if one.origin in ("flag", "environment") else one.origin
        table.add_row(one.name, _shown(one.value), named, style="dim" if one.origin == "default" else None)
    draw(table)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if value is None:
        return "unset"
    return repr(value) if isinstance(value, str) and (not value or "\n" in value) else str(value)
