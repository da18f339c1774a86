"""JSON and JSON Lines: every record a row, its text or else its fields, cited by its number and id.

The number is that of its line or, in a list, its place, from 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ragkv.ingest.limit import check_text
from ragkv.ingest.parser import Parsed, Unreadable, join_rows
from ragkv.ingest.plain import clean, decode

__all__ = ["fields_text", "place", "read_json", "read_jsonl"]

_TEXTS = ("text", "content", "contents", "body", "passage", "page_content")
_TITLES = ("title", "headline")
_IDS = ("id", "_id", "doc_id", "docid", "document_id", "passage_id", "pid", "uid")
_MEANINGS = {"text": _TEXTS, "title": _TITLES, "id": _IDS}
_VECTOR = 16  # a longer list of nothing but numbers is an embedding, and no text


def read_json(data: bytes) -> Parsed:
    """Rows of a list of records, or of the one list of them in an object; an object with a text is itself a row.

    Any other document is refused: a program's settings are not meant to be read.
    """
    text = decode(data).removeprefix("\ufeff")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        return _parsed(*_lines(text, error))
    if isinstance(whole, dict) and _first(whole, _TEXTS) is None:
        lists = [v for v in whole.values() if isinstance(v, list) and v and all(isinstance(r, dict) for r in v)]
        whole = lists[0] if len(lists) == 1 else None
    if not isinstance(whole, dict | list):
        raise Unreadable('no rows found: JSON wants a list of objects, or an object with a "text"')
    return _parsed(list(enumerate(whole if isinstance(whole, list) else [whole], start=1)), [])


def read_jsonl(data: bytes) -> Parsed:
    """Rows of lines that are each a record; lines that are no JSON are left out and named."""
    text = decode(data).removeprefix("\ufeff")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _parsed(*_lines(text, error))
    return _parsed(list(enumerate(whole if isinstance(whole, list) else [whole], start=1)), [])


def _parsed(records: Sequence[tuple[int, Any]], left_out: list[str]) -> Parsed:
    rows = []
    for number, record in records:
        try:
            rows.append(_row(number, record))
        except RecursionError:
            left_out.append(f"row {number}: nested too deeply")
    text, sections = join_rows(rows)
    return Parsed(text=text, sections=sections, left_out=left_out)


def _lines(text: str, whole: Exception) -> tuple[list[tuple[int, Any]], list[str]]:
    """The records and what is wrong with the other lines; of more wrong lines than records, nothing is kept."""
    records: list[tuple[int, Any]] = []
    left_out: list[str] = []
    opens = False  # whether the first line is a record: then these are lines, else a document that broke
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
    """(place, text): the text field under its title and what else is said of it, or else all of the fields."""
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
    """What a citation says of a row: "row 17", or "row 17 (id 4711)" where it has one."""
    words = " ".join(clean(str(name)).split()) if name is not None else ""
    return f"row {number} (id {words[:80]})" if words else f"row {number}"


def _first(record: dict[str, Any], names: Sequence[str]) -> str | None:
    """The key of the first of these fields that holds words (or, as an id may, a whole number), whatever its case."""
    keys = {key.lower(): key for key in reversed(record)}
    for key in (keys[name] for name in names if name in keys):
        value = record[key]
        if isinstance(value, str) and value.strip():
            return key
        if names is _IDS and isinstance(value, int) and not isinstance(value, bool):
            return key
    return None


def fields_text(fields: Iterator[tuple[str, str]]) -> str:
    """Lines of "name: value"; what has no value is not said."""
    lines: list[str] = []
    size = 0
    for name, value in fields:
        if value.strip():
            lines.append(f"{name}: {value}" if name else value)
            size += len(lines[-1]) + 1
            check_text(size)  # names are repeated, those of what is nested again for all that is in it
    return clean("\n".join(lines))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(path, value) of every scalar: `{"a": {"b": 1}}` is `a.b: 1`; a list of scalars is one value."""
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
