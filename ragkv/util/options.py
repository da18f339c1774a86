"""`Option`: what every door (command line, HTTP, MCP, question files, docs) shows of a field of a dataclass.

A field is an option if it is annotated `Annotated[type, Option("…")]`. An option that is unset is None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from ragkv.errors import UsageError

UNSET: Any = None
"""The default of an option whose value comes from elsewhere, with a type that fits any field."""


@dataclass(frozen=True, slots=True)
class Option:
    """The meaning of a field, its bounds, and where it is shown."""

    help: str
    """One sentence that is true at every door."""
    unset: str = ""
    """Where the value of an unset option comes from."""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    panel: str = ""
    """The heading of the command line's help."""
    flag: str = ""
    """The command line's flag, if it is not the field's name."""
    setting: str = ""
    """The setting of `ragkv.toml` that it overrides; they share a flag and an environment variable."""
    metavar: str = ""
    in_file: bool = False
    """On the command line, the value is the path of a file that holds it."""
    is_json: bool = False
    """The value is a JSON object, or its text."""
    doors: frozenset[str] = frozenset(("query", "http"))
    """Commands, "http" (OpenAI's protocol included), "mcp", and "file" for the lines of a question file."""


class OptionField(NamedTuple):
    """A field with its option; `type` is the type of a value that is set."""

    name: str
    type: Any
    default: Any
    option: Option


def doors(*more: str) -> frozenset[str]:
    """`ragkv query`, HTTP, and more."""
    return frozenset(("query", "http", *more))


def options_of(owner: type[Any]) -> Mapping[str, OptionField]:
    """The fields of a dataclass that are options, in order."""
    return _options_of(owner)  # type: ignore[arg-type]  # mypy takes a dataclass's type for one without a hash


@cache
def _options_of(owner: Any) -> Mapping[str, OptionField]:
    hints = get_type_hints(owner, include_extras=True)
    found = {}
    for field in fields(owner):
        kind, *notes = get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else (None,)
        for option in notes:
            if isinstance(option, Option):
                found[field.name] = OptionField(field.name, kind, field.default, option)
    return found


def require_options(owner: Any) -> None:
    """UsageError for a value of another type, out of its bounds, or not among its choices."""
    for name, (_, kind, _, option) in options_of(type(owner)).items():
        value = getattr(owner, name)
        if value is not None and (wanted := _refusal(value, kind, option)):
            raise UsageError(f"--{name.replace('_', '-')} must be {wanted}, not {value!r}.", param=name)


def _refusal(value: Any, kind: Any, option: Option) -> str:
    """What the value must be; empty if it is."""
    if kind in _KINDS and (not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool)):
        return _KINDS[kind]
    if option.choices and value not in option.choices:
        return f"one of {', '.join(option.choices)}"
    if (option.least is not None and value < option.least) or (option.most is not None and value > option.most):
        return bounds(option)
    return ""


def bounds(option: Option) -> str:
    """The bounds as text: "at least 1" or "from 1 to 8"."""
    if option.most is None:
        return "" if option.least is None else f"at least {option.least:g}"
    return f"from {option.least:g} to {option.most:g}"


_KINDS = {int: "a whole number", str: "a text", bool: "true or false"}


def at_door(table: Mapping[str, OptionField], door: str) -> Iterator[OptionField]:
    """The options that a door shows."""
    return (each for each in table.values() if door in each.option.doors)
