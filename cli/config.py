"""`ragkv config`: the value of every setting, and where it comes from."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ragkv.cli.console import count, draw, echo, note, plain, print_json
from ragkv.cli.options import (
    CHANGEABLE,
    DEFAULT_INDEX,
    FLAGS,
    USED,
    VARIABLES,
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
    UserFile,
    ValueInForce,
    contradicted,
    in_force,
    require_same,
    shown_value,
    source_of,
    split_names,
    user_file,
)
from ragkv.config import CONFIG_FILE, IndexConfig, PromptConfig, byte_count, load_config
from ragkv.errors import UsageError
from ragkv.util.files import read_toml

app = typer.Typer(help="Show settings and where they come from, or change some.", no_args_is_help=True)


@app.command()
def path(as_json: Json = False, quiet: Quiet = False) -> None:
    """Print the path of your user file, which holds your own defaults.

    It is a TOML file with the keys of `ragkv.toml`, for new indexes, and with `index` and `device`.

    Example: `$EDITOR "$(ragkv config path)"`
    """
    user = user_file()
    if as_json:
        print_json({"path": str(user), "exists": user.is_file()})
        return
    echo(user)
    if not (user.is_file() or quiet):
        note("the file does not exist yet; create it to have defaults of your own")


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
    changed: Annotated[bool, typer.Option("--changed", help="Leave out settings that have their default.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show every setting and where its value comes from: flag, environment, index, user file or default, in this order.

    For an existing index these are the settings that it was built with; a flag that contradicts them is refused. If
    there is no index, these are the settings that a new one would have.

    Example: `ragkv config show --index my-index --changed`
    """
    from ragkv.index.create import is_empty, kept_settings, new_config
    from ragkv.index.index import MEMORY_VARIABLE, check_encoders, check_names
    from ragkv.index.ingestion import default_model
    from ragkv.util.plugins import require_engine

    flag_values: dict[str, Any] = {
        "index": index,
        "device": device,
        "model": model,
        "dtype": dtype,
        "engines": split_names(engines),
        "chunk_tokens": chunk_tokens,
        "codec": codec,
        "embedder": embedder,
        "reranker": reranker,
        "default_engine": engine,
        "top_k": top_k,
    }
    flags, variables = _by_source(ctx, flag_values, "COMMANDLINE"), _by_source(ctx, flag_values, "ENVIRONMENT")
    user = UserFile.read(user_file())
    toml = index / CONFIG_FILE
    config, recorded = load_config(index) if toml.exists() else None, None
    if config is not None and not (contradicted(config, flags) and is_empty(index)):
        require_same(index, config, flags)
        check_names(config, toml)
        if engine is not None:
            require_engine(engine)
        recorded = (toml, read_toml(toml))
    else:  # `ragkv ingest` replaces an index that holds no documents
        plain = {name: value for name, value in {**variables, **flags}.items() if name not in USED}
        plain = (kept_settings(index) if toml.exists() else {}) | plain
        config = new_config({"model": default_model(()), **user.settings, **plain})
        check_names(config)
        check_encoders(config)
    in_use = in_force(
        flags=flags,
        variables=variables,
        user=user,
        config=config,
        used={"index": DEFAULT_INDEX, "device": None},
        index=recorded,
    )
    if memory := os.environ.get(MEMORY_VARIABLE):
        if memory != "auto":
            byte_count(MEMORY_VARIABLE, memory)
        forced = ValueInForce(name="memory_budget", value=memory, origin="environment", where=MEMORY_VARIABLE)
        in_use = [forced if one.name == forced.name else one for one in in_use]
    ignored = [] if recorded is None else contradicted(config, variables)
    shown = [one for one in in_use if one.origin != "default" or not changed]
    if as_json:
        print_json(_json(index, user, shown, exists=recorded is not None, ignored=ignored))
        return
    if not quiet:
        what = "what it was built with" if recorded else "there is no index; what a new one would be made with"
        note(f"{index}: {what}")
        note(f"{user.path}: " + ("read" if user.path.is_file() else "does not exist"))
    _table(shown)
    for name in ignored:
        note(f"{VARIABLES[name]}={os.environ[VARIABLES[name]]} contradicts the index; ragkv ingest refuses it")


