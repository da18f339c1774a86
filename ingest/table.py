"""CSV and TSV: every row becomes a section of "column: value" lines, so that it means something on its own."""

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

_DELIMITERS = "\t;|,"  # in a tie the first wins: values hold commas more often than the other delimiters
_SAMPLE = 200  # rows from which delimiter and header are guessed
_NUMBER = re.compile(r"[-+]?[\d.,\s]*\d\s*%?|[-+]?\d+(\.\d*)?[eE][-+]?\d+|\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}.*")
_YEAR = re.compile(r"1[5-9]\d\d|2[01]\d\d")


def read_csv(data: bytes) -> Parsed:
    """Read rows with any delimiter. The number of a row is the one that a spreadsheet shows."""
    text = decode(data).removeprefix("\ufeff")
    first, _, rest = text.partition("\n")
    if (mark := re.fullmatch(r"sep=(.)", first.strip(" \r"))) is not None:  # Excel's way to name the delimiter
        return _read(rest, mark[1], above=1)
    return _read(text, sniff_delimiter(text) or ",")


def read_tsv(data: bytes) -> Parsed:
    """Like `read_csv`, with tabs as the delimiter if there are any."""
    text = decode(data)
    return _read(text, "\t" if "\t" in text else sniff_delimiter(text) or "\t")


def sniff_delimiter(text: str) -> str | None:
    """The delimiter that cuts most of the first rows into the same number of fields, the more the better.

    None if the text is not a table. `csv.Sniffer` is not used: it takes letters for delimiters, and in a table with
    semicolons and decimal commas it chooses the commas.
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
    """Read rows with a known delimiter; `above` is the number of lines before the first row."""
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
    """(column, value) pairs. Without column names, all values on one line: "column 3" would tell nobody anything."""
    if not names:
        yield "", " | ".join(field for field in row if field)
        return
    for i, field in enumerate(row):
        yield (names[i] if i < len(names) else ""), field


def _is_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row is a header. Most tables have one, so look for what speaks against it.

    A number speaks against it, and a name that is also a value of its column. Several years do not (a column for each
    year), nor does an empty name (the index of a data frame).
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
    # Row by row and not column by column: a table may have millions of columns and rows much shorter than its first.
    return not any(field and field == name for row in rows[1:] for field, name in zip(row, first, strict=False))


def _rows(text: str, delimiter: str) -> list[list[str]]:
    """All rows, empty ones too, with fields of any size. Quotes that are not in pairs are ordinary text (inches)."""
    lines = [f"{line}\n" for line in text.split("\n")]
    with LIBRARY_LOCK:  # the limit belongs to the whole process
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
    """Sort key of two ways to read rows: the share of rows with the most common width, then the number of rows."""
    widths = Counter(len(row) for row in rows if row)
    return max(widths.values(), default=0) / max(1, widths.total()), len(rows)
