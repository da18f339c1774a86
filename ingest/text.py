"""Files of text: plain text, Markdown, CSV, TSV, JSON and JSON Lines.

Markdown is kept unchanged, and its headings name the sections. Each row
of a table or record of JSON becomes a section that can be understood alone: lines of "column: value", or the record's
text or its fields, cited by its id and number (its line, or its place in a list, counted from 1).
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from ragkv.ingest.charset import clean, decode
from ragkv.ingest.parser import LIBRARY_LOCK, Parsed, Unreadable, check_text, join_rows, sections_under


def read_plain(data: bytes) -> Parsed:
    """The unchanged text as one section."""
    return Parsed(text=decode(data))


_FRONT_MATTER = re.compile(
    r"\A(---|\+\+\+)[ \t]*\n(?=\s*[\w-]+[ \t]*[:=])(.*?\n)(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL
)
_MAX_FRONT_MATTER = 1 << 12  # characters
_TITLE = re.compile(r"^title[ \t]*[:=](.+)$", re.MULTILINE | re.IGNORECASE)
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})(.*)")
_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t](.*))?$")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")


def read_markdown(data: bytes) -> Parsed:
    """Decode bytes in any encoding and parse them as Markdown."""
    return parse_markdown(decode(data))


def parse_markdown(text: str, is_heading: Callable[[str], bool] = lambda _: True) -> Parsed:
    """A section per heading, named by its path. The title is that of the front matter, else the first top heading."""
    title = None
    if front := _FRONT_MATTER.match(text):
        text = text[front.end() :]
        title = _front_title(front[1], front[2])
    headings = [heading for heading in _headings(text) if is_heading(heading[2])]
    title = title or next((name for _, level, name in headings if level == 1 and name), None)
    return Parsed(text=text, sections=sections_under(text, headings), title=title)


def _front_title(mark: str, fields: str) -> str | None:
    """The title that YAML or TOML give, also over several lines; or what follows "title:" if it is neither."""
    import tomllib

    import yaml

    try:
        if len(fields) > _MAX_FRONT_MATTER:
            raise ValueError  # its parser is slow
        values = tomllib.loads(fields) if mark == "+++" else yaml.load(fields, yaml.BaseLoader)
        title = next((value for key, value in values.items() if key.lower() == "title"), None)
        if isinstance(title, str):
            return " ".join(title.split()) or None
    except (ValueError, AttributeError, RecursionError, yaml.YAMLError):  # a colon in the title, or a template
        pass
    simple = _TITLE.search(fields)
    return (simple[1].strip(" \t").strip("\"'") or None) if simple else None


def _headings(text: str) -> Iterator[tuple[int, int, str]]:
    """(offset of its first line, level, words) of every heading outside fenced code and comments."""
    fence = ""
    comment = False
    paragraph = 0  # lines of the current paragraph; one line with an underline below it is a heading
    position = previous = 0
    words = ""
    for line in text.splitlines(keepends=True):
        bare = line.rstrip("\n")
        mark = _FENCE.match(bare)
        if comment or (not fence and bare.lstrip().startswith("<!--")):
            comment = "-->" not in bare
            paragraph = 0
        elif mark and (fence or mark[1][0] == "~" or "`" not in mark[2]):  # else code in a line
            if not fence:
                fence = mark[1]
            elif mark[1].startswith(fence) and not mark[2].strip():
                fence = ""
            paragraph = 0
        elif not fence:
            if atx := _ATX.match(bare):
                yield position, len(atx[1]), _words(atx[2] or "")
                paragraph = 0
            elif paragraph == 1 and (setext := _SETEXT.match(bare)):
                yield previous, 1 if setext[1][0] == "=" else 2, words
                paragraph = 0
            elif bare.strip() and not bare.startswith(("    ", "\t", ">", "|", "- ", "* ", "+ ")):
                paragraph, previous, words = paragraph + 1, position, bare.strip()
            else:
                paragraph = 0 if not bare.strip() else 2
        position += len(line)


def _words(heading: str) -> str:
    """A heading without its optional closing `#`s, which follow a space or stand alone."""
    heading = re.sub(r"<!--.*?-->", "", heading).strip()
    open_ = heading.rstrip("#")
    return open_.rstrip() if not open_ or open_[-1] in " \t" else heading


_TEXTS = ("text", "content", "contents", "body", "passage", "page_content")
_TITLES = ("title", "headline")
_IDS = ("id", "_id", "doc_id", "docid", "document_id", "passage_id", "pid", "uid")
_MEANINGS = {"text": _TEXTS, "title": _TITLES, "id": _IDS}
_VECTOR = 16  # a longer list of numbers is assumed to be an embedding and left out


def read_json(data: bytes) -> Parsed:
    """The rows of a list of records, or of an object that holds exactly one such list, or an object with a text.

    Any other JSON is refused, because settings of programs are not text to read.
    """
    return _read_json_lines(data, _records)


def read_jsonl(data: bytes) -> Parsed:
    """The rows of a file with one record per line; lines that are not JSON are left out and named."""
    return _read_json_lines(data, lambda whole: whole if isinstance(whole, list) else [whole])


def _records(whole: Any) -> list[Any]:
    """The records of a JSON document; raises `Unreadable` if it is something else."""
    if isinstance(whole, dict) and _first(whole, _TEXTS) is None:
        lists = [v for v in whole.values() if isinstance(v, list) and v and all(isinstance(r, dict) for r in v)]
        whole = lists[0] if len(lists) == 1 else None
    if not isinstance(whole, dict | list):
        raise Unreadable('no rows found: JSON wants a list of objects, or an object with a "text"')
    return whole if isinstance(whole, list) else [whole]


def _read_json_lines(data: bytes, records_of: Callable[[Any], list[Any]]) -> Parsed:
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
    """The records and the faults of the other lines; `Unreadable` if most lines are faulty."""
    records: list[tuple[int, Any]] = []
    left_out: list[str] = []
    opens = False  # whether the first line is a record; otherwise the file is one damaged document
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
    parts = ["" if title is None else clean(title), fields_text(_flat(rest)), clean(text)]
    return place(number, name), "\n\n".join(part.strip() for part in parts if part.strip())


def place(number: int, name: Any) -> str:
    """A row's place in a citation: "row 17", or "row 17 (id 4711)" if it has an id."""
    words = " ".join(clean(str(name)).split()) if name is not None else ""
    return f"row {number} (id {words[:80]})" if words else f"row {number}"