@app.command(name="set", no_args_is_help=True)
def change(
    settings: Annotated[
        list[str], typer.Argument(help=f"NAME=VALUE, of {', '.join(CHANGEABLE)}.", metavar="NAME=VALUE")
    ],
    index: Index = DEFAULT_INDEX,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Change settings of an index that do not concern its content. A lower kv_budget takes effect at once.

    Comments in `ragkv.toml`, and the form of whatever does not change, stay.

    A new kv_budget also applies to processes that have the index open; they read other settings when they open it.

    Example: `ragkv config set kv_budget=200GB --index my-index`
    """
    from ragkv.index.create import change_settings

    changes: dict[str, Any] = {}
    for setting in settings:
        name, sign, value = (part.strip() for part in setting.partition("="))
        if sign and name not in CHANGEABLE and name in {f"prompt.{field.name}" for field in fields(PromptConfig)}:
            raise UsageError(
                f"{name} comes before the documents, whose KV depends on it: change it in {index / CONFIG_FILE} "
                "and ingest again, or give --system to a question."
            )
        if sign and name in VARIABLES and name not in (*CHANGEABLE, *USED):
            raise UsageError(
                f"{name} is what the index was built with, which config set does not change: ingest into another "
                f"--index with {FLAGS[name]} {value or 'VALUE'}."
            )
        by_hand = {field.name for field in fields(IndexConfig)} - {"prompt", "steps"}
        if sign and name not in CHANGEABLE and name.partition(".")[0] in by_hand:
            raise UsageError(f"config set does not change {name}: edit {index / CONFIG_FILE}.")
        if not sign:
            raise UsageError(f"{setting!r} is not NAME=VALUE, as in top_k=4; NAME is one of {', '.join(CHANGEABLE)}.")
        if name not in CHANGEABLE:
            option = f"--{name.replace('_', '-')}"
            meant = next((own for own in CHANGEABLE if FLAGS.get(own) == option or own == name.replace("-", "_")), None)
            raise UsageError(
                f"{name!r} is the setting {meant}: write {meant}={value or 'VALUE'}."
                if meant
                else f"There is no setting {name!r}; NAME in NAME=VALUE is one of {', '.join(CHANGEABLE)}."
            )
        if name in changes:
            raise UsageError(f"{name} is given twice; give it one value.")
        whole = re.fullmatch(r"[+-]?\d{1,40}", value, re.ASCII)
        changes[name] = int(value) if whole else {"true": True, "false": False}.get(value, value)
    dropped = change_settings(index, changes)
    if as_json:
        print_json({"index": str(index), "settings": changes, "evicted": dropped})
    elif not quiet:
        echo(f"{index}: {', '.join(f'{name} = {value}' for name, value in changes.items())}.")
        if dropped:
            echo(f"{count(dropped, 'KV record')} evicted for the smaller budget.")


def _by_source(ctx: typer.Context, settings: dict[str, Any], source: str) -> dict[str, Any]:
    """The values that came from this source of click's; a parameter is named like its option."""
    parameters = {name: FLAGS[name].removeprefix("--").replace("-", "_") for name in settings}
    return {name: value for name, value in settings.items() if source_of(ctx, parameters[name]) == source}


def _json(
    index: Path, user: UserFile, shown: list[ValueInForce], *, exists: bool, ignored: list[str]
) -> dict[str, Any]:
    return {
        "index": str(index),
        "index_exists": exists,
        "user_file": str(user.path),
        "user_file_exists": user.path.is_file(),
        "settings": [
            {
                "name": value.name,
                "value": str(value.value) if isinstance(value.value, Path) else value.value,
                "origin": value.origin,
                "where": value.where,
            }
            for value in shown
        ],
        "contradicted": {VARIABLES[name]: os.environ[VARIABLES[name]] for name in ignored},
    }


def _table(shown: list[ValueInForce]) -> None:
    table = plain()
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", no_wrap=True)
    for one in shown:
        named = f"{one.origin} {one.where}" if one.origin in ("flag", "environment") else one.origin
        table.add_row(one.name, shown_value(one.value), named, style="dim" if one.origin == "default" else None)
    draw(table)
