"""Pages of HTML: the main text as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from ragkv.ingest.charset import clean, decode
from ragkv.ingest.parser import Parsed, Unreadable, silenced
from ragkv.ingest.text import parse_markdown

_CONTAINERS = """.//main|.//article|.//*[@role='main' or @role='article' or contains(@id, 'content')
    or contains(@class, 'content') or starts-with(@id, 'main') or starts-with(@class, 'main')]"""
_LAYOUT = "|".join(f".//table[.//table]{path}" for path in ("", "/tr", "/tr/td", "/tbody", "/tbody/tr", "/tbody/tr/td"))
_TOO_DEEP = "its elements are nested more than 255 deep; what follows is missing"
_VALUE = r"=\s*(?:\"[^\"]*\"|'[^']*')?"
_TAG = re.compile(rf"<[A-Za-z](?>[^>=]|{_VALUE})*")
_QUOTED = re.compile(_VALUE)
_MAX_ATTRIBUTES = 5000  # of a tag; libxml2 compares each with all before, which takes minutes for 300,000
_QUOTED_WORDS = 100  # of what is outside of the main text
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6", "summary")
_INLINE = (
    *("sub", "sup", "b", "i", "em", "strong", "mark", "u", "s", "small"),
    *("big", "font", "span", "ins", "a", "tt", "bdi"),
)
_JOINED = "joined"  # the tag of what is dropped because it stands inside of a word
_CODE = re.compile(r"\s*⁅(\d+)⁆(.*?)⁅/⁆ ?")
_BOILERPLATE = """//nav | //footer | //aside | //noscript | //header[not(ancestor::main or ancestor::article)]
    | //*[@role='navigation']"""
_PERMALINKS = """//*[self::h1 or self::h2 or self::h3 or self::h4 or self::h5 or self::h6]//a[starts-with(@href, '#')
    or contains(@class, 'anchor') or contains(@class, 'link')] | //span[contains(@class, 'mw-editsection')]"""
_LINE_NUMBERS = """//td[contains(@class, 'linenos') or contains(@class, 'lineno') or contains(@class, 'gutter')
    or contains(@class, 'blob-num')] | //pre//span[contains(@class, 'linenos')]"""


def read_html(data: bytes, declared: str | None = None, *, whole: bool = False) -> Parsed:
    """The main text as Markdown: headings, lists and tables are kept; what is outside is named in `left_out`.

    If the extraction finds only a small part of the page's text, all of the text is taken. `whole`: it is no page of a
    site but a chapter or a message, without navigation. `declared` is the encoding that HTTP or MIME name.
    """
    import trafilatura
    from trafilatura.utils import HTML_PARSER

    page = decode(data, declared, markup=True)
    for tag in _TAG.finditer(page):  # a long value, as an embedded picture has, is one attribute
        if len(tag[0]) > 2 * _MAX_ATTRIBUTES and len(re.split(r"[\s/]+", _QUOTED.sub(" ", tag[0]))) > _MAX_ATTRIBUTES:
            raise Unreadable(f"a tag of it has more than {_MAX_ATTRIBUTES:,} attributes")
    page = re.sub(r"\A\s*<\?xml[^>]*>|(?i:</(?:body|html)\s*>)", "", page)  # libxml2 drops what follows these
    with silenced("trafilatura"):
        tree, codes = _tree(page)
        # libxml2 stops at a depth of 256 and drops the rest of the page
        left_out = [_TOO_DEEP for fault in HTML_PARSER.error_log if fault.type_name == "ERR_RESOURCE_LIMIT"][:1]
        title = " ".join((tree.findtext(".//title") or "").split()) or None
        names = {_letters(heading.text_content()) for heading in tree.iter(*_HEADINGS)}
        words = _words_of(tree)
        pictures = [
            name for image in tree.iter("img") if (name := image.get("alt", image.get("src", "")[:200]).strip())
        ]
        main = deepcopy(tree)
        for element in main.xpath(_BOILERPLATE):
            element.drop_tree()
        inside, text = _words_of(main), ""
        for enough, attempt in (  # of the words inside of the main text
            (1.0, lambda: _extract(tree, whole=whole)),
            (0.67, lambda: _extract(main, whole=True)),
            (0.5, lambda: trafilatura.html2txt(main)),
            (0.0, lambda: trafilatura.baseline(tree)[1]),
            (0.0, lambda: trafilatura.html2txt(tree)),
        ):
            share = 1 - len(_lost(inside, text)) / max(1, len(inside))
            if text.strip() and share >= enough:
                break
            other = attempt()
            better = 2 * len(_lost(inside, other)) < len(_lost(inside, text))
            text = other if better or not text.strip() else text
    text = re.sub(r"(?m)^.*⁅\d.*", lambda line: _with_code(line, codes), text)
    if not text.strip():
        raise Unreadable(next(iter(left_out), "no text found"))
    if pictures:
        left_out.append(f"pictures ({_cut(dict.fromkeys(' '.join(pictures).split()))})")
    if lost := _lost(words, text):
        left_out.append(f"outside of the main text ({_cut(lost)})")
    parsed = parse_markdown(clean(text), lambda heading: _letters(heading) in names)
    return replace(parsed, title=title or parsed.title, left_out=left_out)


def _letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text)


def _words(text: str) -> dict[str, str]:
    """The words of a text in their order, by their form to compare."""
    return {word.casefold(): word for word in re.findall(r"\w+", text)}


