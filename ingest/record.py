"""JSON and JSON Lines: every record is a row with its text, or its fields, and is cited by its number and id.

The number is that of its line or, in a list, its place, counted from 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ragkv.ingest.limit import check_text
from ragkv.ingest.parser import Parsed, Unreadable, join_rows
from ragkv.ingest.plain import clean, decode

__all__ = ["fields_text", "place", "read_json", "read_jsonl"]

_TEXTS = ("text", "content", "contents", "body", "passage", "page_content")
_TITLES = ("title", "headline")
_IDS = ("id", "_id", "doc_id", "docid", "document_id", "passage_id", "pid", "uid")
_MEANINGS = {"text": _TEXTS, "title": _TITLES, "id": _IDS}
_VECTOR = 16  # a longer list of numbers is taken for an embedding and left out


def read_json(data: bytes) -> Parsed:
    """The rows of a list of records, or of an object that holds exactly one such list, or an object with a text.

    Any other document is refused, because a program's settings are not meant to be read.
    """
    return _read(data, _records)


def read_jsonl(data: bytes) -> Parsed:
    """The rows of a file with one record per line; lines that are not JSON are left out and named."""
    return _read(data, lambda whole: whole if isinstance(whole, list) else [whole])


def _records(whole: Any) -> list[Any]:
    """The records of a JSON document; raises `Unreadable` if it is something else."""
    if isinstance(whole, dict) and _first(whole, _TEXTS) is None:
        lists = [v for v in whole.values() if isinstance(v, list) and v and all(isinstance(r, dict) for r in v)]
        whole = lists[0] if len(lists) == 1 else None
    if not isinstance(whole, dict | list):
        raise Unreadable('no rows found: JSON wants a list of objects, or an object with a "text"')
    return whole if isinstance(whole, list) else [whole]


def _read(data: bytes, records_of: Callable[[Any], list[Any]]) -> Parsed:
    """Parse one JSON document, or else JSON lines: files of either kind are named `.json` and `.jsonl`."""
    text = decode(data).removeprefix("\ufeff")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        records, left_out = _lines(text, error)
    else:
        records, left_out = list(enumerate(records_of(whole), start=1)), []
    rows = []
    for number, record in records:
        try:
            rows.append(_row(number, record))
        except RecursionError:
            left_out.append(f"row {number}: nested too deeply")
    text, sections = join_rows(rows)
    return Parsed(text=text, sections=sections, left_out=left_out)


def _lines(text: str, whole: Exception) -> tuple[list[tuple[int, Any]], list[str]]:
    """The records, and what is wrong with the other lines; `Unreadable` if more lines are wrong than right."""
    records: list[tuple[int, Any]] = []
    left_out: list[str] = []
    opens = False  # whether the first line is a record; if not, the file is one damaged document rather than lines
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: a string may hold U+2028
        if not line.strip():
            continue
        try:
            records.append((number, json.loads(line)))
            opens = opens or not left_out
        except (ValueError, RecursionError) as error:
            left_out.append(f"line {number}: no JSON ({_sentence(error)})")
    if len(left_out) > len(records):
        count = f", and so {len(left_out)} of {len(left_out) + len(records)} lines"
        raise Unreadable(f"JSON cannot be read: {left_out[0] + count if opens else _sentence(whole, line=True)}")
    return records, left_out


def _sentence(error: Exception, *, line: bool = False) -> str:
    if isinstance(error, json.JSONDecodeError):
        where = f"line {error.lineno}, column {error.colno}" if line else f"column {error.colno}"
        return f"{error.msg[:1].lower()}{error.msg[1:]} at {where}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number too long"


def _row(number: int, record: Any) -> tuple[str, str]:
    """(place, text) of a record: its title, its other fields and its text, or all fields if it has no text."""
    if isinstance(record, str):
        return f"row {number}", clean(record)
    if not isinstance(record, dict):
        return f"row {number}", fields_text(_flat(record))
    used = {kind: _first(record, names) for kind, names in _MEANINGS.items()}
    text, title, name = (record[key] if key is not None else None for key in used.values())
    if text is None:
        return place(number, name), fields_text(_flat(record))
    rest = {key: value for key, value in record.items() if key not in used.values()}
    said = ["" if title is None else clean(title), fields_text(_flat(rest)), clean(text)]
    return place(number, name), "\n\n".join(part.strip() for part in said if part.strip())


def place(number: int, name: Any) -> str:
    """The place of a row in a citation: "row 17", or "row 17 (id 4711)" if it has an id."""
    words = " ".join(clean(str(name)).split()) if name is not None else ""
    return f"row {number} (id {words[:80]})" if words else f"row {number}"


def _first(record: dict[str, Any], names: Sequence[str]) -> str | None:
    """The record's key for the first of these fields that holds text, in any case; an id may be a whole number."""
    keys = {key.lower(): key for key in reversed(record)}
    for key in (keys[name] for name in names if name in keys):
        value = record[key]
        if isinstance(value, str) and value.strip():
            return key
        if names is _IDS and isinstance(value, int) and not isinstance(value, bool):
            return key
    return None


def fields_text(fields: Iterator[tuple[str, str]]) -> str:
    """Lines of "name: value"; fields without a value are left out."""
    lines: list[str] = []
    size = 0
    for name, value in fields:
        if value.strip():
            lines.append(f"{name}: {value}" if name else value)
            size += len(lines[-1]) + 1
            check_text(size)  # nested names are repeated on every line, so the text may be longer than the file
    return clean("\n".join(lines))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(path, value) of every scalar: `{"a": {"b": 1}}` gives `a.b: 1`; a list of scalars is one value."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _flat(below, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        if not any(isinstance(item, dict | list) for item in value):
            numbers = all(isinstance(item, int | float) for item in value)
            if not (numbers and len(value) > _VECTOR):
                yield name, ", ".join(word for item in value if (word := _word(item)))
            return
        for number, below in enumerate(value, start=1):
            yield from _flat(below, f"{name}.{number}" if name else str(number))
    else:
        yield name, _word(value)


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    return "" if value is None else json.dumps(value)
