"""Where a setting's value comes from: flag > environment > index > user file > default.

What an index was built with is in its `ragkv.toml` and cannot be overruled. `ragkv ingest` refuses a flag or variable
that contradicts it; a question may choose only the settings in `CHOSEN`. The user file holds defaults for new indexes,
and the index and device to use if nothing else names them. Only the command line reads variables and the user file;
`RagKV` takes what it is given.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Self

from ragkv.boundary.toml import read_toml, shortened
from ragkv.config import MODELS, IndexConfig, build_config
from ragkv.errors import ConfigError, KVMismatchError
from ragkv.model.checkpoint import lasting

__all__ = [
    "CHANGEABLE",
    "CHOSEN",
    "FLAGS",
    "USED",
    "VARIABLES",
    "Origin",
    "Setting",
    "UserFile",
    "contradicted",
    "flatten",
    "in_force",
    "require_same",
    "shown_value",
    "user_file",
]

Origin = Literal["flag", "environment", "index", "file", "default"]

USED = ("index", "device")
"""What the user file may set besides the fields of `IndexConfig`: these belong to the person, not to an index."""

VARIABLES: Mapping[str, str] = {
    "index": "RAGKV_INDEX",
    "device": "RAGKV_DEVICE",
    "model": "RAGKV_MODEL",
    "dtype": "RAGKV_DTYPE",
    "engines": "RAGKV_ENGINES",
    "chunk_tokens": "RAGKV_CHUNK_TOKENS",
    "codec": "RAGKV_CODEC",
    "embedder": "RAGKV_EMBEDDER",
    "reranker": "RAGKV_RERANKER",
    "default_engine": "RAGKV_ENGINE",
    "top_k": "RAGKV_TOP_K",
}
"""Environment variable of each setting that has one."""

FLAGS: Mapping[str, str] = {
    **{name: "--" + variable.removeprefix("RAGKV_").lower().replace("_", "-") for name, variable in VARIABLES.items()},
    "tuning": "--block-tokens",
}
"""The option of each, named as its variable."""

CHANGEABLE = ("kv", "kv_budget", "memory_budget", "default_engine", "top_k")
"""The settings of an index that decide nothing about what is in it already: `ragkv config set` changes them."""

CHOSEN = (*USED, "default_engine", "top_k")
"""The settings that a question may choose, whatever the index says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value in force and where it comes from; `where` names the flag, the variable or the file."""

    name: str
    value: Any
    origin: Origin
    where: str = ""


def contradicted(config: IndexConfig, given: Mapping[str, Any]) -> list[str]:
    """Which of the given settings differ from what the index was made with; a question may choose the others."""
    return [
        name for name, value in given.items() if name not in CHOSEN and not _same(name, getattr(config, name), value)
    ]


def _same(name: str, kept: Any, given: Any) -> bool:
    """Whether a setting has the value already; a model's folder may be named from anywhere."""
    if name in MODELS and isinstance(kept, str) and isinstance(given, str):
        return lasting(kept) == lasting(given)
    return bool(kept == given)


def require_same(folder: Path, config: IndexConfig, given: Mapping[str, Any]) -> None:
    """KVMismatchError for the first of the given settings that contradicts the index."""
    for name in contradicted(config, given):
        variable, flag = VARIABLES.get(name, ""), FLAGS.get(name, f"--{name}")
        flag = flag.replace("_", "-")
        remedy = f"leave {flag} out" + (f" and {variable} unset" if variable in os.environ else "")
        if name in CHANGEABLE:
            value, at = shlex.quote(str(given[name])), shlex.quote(str(folder))
            remedy += f", or change it with: ragkv config set {name}={value} --index {at}"
        raise KVMismatchError(
            f"The index at {folder} was made with {name} = {shown_value(getattr(config, name))}, "
            f"not {shown_value(given[name])}; use another --index, or {remedy}."
        )


def shown_value(value: object) -> str:
    """A setting's value in a message or a table."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if value is None:
        return "unset"
    return repr(value) if isinstance(value, str) and (not value or "\n" in value) else str(value)


def user_file() -> Path:
    """Where the user file is, or would be: `$XDG_CONFIG_HOME/ragkv/config.toml`, else `~/.config/ragkv/config.toml`."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    # the XDG specification says to ignore a relative path
    return (base if base.is_absolute() else Path.home() / ".config") / "ragkv" / "config.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFile:
    """A user file: `table` as it is written, and `settings`, the checked fields of `IndexConfig` in it."""

    path: Path
    table: Mapping[str, Any]
    settings: Mapping[str, Any]

    def used(self, name: str) -> str | None:
        """The file's `index` or `device`, if it has one."""
        return self.table.get(name)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The file at `path`, or nothing when there is none. ConfigError says what is wrong in it."""
        found = read_toml(path) if path.exists() else {}
        known = {*USED, *(f.name for f in fields(IndexConfig))}
        for key, value in found.items():
            if key not in known:
                raise ConfigError(f"{path}: unknown key {key!r}; remove it, or use one of {', '.join(sorted(known))}.")
            if key in USED and not (isinstance(value, str) and value.strip()):
                raise ConfigError(f"{path}: {key} = {shortened(value)} must be a string that is not empty.")
        settings = {key: value for key, value in found.items() if key not in USED}
        try:  # some settings need an embedder to be valid; which one it will be is not known yet, so name any
            checked = build_config(IndexConfig, {"embedder": "mini"} | settings, str(path))
        except ConfigError as error:
            raise ConfigError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
        return cls(path=path, table=found, settings={key: getattr(checked, key) for key in settings})


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted name; tables and dataclasses become their fields."""
    for key, value in values.items():
        inner = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        if isinstance(inner, Mapping):
            yield from flatten(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, tuple(value) if isinstance(value, list) else value


def in_force(
    *,
    flags: Mapping[str, Any],
    variables: Mapping[str, Any],
    user: UserFile,
    config: IndexConfig,
    used: Mapping[str, Any],
    index: tuple[Path, Mapping[str, Any]] | None,
) -> list[Setting]:
    """Every setting with its origin.

    `flags` and `variables` are the given values by name. `index` is the path and the table of a `ragkv.toml`, and
    `config` its configuration; without an index, `config` is that of a new one. `used` holds the defaults of `USED`.
    A variable overrules an index only in what a question may choose (`CHOSEN`).
    """
    path, written = index or (Path(), {})
    in_index, in_file = dict(flatten(written)), dict(flatten(user.table))
    whole = {**used, **dict(flatten({f.name: getattr(config, f.name) for f in fields(config)}))}
    found = []
    for name, value in whole.items():
        if name in flags:
            found.append(Setting(name=name, value=flags[name], origin="flag", where=FLAGS[name]))
        elif name in variables and (index is None or name in CHOSEN):
            found.append(Setting(name=name, value=variables[name], origin="environment", where=VARIABLES[name]))
        elif name in in_index:
            found.append(Setting(name=name, value=value, origin="index", where=str(path)))
        elif name in in_file and (index is None or name in USED):
            value = in_file[name] if name in USED else value
            found.append(Setting(name=name, value=value, origin="file", where=str(user.path)))
        else:
            found.append(Setting(name=name, value=value, origin="default"))
    return found
