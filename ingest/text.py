"""Files of text: plain text in any encoding, Markdown, HTML (the main text as Markdown), CSV, TSV, JSON and JSON Lines.

Bytes that are not text are refused as binary. Markdown is kept unchanged, and its headings name the sections. Each row
of a table or record of JSON becomes a section that can be understood alone: lines of "column: value", or the record's
text or its fields, cited by its id and number (its line, or its place in a list, counted from 1).
"""

from __future__ import annotations

import csv
import json
import re
from codecs import register_error
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from ragkv.ingest.parser import LIBRARY_LOCK, Parsed, Unreadable, check_text, join_rows, sections_under, silenced

BINARY = "binary file"
_NO_TEXT = {b"%PDF-": "it is a PDF: name it .pdf", b"{\\rtf": "RTF is not read; save it as DOCX or ODT"}
_BOMS = (  # UTF-32 first: its little-endian mark begins with UTF-16's
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_SAMPLE = 1 << 20  # bytes for guessing an encoding, from shortly before the first one that is not ASCII
_UTF_8 = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_NOT_ASCII = re.compile(rb"[\x80-\xff]")
_EAST_ASIAN = re.compile(rb"[\x80-\xff]{3}")
"""Three such bytes in a row: Latin text has single ones between letters."""
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def read_plain(data: bytes) -> Parsed:
    """The unchanged text as one section."""
    return Parsed(text=decode(data))


def decode(data: bytes) -> str:
    """Decode by byte order mark, as UTF-16 if the NULs suggest it, as UTF-8, else by charset-normalizer."""
    if reason := next((why for mark, why in _NO_TEXT.items() if data.startswith(mark)), None):
        raise Unreadable(reason)
    check_text(len(data) // 4)  # no encoding takes more than four bytes for a character
    encoding = next((name for mark, name in _BOMS if data.startswith(mark)), None) or _utf16(data) or "utf-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        if b"\x00" in data[:8192]:
            raise Unreadable(BINARY) from None
        text = _legacy(data)
    check_text(len(text))
    sample = text[:65536]
    if "\x00" in sample or 50 * len(_CONTROL.findall(sample)) > len(sample):
        raise Unreadable(BINARY)
    return clean(text)


def _legacy(data: bytes) -> str:
    """Decode an 8-bit or East Asian encoding by the best guess, or as Windows-1252 if that is no worse; and UTF-8 that
    is cut off, or has a few bytes of Windows-1252.
    """
    from charset_normalizer import from_bytes
    from charset_normalizer.utils import is_multi_byte_encoding

    start = next((found.start() for found in _NOT_ASCII.finditer(data)), 0)
    sample = data if len(data) <= _SAMPLE else data[max(0, start - _SAMPLE // 16) :][:_SAMPLE]
    wrong = 0

    def single(error: UnicodeError) -> tuple[str, int]:
        nonlocal wrong
        wrong += 1
        assert isinstance(error, UnicodeDecodeError)
        if error.reason == "unexpected end of data":
            return "", error.end
        return error.object[error.start : error.end].decode("cp1252", "replace"), error.end

    register_error("ragkv-single", single)
    sample.decode("utf-8", "ragkv-single")
    if 4 * wrong <= len(_UTF_8.findall(sample)):
        return data.decode("utf-8", "ragkv-single")
    guesses = from_bytes(sample)  # only a sample, because it tries some ninety encodings
    best = guesses.best()
    if best is None:
        raise Unreadable(BINARY)
    for guess in guesses:
        as_good = guess.chaos <= best.chaos and guess.coherence >= best.coherence
        if as_good and "cp1252" in guess.could_be_from_charset:
            best = guess
            break
    if is_multi_byte_encoding(best.encoding) and not _EAST_ASIAN.search(sample):
        return data.decode("cp1252", "replace")
    return str(best) if sample is data else data.decode(best.encoding, "replace")


def _utf16(data: bytes) -> str | None:
    """Recognise UTF-16 without a byte order mark: in most scripts, nearly every second byte is NUL."""
    sample = data[: 4096 & ~1]
    even, odd = sample[::2].count(0), sample[1::2].count(0)
    if odd > 0.4 * len(sample) / 2 and even == 0:
        return "utf-16-le"
    if even > 0.4 * len(sample) / 2 and odd == 0:
        return "utf-16-be"
    return None


def clean(text: str) -> str:
    """Make all line ends `\\n`, and drop NULs and lone surrogates (which PDFs produce)."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "")
    return text.encode("utf-8", "replace").decode("utf-8")


_FRONT_MATTER = re.compile(
    r"\A(---|\+\+\+)[ \t]*\n(?=\s*[\w-]+[ \t]*[:=])(.*?\n)(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL
)
_TITLE = re.compile(r"^title[ \t]*[:=](.+)$", re.MULTILINE | re.IGNORECASE)
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})(.*)")
_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t](.*))?$")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")


def read_markdown(data: bytes) -> Parsed:
    """Decode bytes in any encoding and parse them as Markdown."""
    return parse_markdown(decode(data))


def parse_markdown(text: str) -> Parsed:
    """A section per heading, named by its path. The title is that of the front matter, else the first top heading."""
    title = None
    if front := _FRONT_MATTER.match(text):
        text = text[front.end() :]
        if found := _TITLE.search(front[2]):
            title = found[1].strip(" \t").strip("\"'") or None
    headings = list(_headings(text))
    title = title or next((name for _, level, name in headings if level == 1 and name), None)
    return Parsed(text=text, sections=sections_under(text, headings), title=title)


def _headings(text: str) -> Iterator[tuple[int, int, str]]:
    """(offset of its first line, level, words) of every heading outside fenced code."""
    fence = ""
    paragraph = 0  # lines of the current paragraph; one line with an underline below it is a heading
    position = previous = 0
    words = ""
    for line in text.splitlines(keepends=True):
        bare = line.rstrip("\n")
        if mark := _FENCE.match(bare):
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
    heading = heading.strip()
    open_ = heading.rstrip("#")
    return open_.rstrip() if not open_ or open_[-1] in " \t" else heading


_CONTAINERS = """.//main|.//article|.//*[@role='main' or @role='article' or contains(@id, 'content')
    or contains(@class, 'content') or starts-with(@id, 'main') or starts-with(@class, 'main')]"""
_LAYOUT = "|".join(f".//table[.//table]{path}" for path in ("", "/tr", "/tr/td", "/tbody", "/tbody/tr", "/tbody/tr/td"))


_TOO_DEEP = "its elements are nested more than 255 deep; what follows is missing"


_VALUE = rb"=\s*(?:\"[^\"]*\"|'[^']*')?"
_TAG = re.compile(rb"<[A-Za-z](?>[^>=]|%s)*" % _VALUE)
_QUOTED = re.compile(_VALUE)
_MAX_ATTRIBUTES = 5000  # of a tag; libxml2 compares each with all before, which takes minutes for 300,000


def _check_attributes(data: bytes) -> None:
    """Raise `Unreadable` for a tag with too many attributes. A long value, as an embedded picture has, is one."""
    for tag in _TAG.finditer(data.replace(b"\0", b"")):  # as UTF-16 has between letters
        if len(tag[0]) > 2 * _MAX_ATTRIBUTES and len(re.split(rb"[\s/]+", _QUOTED.sub(b" ", tag[0]))) > _MAX_ATTRIBUTES:
            raise Unreadable(f"a tag of it has more than {_MAX_ATTRIBUTES:,} attributes")


def read_html(data: bytes, *, whole: bool = False) -> Parsed:
    """The main text as Markdown: headings, lists and tables are kept, navigation is dropped.

    If the extraction finds only a small part of the page's text, all of the text is taken. `whole`: it is no page of a
    site but a chapter or a message, without navigation.
    """
    import trafilatura
    from trafilatura.settings import use_config
    from trafilatura.utils import HTML_PARSER

    _check_attributes(data)
    with silenced("trafilatura"):
        tree = trafilatura.load_html(data)
        # libxml2 stops at a depth of 256 and drops the rest of the page
        left_out = [_TOO_DEEP for fault in HTML_PARSER.error_log if fault.type_name == "ERR_RESOURCE_LIMIT"][:1]
        if tree is None:  # the library expects a whole page
            tree = trafilatura.load_html(f"<html><body>{decode(data)}</body></html>")
        if tree is None:
            raise Unreadable("no text found")
        config = use_config()
        config.set("DEFAULT", "MIN_EXTRACTED_SIZE", "1")  # a short page is a page
        _mark_article(tree, whole=whole)
        title = " ".join((tree.findtext(".//title") or "").split()) or None
        everything = trafilatura.html2txt(tree)
        text = trafilatura.extract(tree, output_format="markdown", include_comments=False, config=config) or ""
        if len(text) < 250 and len(everything) > 4 * len(text):
            text = trafilatura.baseline(tree)[1] or everything
    parsed = parse_markdown(clean(text))
    return replace(parsed, title=title or parsed.title, left_out=left_out)


def _mark_article(tree: Any, *, whole: bool) -> None:
    """Turn the body of a page without containers into one article. Otherwise only its paragraphs are found, without
    headings and lists, and a part with footnote links is taken for navigation.
    """
    from lxml.etree import strip_attributes, strip_tags
    from lxml.html.defs import block_tags

    body = tree.find("body")
    if body is None or (body.xpath(_CONTAINERS) and not whole):
        return
    for link in body.xpath(".//a" if whole else ".//a[starts-with(@href, '#')]"):
        link.tag = "bdi"  # an inline tag without a meaning here, to drop them all at once
    strip_tags(body, "bdi")
    if whole:
        strip_attributes(body, "id", "class", "role")  # the extractor recognises navigation by them
        for cell in body.xpath(_LAYOUT):
            cell.tag = "div"
    for part in list(body.iter("div")):  # of lines in a division, the first may be lost
        if not any(child.tag in block_tags or child.tag == "a" for child in part.iterdescendants()):
            part.tag = "p"
        elif (part.text or "").strip():
            line = part.makeelement("p")
            line.text, part.text = part.text, None
            part.insert(0, line)
    article = body.makeelement("article")
    article.text, body.text = body.text, None
    article.extend(list(body))
    body.append(article)


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
_YEAR = re.compile(r"1[5-9]\d\d|2[01]\d\d")


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
    """(place, text) of each numbered row; the first names the columns if it is a header."""
    names: list[str] = []
    if _is_header([row for _, row in rows[: _HEAD_ROWS + 1]]):
        names, rows = rows[0][1], rows[1:]
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


def _is_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row is a header. Most tables have one, so look for counterevidence.

    Counterevidence is a number, or a name that is also a value of its column; but not several years (a column per
    year) or an empty name (the index of a data frame).
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
    # By rows, not columns: a table may have millions of columns and rows much shorter than its first.
    return not any(field and field == name for row in rows[1:] for field, name in zip(row, first, strict=False))


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
