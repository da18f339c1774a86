"""`Option`: what every door (command line, HTTP, MCP, question files, docs) shows of a field of a dataclass.

A field is an option if it is annotated `Annotated[type, Option("…")]`. An option that is unset is None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType
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
    least: int | None = None
    most: int | None = None
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

    @property
    def is_list(self) -> bool:
        """Whether it holds several texts."""
        return get_origin(self.type) is tuple

    def refusal(self, value: Any) -> str:
        """What a value must be that is of another type, out of the bounds, or not among the choices; else empty."""
        kind, option = self.type, self.option
        if kind in _KINDS and (not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool)):
            return _KINDS[kind]
        if option.choices and value not in option.choices:
            return f"one of {', '.join(option.choices)}"
        if option.least is not None and not option.least <= value <= (option.most or math.inf):
            return f"at least {option.least}" if option.most is None else f"from {option.least} to {option.most}"
        return ""

    def require(self, value: Any) -> None:
        """UsageError for a value that the option cannot have."""
        if wanted := self.refusal(value):
            raise UsageError(f"--{self.name.replace('_', '-')} must be {wanted}, not {value!r}.", param=self.name)


_KINDS: Mapping[Any, str] = {int: "a whole number", str: "a text", bool: "true or false"}


def doors(*more: str) -> frozenset[str]:
    """`ragkv query`, HTTP, and more."""
    return frozenset(("query", "http", *more))


def options_of(owner: type[Any]) -> Mapping[str, OptionField]:
    """The fields of a dataclass that are options, in order."""
    return _options_of(owner)  # type: ignore[arg-type]  # mypy takes a dataclass's type for one without a hash


@cache
def _options_of(owner: Any) -> Mapping[str, OptionField]:
    hints = get_type_hints(owner, include_extras=True)
    options = {}
    for field in fields(owner):
        kind, *notes = get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else (None,)
        for option in notes:
            if isinstance(option, Option):
                kinds = [each for each in get_args(kind) if each is not NoneType]
                kind = kinds[0] if len(kinds) == 1 else kind
                options[field.name] = OptionField(field.name, kind, field.default, option)
    return options


def require_options(owner: Any) -> None:
    """UsageError for an option whose value is none that it may have."""
    for name, field in options_of(type(owner)).items():
        if (value := getattr(owner, name)) is not None:
            field.require(value)


def at_door(table: Mapping[str, OptionField], door: str) -> Iterator[OptionField]:
    """The options that a door shows."""
    return (each for each in table.values() if door in each.option.doors)
