"""`ragkv config`: the value of every setting, and where it comes from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ragkv.cli.console import count, draw, echo, note, plain, print_json
from ragkv.cli.options import (
    CHANGEABLE,
    CHOSEN,
    DEFAULT_INDEX,
    FLAGS,
    USED,
    VARIABLES,
    Device,
    Index,
    Json,
    Quiet,
    Resident,
    ShownSettings,
    Threads,
    UserFile,
    contradicted,
    require_same,
    shared_options,
    shown_value,
    source_of,
    user_file,
)
from ragkv.config import CONFIG_FILE, IndexConfig, PromptConfig, byte_count, load_config
from ragkv.errors import UsageError
from ragkv.util.files import read_toml

app = typer.Typer(help="Show settings and where they come from, or change some.", no_args_is_help=True)


@app.command()
def path(as_json: Json = False, quiet: Quiet = False) -> None:
    """Print the path of your user file, which holds your own defaults.

    It is a TOML file with the keys of `ragkv.toml`, for new indexes, and with `index`, `device` and `threads`.

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
@shared_options
def show(
    ctx: typer.Context,
    *,
    index: Index = DEFAULT_INDEX,
    device: Device = None,
    threads: Threads = None,
    resident: Resident = None,
    settings: ShownSettings,
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

    typed = {"index": index, "device": device, "threads": threads, "resident": resident, **settings}
    flags, variables = (
        {name: value for name, value in typed.items() if source_of(ctx, name) == source}
        for source in ("COMMANDLINE", "ENVIRONMENT")
    )
    user = UserFile.read(user_file())
    toml = index / CONFIG_FILE
    config = load_config(index) if toml.exists() else None
    recorded = None
    if config is not None and not (contradicted(config, flags) and is_empty(index)):
        require_same(index, config, flags)
        check_names(config, toml)
        if "default_engine" in settings:
            require_engine(settings["default_engine"])
        recorded = toml
    else:  # `ragkv ingest` replaces an index that holds no documents
        kept = kept_settings(index) if toml.exists() else {}
        config = new_config({"model": default_model(()), **user.settings, **kept, **settings})
        check_names(config)
        check_encoders(config)
    rows = list(_in_force(flags, variables, user, config, recorded))
    if memory := os.environ.get(MEMORY_VARIABLE):
        if memory != "auto":
            byte_count(MEMORY_VARIABLE, memory)
        forced = {"value": memory, "origin": "environment", "where": MEMORY_VARIABLE}
        rows = [row | forced if row["name"] == "memory_budget" else row for row in rows]
    rows = [row for row in rows if row["origin"] != "default" or not changed]
    ignored = [] if recorded is None else contradicted(config, variables)
    if as_json:
        print_json(
            {
                "index": str(index),
                "index_exists": recorded is not None,
                "user_file": str(user.path),
                "user_file_exists": user.path.is_file(),
                "settings": rows,
                "contradicted": {VARIABLES[name]: os.environ[VARIABLES[name]] for name in ignored},
            }
        )
        return
    if not quiet:
        note(f"{index}: {'what it was built with' if recorded else 'there is no index; this is what a new one gets'}")
        note(f"{user.path}: " + ("read" if user.path.is_file() else "does not exist"))
    table = plain()
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", no_wrap=True)
    for row in rows:
        origin = row["origin"]
        named = f"{origin} {row['where']}" if origin in ("flag", "environment") else origin
        table.add_row(row["name"], shown_value(row["value"]), named, style="dim" if origin == "default" else None)
    draw(table)
    for name in ignored:
        note(f"{VARIABLES[name]}={os.environ[VARIABLES[name]]} contradicts the index; ragkv ingest refuses it")


def _in_force(
    flags: Mapping[str, Any], variables: Mapping[str, Any], user: UserFile, config: IndexConfig, toml: Path | None
) -> Iterator[dict[str, Any]]:
    """Every setting with its origin; `toml` is the index's file, if `config` is an index's and not a new one's.

    A variable overrides an index only in settings that a question may choose (`CHOSEN`).
    """
    in_index = {} if toml is None else dict(_flat(read_toml(toml)))
    in_file = dict(_flat(user.table))
    usual = {"index": str(DEFAULT_INDEX), "device": None, "threads": None, "resident": True}
    for name, value in (usual | dict(_flat({f.name: getattr(config, f.name) for f in fields(config)}))).items():
        origin, where = "default", ""
        if name in flags:
            value, origin, where = flags[name], "flag", FLAGS[name]
        elif name in variables and (toml is None or name in CHOSEN):
            value, origin, where = variables[name], "environment", VARIABLES[name]
        elif name in in_index:
            origin, where = "index", str(toml)
        elif name in in_file and (toml is None or name in USED):
            value, origin, where = in_file[name] if name in USED else value, "file", str(user.path)
        value = str(value) if isinstance(value, Path) else value
        yield {"name": name, "value": value, "origin": origin, "where": where}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted name; tables and dataclasses become their fields."""
    for key, value in values.items():
        inner = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, tuple(value) if isinstance(value, list) else value


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
        if not sign:
            raise UsageError(f"{setting!r} is not NAME=VALUE, as in top_k=4; NAME is one of {', '.join(CHANGEABLE)}.")
        if name not in CHANGEABLE:
            raise UsageError(_unchangeable(name, value or "VALUE", index))
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


def _unchangeable(name: str, value: str, index: Path) -> str:
    """What to do in place of `config set NAME=VALUE`."""
    if name in {f"prompt.{field.name}" for field in fields(PromptConfig)}:
        return (
            f"{name} comes before the documents, whose KV depends on it: change it in {index / CONFIG_FILE} and ingest "
            "again, or give --system to a question."
        )
    if name in VARIABLES and name not in USED:
        return (
            f"{name} is what the index was built with, which config set does not change: ingest into another --index "
            f"with {FLAGS[name]} {value}."
        )
    if name.partition(".")[0] in {field.name for field in fields(IndexConfig)} - {"prompt", "steps"}:
        return f"config set does not change {name}: edit {index / CONFIG_FILE}."
    option = f"--{name.replace('_', '-')}"
    for meant in CHANGEABLE:
        if FLAGS.get(meant) == option or meant == name.replace("-", "_"):
            return f"{name!r} is the setting {meant}: write {meant}={value}."
    return f"There is no setting {name!r}; NAME in NAME=VALUE is one of {', '.join(CHANGEABLE)}."
