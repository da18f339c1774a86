"""HTML: the main text of a page as Markdown, without navigation and footers."""

from __future__ import annotations

from dataclasses import replace

from ragkv.ingest.markdown import parse_markdown
from ragkv.ingest.parser import Parsed, Unreadable, silenced
from ragkv.ingest.plain import clean, decode

__all__ = ["read_html"]


def read_html(data: bytes) -> Parsed:
    """The main text as Markdown: headings, lists and tables are kept, navigation is dropped.

    If the extraction finds little in a page that holds much more text, all of the text is taken.
    """
    import trafilatura
    from trafilatura.settings import use_config

    with silenced("trafilatura"):
        tree = trafilatura.load_html(data)
        if tree is None:  # the library wants a whole page, so make one of a fragment
            tree = trafilatura.load_html(f"<html><body>{decode(data)}</body></html>")
        if tree is None:
            raise Unreadable("no text found")
        config = use_config()
        config.set("DEFAULT", "MIN_EXTRACTED_SIZE", "1")  # a short page is a page
        title = " ".join((tree.findtext(".//title") or "").split()) or None
        everything = trafilatura.html2txt(tree)
        text = trafilatura.extract(tree, output_format="markdown", include_comments=False, config=config) or ""
        if len(text) < 250 and len(everything) > 4 * len(text):
            text = trafilatura.baseline(tree)[1] or everything
    parsed = parse_markdown(clean(text))
    return replace(parsed, title=title or parsed.title)