def _first(record: dict[str, Any], names: Sequence[str]) -> str | None:
    """The key of the first of these fields (ignoring case) that holds text; an id may be a whole number."""
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
            check_text(size)  # nested names repeat on every line, so the text may be longer than the file
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


_DELIMITERS = "\t;|,"  # in a tie the first wins: values contain commas most often
_HEAD_ROWS = 200  # rows from which delimiter and header are guessed
_NUMBER = re.compile(r"[-+]?[\d.,\s]*\d\s*%?|[-+]?\d+(\.\d*)?[eE][-+]?\d+|\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}.*")
_DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}")
_YEAR_OR_DATE = re.compile(rf"1[5-9]\d\d|2[01]\d\d|{_DATE.pattern}")


def read_csv(data: bytes) -> Parsed:
    """Read rows with any delimiter. Rows are numbered as in a spreadsheet."""
    text = decode(data).removeprefix("\ufeff")
    first, _, rest = text.partition("\n")
    if (mark := re.fullmatch(r"sep=(.)", first.strip(" \r"))) is not None:  # Excel's way to name the delimiter
        return _read_table(rest, mark[1], above=1)
    return _read_table(text, sniff_delimiter(text) or ",")


def read_tsv(data: bytes) -> Parsed:
    """Like `read_csv`, with tabs as the delimiter if there are any."""
    text = decode(data)
    return _read_table(text, "\t" if "\t" in text else sniff_delimiter(text) or "\t")


