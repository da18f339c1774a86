"""CSV and TSV: every row a section of "column: value" lines, so that a row means something on its own."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from ragkv.ingest.parser import LIBRARY_LOCK, Parsed, Unreadable, join_rows
from ragkv.ingest.plain import decode
from ragkv.ingest.record import fields_text, place

__all__ = ["read_csv", "read_tsv", "sniff_delimiter"]

_DELIMITERS = "\t;|,"  # of equal ones the first: values hold commas more often than the others
_SAMPLE = 200  # rows that decide about delimiter and header
_NUMBER = re.compile(r"[-+]?[\d.,\s]*\d\s*%?|[-+]?\d+(\.\d*)?[eE][-+]?\d+|\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}.*")
_YEAR = re.compile(r"1[5-9]\d\d|2[01]\d\d")


def read_csv(data: bytes) -> Parsed:
    """Rows of whatever delimiter the file has; the number of a row is the one that a spreadsheet shows."""
    text = decode(data).removeprefix("\ufeff")
    first, _, rest = text.partition("\n")
    if (mark := re.fullmatch(r"sep=(.)", first.strip(" \r"))) is not None:  # Excel's way to say it
        return _read(rest, mark[1], above=1)
    return _read(text, sniff_delimiter(text) or ",")


def read_tsv(data: bytes) -> Parsed:
    """As `read_csv`, with tabs where there are any."""
    text = decode(data)
    return _read(text, "\t" if "\t" in text else sniff_delimiter(text) or "\t")


def sniff_delimiter(text: str) -> str | None:
    """The delimiter that cuts the first rows into equally many fields, the more the better; None: it is no table.

    csv.Sniffer takes letters for delimiters, and a semicolon table with decimal commas for one with commas.
    """
    best, found = 0.0, None
    for delimiter in _DELIMITERS:
        rows = [row for row in islice(_rows(text[: 1 << 20], delimiter), _SAMPLE) if row]
        widths = Counter(map(len, rows))
        if not widths:
            continue
        width, alike = widths.most_common(1)[0]
        score = (alike / len(rows)) ** 2 * min(width - 1, 8) ** 0.5
        if width > 1 and score > best:
            best, found = score, delimiter
    return found


def _read(text: str, delimiter: str, *, above: int = 0) -> Parsed:
    """`above`: lines before the first row."""
    rows = [
        (number, [" ".join(field.split()) if len(field) < 200 else field.strip() for field in row])
        for number, row in enumerate(_rows(text, delimiter), start=1 + above)
        if any(field.strip() for field in row)
    ]
    if not rows:
        raise Unreadable("no text found")
    names: list[str] = []
    if _is_header([row for _, row in rows[: _SAMPLE + 1]]):
        names, rows = rows[0][1], rows[1:]
    key = next((i for i, name in enumerate(names) if name.lower() in ("id", "_id", "key")), None)
    body, sections = join_rows(
        (place(number, row[key] if key is not None and key < len(row) else None), fields_text(_named(names, row)))
        for number, row in rows
    )
    return Parsed(text=body, sections=sections)


def _named(names: Sequence[str], row: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(column, value); without names the values on one line, as "column 3" says nothing to anybody."""
    if not names:
        yield "", " | ".join(field for field in row if field)
        return
    for i, field in enumerate(row):
        yield (names[i] if i < len(names) else ""), field


def _is_header(rows: Sequence[Sequence[str]]) -> bool:
    """Most tables have one, so what is asked is what speaks against it: a number, or a name that is a value too.

    Years do not, where there are several (a column for each), nor does one name that is empty (a frame's index).
    """
    first = rows[0]
    named = [field for field in first if field]
    if 2 * len(named) < len(first) or any(len(field) > 100 for field in named):
        return False
    numbers = [field for field in named if _NUMBER.fullmatch(field)]
    if numbers and not (len(numbers) > 1 and len(numbers) < len(named) and all(map(_YEAR.fullmatch, numbers))):
        return False
    if len(rows) == 1:
        return False
    # By rows: a table may have millions of columns, and rows much shorter than its first.
    return not any(field and field == name for row in rows[1:] for field, name in zip(row, first, strict=False))


def _rows(text: str, delimiter: str) -> list[list[str]]:
    """Rows, empty ones too, with fields of any size. Where quotes are not in pairs they are inches, not quotes."""
    lines = [f"{line}\n" for line in text.split("\n")]
    with LIBRARY_LOCK:  # the limit is the whole process's
        limit = csv.field_size_limit(len(text) + 2)
        try:
            return list(csv.reader(lines, delimiter=delimiter, strict=True))
        except csv.Error:
            quoted = list(csv.reader(lines, delimiter=delimiter))
            literal = list(csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE))
            return max(quoted, literal, key=_alike)
        finally:
            csv.field_size_limit(limit)


def _alike(rows: Sequence[Sequence[str]]) -> tuple[float, int]:
    """Which share of the rows has as many fields as most have; and, of two ways with the same, the rows."""
    widths = Counter(len(row) for row in rows if row)
    return max(widths.values(), default=0) / max(1, widths.total()), len(rows)
