"""Plain text in any encoding, Markdown, and HTML (the main text of a page as Markdown).

Bytes that are not text are refused as binary. Markdown is kept unchanged, and its headings name the sections.
"""

from __future__ import annotations

import re
from codecs import register_error
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ragkv.ingest.parser import Parsed, Unreadable, check_text, sections_under, silenced

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


def read_html(data: bytes, *, whole: bool = False) -> Parsed:
    """The main text as Markdown: headings, lists and tables are kept, navigation is dropped.

    If the extraction finds only a small part of the page's text, all of the text is taken. `whole`: it is no page of a
    site but a chapter or a message, without navigation.
    """
    import trafilatura
    from trafilatura.settings import use_config

    with silenced("trafilatura"):
        tree = trafilatura.load_html(data)
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
    return replace(parsed, title=title or parsed.title)


def _mark_article(tree: Any, *, whole: bool) -> None:
    """Make the body of a page without containers one article. Else only its paragraphs are found, without headings
    and lists, and a part with links for its footnotes passes for navigation.
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
        strip_attributes(body, "id", "class", "role")  # by which navigation is known
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
