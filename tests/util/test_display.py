"""HTML for notebooks: it parses, and hostile text is only ever text in it."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ragkv import RagKV
from ragkv.ingest.ingester import IngestReport
from ragkv.ingest.source import Skipped
from ragkv.types import Answer, KVUse, Source, Timing, TracedToken
from ragkv.util.display import visible

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)' x='",
    "</div></details><style>*{display:none}</style>",
    "<!-- ",
    "&lt;b&gt; &amp; &#60;",
    "javascript:alert(1)",
    "\x1b]52;c;aGk=\x07 \x00 \u202etxt.exe \ud800",
    "[a](javascript:alert(1)) ![b](http://evil.example) <http://evil.example> $\\href{x}{y}$",
    "# heading\n\n---\n    code\n| a | b |\n|---|---|",
    "`x` **y** {{7*7}} ${7*7} %javascript alert(1)",
]
TAGS = {"div", "span", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"}


class Read(HTMLParser):
    """The text and the titles of HTML; ValueError for a tag or an attribute that is not allowed."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.words, self.titles, self.coloured, self.open = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []
        self.text = "".join(self.words)

    def handle_starttag(self, tag, attributes):
        assert tag in TAGS, tag
        for name, value in attributes:
            assert name in ("style", "title", "scope"), name
            assert name != "style" or "url" not in value
            if name == "title":
                self.titles.append(value)
        self.open.append((tag, dict(attributes).get("title")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1][1] is not None:
            self.coloured.append(data)

    def handle_comment(self, data):
        pytest.fail(f"a comment: {data}")

    handle_decl = handle_pi = unknown_decl = handle_comment


def answer(word, *, trace=()):
    source = Source(
        document=f"name {word}", chunk_id=word, text=f"text {word}", page=3, score=0.5, retrieval_score=1.0,
        rerank_score=None, tokens_won=2, heading=f"heading {word}",
    )  # fmt: skip
    return Answer(
        question=f"question {word}", text=f"answer {word}", engine="pced", finish_reason="stop",
        sources=(source, source), timing=Timing(retrieve=1, rerank=1, load=1, first_token=1, total=1234),
        kv=KVUse(hits=1, misses=1, bytes=1, tokens=1), trace=trace,
    )  # fmt: skip


@pytest.mark.parametrize("word", HOSTILE)
def test_an_answer_of_hostile_text_is_text(word):
    trace = [TracedToken(token_id=1, text=f" answer {word}", source=1), TracedToken(token_id=2, text=word)]
    for one in (answer(word), answer(word, trace=tuple(trace))):
        shown = Read(one._repr_html_())
        for what in ("question", "answer", "text", "name", "heading"):
            assert f"{what} {visible(word)}" in shown.text
        assert all(visible(word) in title for title in shown.titles)
        assert re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800]", one._repr_html_()) is None
        assert "trace" not in repr(one)


@pytest.mark.parametrize("word", HOSTILE)
def test_markdown_of_hostile_text_is_text(word):
    shown = answer(word)._repr_markdown_()
    plain = re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", shown.replace("\\\n", "\n"))
    for line in visible(f"answer {word}").splitlines():
        assert line.strip() in plain
    bare = re.sub(r"\\[!-/:-@\[-`{-~]", "", shown.replace("\\\n", "\n"))
    bare = re.sub(r"^\d\. ", "", bare, flags=re.MULTILINE)  # the list of sources is a list
    assert re.findall(r"[!-/:-@\[-`{-~]|^(?: {4}|\t)", bare, re.MULTILINE) == []


@pytest.mark.parametrize("word", HOSTILE)
def test_a_report_of_hostile_names_is_text(word):
    report = IngestReport(
        added=[f"added {word}"] * 101, skipped=[Skipped(path=Path("skipped"), reason=f"reason {word}")], chunks=7
    )
    shown = Read(report._repr_html_())
    assert shown.text.count(f"added {visible(word)}") == 100
    assert "and 1 more" in shown.text
    assert f"skipped: reason {visible(word)}" in shown.text
    assert "101 added · 1 skipped" in shown.text


def test_a_report_of_nothing():
    assert Read(IngestReport()._repr_html_()).text.startswith("no documents")
    assert Read(IngestReport(dry_run=True, added=["a"])._repr_html_()).text.startswith("Would ingest: 1 added")


@pytest.fixture(scope="module")
def rag(tmp_path_factory, model_folder):
    documents = tmp_path_factory.mktemp("documents")
    (documents / "halden.md").write_text("# Halden Works\n\nHalden Works was founded by Mira Oskel in 1907.\n")
    (documents / "bolt\x1b[31m.txt").write_text("Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.")
    folder = tmp_path_factory.mktemp("indexes") / "two"
    with RagKV.create(folder, model=str(model_folder), device="cpu", chunk_tokens=128) as made:
        made.documents = documents
        yield made


def test_a_bar_is_shown_on_request_and_its_names_are_inert(rag, capsys):
    result = []
    rag.ingest(rag.documents, on_progress=lambda progress: result.append(progress.done_bytes), show_progress=True)
    shown = capsys.readouterr()
    assert "ingest: 100%" in shown.err
    assert "\x1b[31m" not in shown.err
    assert shown.out == ""
    assert result
    rag.ingest(rag.documents)
    assert capsys.readouterr() == ("", "")


def test_experts_have_their_tokens_in_their_colours(rag):
    found = rag.query("Who founded Halden Works?", engine="pced", max_new_tokens=12)
    won = [token.source for token in found.trace]
    assert "".join(token.text for token in found.trace).strip() == found.text
    assert [won.count(place) for place in range(len(found.sources))] == [s.tokens_won for s in found.sources]
    shown = Read(found._repr_html_())
    assert "".join(shown.coloured).strip() == visible(found.text)
    for place, source in enumerate(found.sources):
        if source.tokens_won:
            assert f"{place + 1} {visible(source.title)} ({source.tokens_won})" in shown.text
    plain = rag.query("Who founded Halden Works?", engine="block", max_new_tokens=12)
    assert all(token.source is None for token in plain.trace)
    assert Read(plain._repr_html_()).coloured == []
