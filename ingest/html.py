"""Pages of HTML: the main text as Markdown."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ragkv.ingest.charset import clean, decode
from ragkv.ingest.parser import Parsed, Unreadable, silenced
from ragkv.ingest.text import parse_markdown

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
