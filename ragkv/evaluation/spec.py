"""Names with options, `pced(gamma=0, beta=shared)`: how an engine or a task is written on a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ragkv.errors import UsageError

__all__ = ["Spec", "parse_specs"]

_SPEC = re.compile(r"([\w./@-]+)\s*(?:\((.*)\))?", re.DOTALL)
_OPTION = re.compile(r"([A-Za-z_][\w.]*)\s*=\s*(.+)", re.DOTALL)


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

    A value is a number, true, false, or a text, which needs double quotes unless it consists of letters, digits, dots
    and dashes. Raises UsageError, which quotes what cannot be read.
    """
    found: list[Spec] = []
    for part in _split(text):
        spec = _parse(part)
        if spec not in found:
            found.append(spec)
    if not found:
        raise UsageError(f"{text!r} names nothing; write a list such as full,pced(gamma=2.5).")
    return found


def _parse(text: str) -> Spec:
    matched = _SPEC.fullmatch(text)
    if matched is None:
        raise UsageError(f"{text!r} is not a name with options; write it as pced(gamma=2.5, beta=0).")
    options: dict[str, Any] = {}
    for part in _split(matched[2] or ""):
        option = _OPTION.fullmatch(part)
        if option is None or option[1] in options:
            raise UsageError(f"{part!r} in {text!r} is not one option; write options as name=value, each once.")
        options[option[1]] = _value(option[2], text)
    return Spec(matched[1], options)


def _split(text: str) -> Iterator[str]:
    """The parts between commas outside parentheses and quotes."""
    depth, quoted, escaped, part = 0, False, False, ""
    for char in text:
        if escaped:
            escaped = False
        elif quoted and char == "\\":
            escaped = True
        elif char == '"':
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(char, 0)
            if depth < 0:
                break
            if char == "," and not depth:
                if part.strip():
                    yield part.strip()
                part = ""
                continue
        part += char
    if depth or quoted:
        raise UsageError(f"{text!r} has an unmatched parenthesis or quote; add or remove one.")
    if part.strip():
        yield part.strip()


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
        bare = re.fullmatch(r"[A-Za-z_][\w.-]*", value) and _value(value, value) == value
        return value if bare else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)