def sniff_delimiter(text: str) -> str | None:
    """The delimiter that cuts most of the first rows into the same, preferably large, number of fields.

    None if the text is not a table. `csv.Sniffer` is not used: it accepts letters as delimiters, and prefers decimal
    commas to semicolons.
    """
    best, chosen = 0.0, None
    for delimiter in _DELIMITERS:
        rows = [row for row in islice(_rows(text[: 1 << 20], delimiter), _HEAD_ROWS) if row]
        widths = Counter(map(len, rows))
        if not widths:
            continue
        width, alike = widths.most_common(1)[0]
        score = (alike / len(rows)) ** 2 * min(width - 1, 8) ** 0.5
        if width > 1 and score > best:
            best, chosen = score, delimiter
    return chosen


def _read_table(text: str, delimiter: str, *, above: int = 0) -> Parsed:
    """Read rows with a known delimiter; `above` is the number of lines before the first row."""
    rows = [
        (number, [" ".join(field.split()) if len(field) < 200 else field.strip() for field in row])
        for number, row in enumerate(_rows(text, delimiter), start=1 + above)
        if any(field.strip() for field in row)
    ]
    if not rows:
        raise Unreadable("no text found")
    body, sections = join_rows(table_rows(rows))
    return Parsed(text=body, sections=sections)


def table_rows(rows: Sequence[tuple[int, list[str]]]) -> Iterator[tuple[str, str]]:
    """(place, text) of each numbered row; the first below the titles names the columns if it is a header."""
    titles = _titles([row for _, row in rows[: _HEAD_ROWS + 1]])
    for number, row in rows[:titles]:
        yield place(number, None), fields_text(_named((), row))
    rows = rows[titles:]
    names: list[str] = []
    if _is_header([row for _, row in rows[: _HEAD_ROWS + 1]]):
        names, first, rows = [" ".join(name.split()) for name in rows[0][1]], rows[0][0], rows[1:]
        used = {column for _, row in rows for column, field in enumerate(row) if field}
        yield place(first, None), " | ".join(name for column, name in enumerate(names) if name and column not in used)
    key = next((i for i, name in enumerate(names) if name.lower() in ("id", "_id", "key")), None)
    for number, row in rows:
        yield place(number, row[key] if key is not None and key < len(row) else None), fields_text(_named(names, row))


def _named(names: Sequence[str], row: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(column, value) pairs. Without column names, all values on one line: "column 3" has no meaning."""
    if not names:
        yield "", " | ".join(field for field in row if field)
        return
    for i, field in enumerate(row):
        yield (names[i] if i < len(names) else ""), field


def _titles(rows: Sequence[Sequence[str]]) -> int:
    """The number of rows above a header that have at most half of the fields that most rows have."""
    filled = [sum(map(bool, row)) for row in rows]
    usual, _ = max(Counter(filled).items(), key=lambda width: (width[1], width[0]))
    above = next(number for number, fields in enumerate(filled) if 2 * fields > usual)
    return above if above and _is_header(rows[above:]) else 0


def _is_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row is a header. Most tables have one, so look for counterevidence.

    Counterevidence is a number, or a name that is also a value of its column; but not several years or dates (a column
    each, of values that are no dates) or an empty name (the index of a data frame).
    """
    first = rows[0]
    named = [field for field in first if field]
    if 2 * len(named) < len(first) or any(len(field) > 100 for field in named):
        return False
    numbers = [field for field in named if _NUMBER.fullmatch(field)]
    if numbers and not (len(numbers) > 1 and len(numbers) < len(named) and all(map(_YEAR_OR_DATE.fullmatch, numbers))):
        return False
    if len(rows) == 1:
        return False
    # By rows, not columns: a table may have millions of columns and rows much shorter than its first.
    below = (pair for row in rows[1:] for pair in zip(row, first, strict=False) if pair[0])
    return not any(field == name or (_DATE.fullmatch(name) and _DATE.fullmatch(field)) for field, name in below)


def _rows(text: str, delimiter: str) -> list[list[str]]:
    """All rows including empty ones, with fields of any size. Unpaired quotes are ordinary text (inches)."""
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
    """Sort key to compare readings of a table: the share of rows with the most common width, then their number."""
    widths = Counter(len(row) for row in rows if row)
    return max(widths.values(), default=0) / max(1, widths.total()), len(rows)