def _words_of(tree: Any) -> dict[str, str]:
    texts: list[str | None] = []
    for element in tree.iterfind("body//*"):
        texts += [None if element.tag in ("script", "style", "template") else element.text, element.tail]
    body = tree.find("body")
    text = " ".join(text or "" for text in (None if body is None else body.text, *texts))
    return _words(re.sub(r"⁅\d+⁆|\xad", "", text))


def _lost(words: dict[str, str], text: str) -> list[str]:
    there = _words(text.replace("\\", ""))
    return [word for key, word in words.items() if key not in there]


def _cut(words: Iterable[str]) -> str:
    words = list(words)
    more = f" … and {len(words) - _QUOTED_WORDS:,} more words" if len(words) > _QUOTED_WORDS else ""
    return " ".join(words[:_QUOTED_WORDS]) + more


def _tree(page: str) -> tuple[Any, list[str]]:
    """The parsed page, whose words and headings hold no marks, and its blocks of code.

    The extractor drops blank lines of code, and joins its fences to other lines; so it gets numbered lines.
    """
    import trafilatura
    from lxml.etree import strip_tags

    tree = trafilatura.load_html(page)
    if tree is None or tree.find("body") is None:  # the library expects a whole page
        tree = trafilatura.load_html(f"<html><body>{page}</body></html>")
    if tree is None:
        raise Unreadable("no text found")
    strip_tags(tree, "wbr")
    for mark in tree.xpath(f"{_PERMALINKS} | {_LINE_NUMBERS}"):
        if not any(map(str.isalpha, mark.text_content())) or "mw-editsection" in mark.get("class", ""):
            mark.drop_tree()
    codes: list[str] = []
    for number, code in enumerate(tree.xpath("//pre | //code[.//br][not(ancestor::pre)]")):
        for line in code.iter("br"):
            line.tail = "\n" + (line.tail or "")
        words = code.text_content()
        codes.append(words.strip("\n"))
        code.clear(keep_tail=True)
        code.tag, code.text = "p", f"⁅{number}⁆ {' '.join(words.split())} ⁅/⁆"
        table = next(code.iterancestors("table"), None)
        if table is not None and table.text_content().split() == code.text.split():  # else were line numbers
            table.addprevious(code)
            table.drop_tree()
    for code in tree.iter("code"):  # a line end in it would make a block
        words = " ".join(code.text_content().split())
        code.clear(keep_tail=True)
        code.text = words
    for element in list(tree.iter(*_INLINE)):
        _join_word(element)
    strip_tags(tree, _JOINED)
    for element in tree.iter("*"):  # one text node instead of many, each of which the extractor would append
        element.text, element.tail = element.text, element.tail
    for element in tree.iter("form", "figure", "figcaption", "address", "center", "legend", "fieldset", "label"):
        element.tag = "div" if len(element) else "p"  # the extractor drops these, or knows no line end beside them
    for element in tree.xpath("//*[self::ul or self::ol or self::dl][ancestor::td or ancestor::th]"):
        element.tag = "div"  # it drops a list in a cell
        for item in element.iterchildren("li", "dt", "dd"):
            item.tag = "p"
    for summary in tree.iter("summary"):  # is a heading itself
        strip_tags(summary, *_HEADINGS[:-1])
    return tree, codes


def _with_code(line: re.Match[str], codes: Sequence[str]) -> str:
    """A line of the text with its blocks of code; in a row of a table they are words."""
    if line[0].startswith("|"):
        return _CODE.sub(lambda code: f"`{code[2].strip()}`", line[0])
    return _CODE.sub(lambda code: f"\n```\n{codes[int(code[1])]}\n```\n", line[0])


def _join_word(element: Any) -> None:
    """Mark a tag that begins or ends inside of a word, as in CO<sub>2</sub>, as `_JOINED`; 10<sup>5</sup> becomes 10^5.

    The marked tags are dropped together: one by one, each would copy the text that those before it have left.
    """
    words = element.text_content()
    if element.getparent() is None or not words:
        return
    before, after = _text_before(element), _text_after(element)
    if element.tag == "sup" and element.find(".//a") is not None:  # a note's number
        element.text = " " + (element.text or "")
    elif element.tag == "sup" and before[-1:].isdigit() and re.match(r"[-+−\d]", words):
        element.text = "^" + (element.text or "")
    elif (
        element.tag not in ("sub", "sup")
        and not (before and (before[-1] + words[0]).isalnum())
        and not (after and (words[-1] + after[0]).isalnum())
    ):
        return
    element.tag = _JOINED


_ROW = ("a", "span")  # links and spans in a row are parts of a menu, say, and not of a word


def _text_before(element: Any) -> str:
    """The text that ends where `element` begins, as if the marked tags were dropped."""
    node = element
    while (previous := node.getprevious()) is None:
        parent = node.getparent()
        if parent.text or parent.tag != _JOINED:
            return parent.text or ""
        node = parent
    while not previous.tail and previous.tag == _JOINED:
        if not len(previous):
            return previous.text or ""
        previous = previous[-1]
    return previous.tail or ("" if element.tag in _ROW else previous.text_content())


def _text_after(element: Any) -> str:
    """The text that begins where `element` ends."""
    node = element
    while not node.tail and node.getnext() is None and node.getparent().tag == _JOINED:
        node = node.getparent()
    following = None if element.tag in _ROW else node.getnext()
    return node.tail or ("" if following is None else following.text_content())


def _extract(tree: Any, *, whole: bool) -> str:
    import trafilatura
    from trafilatura.settings import use_config

    config = use_config()
    config.set("DEFAULT", "MIN_EXTRACTED_SIZE", "1")  # a short page is a page
    _mark_article(tree, whole=whole)
    return trafilatura.extract(tree, output_format="markdown", include_comments=False, config=config) or ""


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
