"""Read untrusted TOML within limits, and write or edit TOML so that it reads back the same.

The `ragkv.toml` of a foreign index may have gigabytes, be a pipe that never ends, or be nested so deeply that the
parser runs out of stack. Each of these is a `ConfigError` of one sentence.
"""

from __future__ import annotations

import datetime
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError

LONGEST = 1 << 20
"""The largest file, in bytes; a prompt with many examples takes some ten thousand."""
DEEPEST = 32
_DOTS = 1024
"""The most dots outside strings: the parser takes quadratic time in the dots of a dotted key."""
_STRINGS = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|' + r"'''.*?'''|" + r'"(?:[^"\\\n]|\\.)*"|' + r"'[^'\n]*'",
    re.DOTALL,
)
_DATES = (datetime.datetime, datetime.date, datetime.time)


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a file. FileNotFoundError when there is no file, ConfigError for anything else."""
    return parse_toml(read_text(path), source=str(path))


def read_text(path: Path) -> str:
    """The text of a TOML file, with its own line endings. Errors are those of `read_toml`."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would wait for ever
            raise ConfigError(f"{path} cannot be read: it is not a file.")
        with path.open("rb") as file:
            data = file.read(LONGEST + 1)
        text = data.decode("utf-8-sig")  # editors on Windows begin a file with a byte order mark
    except (FileNotFoundError, NotADirectoryError) as error:
        if isinstance(error, NotADirectoryError):
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: it is not UTF-8 text ({error.reason}).") from error
    if len(data) > LONGEST:
        raise ConfigError(f"{path} cannot be read: it is larger than {LONGEST >> 20} MiB, which no configuration is.")
    return text


def parse_toml(text: str, *, source: str) -> dict[str, Any]:
    """The table in a TOML text. ConfigError, which names `source`, for invalid TOML or too deep nesting."""
    too_deep = ConfigError(f"{source} is nested too deeply; write it with fewer tables in tables.")
    if _STRINGS.sub("", text).count(".") > _DOTS:
        raise too_deep
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:  # the parser's own error is one; a number of thousands of digits raises another
        raise ConfigError(f"{source} is not valid TOML: {error}.") from error
    level: list[Any] = [found]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return found
    raise too_deep


def dump_toml(table: Mapping[str, Any]) -> str:
    """The TOML text of a table. `parse_toml` reads the same table from it, with lists for tuples."""
    import tomli_w

    return tomli_w.dumps(table)


def edit_toml(text: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Change in `text` each value that differs between two tables: it gets the value of `after`, or is removed.

    Comments, order and form of everything else stay, also of keys that the tables do not have. The caller must parse
    the result to check it. `ValueError` if the text cannot be edited.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        document = tomlkit.parse(text)
        _edit(document, before, after)
        return tomlkit.dumps(document)
    except (TOMLKitError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error  # tomlkit does not support all of TOML


def _edit(there: Any, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    import tomlkit

    for key in before.keys() - after.keys():
        there.pop(key, None)
    for key, value in after.items():
        was = before.get(key)
        if key in before and dump_toml({key: was}) == dump_toml({key: value}):  # 1 is not true, and NaN is NaN
            continue
        if isinstance(was, Mapping) and isinstance(value, Mapping):
            if key not in there:
                there[key] = tomlkit.table()
            _edit(there[key], was, value)
        else:
            there[key] = value


def plain(name: str, value: Any) -> Any:
    """A value as TOML would read it back: with lists for tuples and dicts for mappings.

    ConfigError names a value that TOML cannot store: None, a text with lone surrogates (as in a file name that is not
    UTF-8), or an integer of more than 64 bits.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{name} = {shortened(value)} is not valid Unicode text, so it cannot be kept; give it another name."
            ) from None
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise ConfigError(f"{name} is a number of more than 64 bits; give a smaller one.")
    elif isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{name} has the key {shortened(key)}; name its values by strings.")
            plain(f"a key of {name}", key)
        return {key: plain(f"{name}.{key}", inner) for key, inner in value.items()}
    elif isinstance(value, (list, tuple)):
        return [plain(name, inner) for inner in value]
    elif not isinstance(value, (float, *_DATES)):
        raise ConfigError(
            f"{name} = {shortened(value)} cannot be kept; give a text, a number, true or false, a list or a table."
        )
    return value


def shortened(value: object) -> str:
    """A value's repr, shortened to fit into a sentence."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:79]}…"


def _inside(value: Any) -> list[Any]:
    """The tables and lists that are directly within a table or a list."""
    inner = value.values() if isinstance(value, dict) else value
    return [one for one in inner if isinstance(one, (dict, list))]
