"""A spec is a name with options, as a user writes it: `pced(gamma=0, beta=shared)`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ragkv.errors import UsageError

_QUOTED = r'"(?:[^"\\]|\\.)*"'
_SPEC = re.compile(rf"\s*([\w./@-]+)\s*(?:\(((?:{_QUOTED}|[^()\"])*)\))?\s*(?:,|$)|\s*,", re.DOTALL)
_OPTION = re.compile(rf"\s*([A-Za-z_][\w.]*)\s*=\s*({_QUOTED}|[^\s,\"][^,\"]*?)\s*(?:,|$)|\s*(?:,|$)", re.DOTALL)
_BARE = re.compile(r"[A-Za-z_][\w.-]*")


@dataclass(frozen=True, slots=True)
class Spec:
    """A name with options. `str` returns the form in which a user writes it."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}({', '.join(f'{key}={_shown(value)}' for key, value in self.options.items())})"


def parse_specs(text: str) -> list[Spec]:
    """ "full, pced(gamma=0, beta=shared)" to specs, in order and without repetition.

    A value is a number, true, false, or a text, which needs double quotes around commas, parentheses and quotes. Raises
    UsageError, which quotes what cannot be read.
    """
    specs: list[Spec] = []
    for matched in _matches(_SPEC, text, "a list of names with options, such as full,pced(gamma=2.5)"):
        options: dict[str, Any] = {}
        for option in _matches(_OPTION, matched[2] or "", f"options as name=value in {text!r}"):
            if option[1] in options:
                raise UsageError(f"{option[1]!r} in {text!r} is given twice; write each option once.")
            options[option[1]] = _value(option[2], text)
        if (spec := Spec(matched[1], options)) not in specs:
            specs.append(spec)
    if not specs:
        raise UsageError(f"{text!r} names nothing; write a list such as full,pced(gamma=2.5).")
    return specs


def _matches(pattern: re.Pattern[str], text: str, form: str) -> list[re.Match[str]]:
    """The matches that follow one another to the end of the text, without empty parts."""
    matches, start = [], 0
    while start < len(text.rstrip()):
        if (matched := pattern.match(text, start)) is None:
            raise UsageError(f"{text!r} cannot be read from {text[start:].strip()!r} on; write {form}.")
        start = matched.end()
        matches += [matched] if matched[1] else []
    return matches


def _value(text: str, spec: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text.startswith('"'):
        try:
            return json.loads(text, strict=False)
        except ValueError:
            raise UsageError(f'{text} in {spec!r} is not a text in quotes; write one as "\\n".') from None
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return (
            value if _BARE.fullmatch(value) and _value(value, value) == value else json.dumps(value, ensure_ascii=False)
        )
    return json.dumps(value)
