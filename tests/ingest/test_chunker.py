import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY

from ragkv.errors import ConfigError
from ragkv.ingest.chunker import TextChunk, split_text
from ragkv.ingest.parser import Section
from ragkv.ingest.sandbox import SourceText


def words(text: str) -> int:
    return len(text.split())


def pieces(text: str) -> int:
    """Tokenizer-like pieces: words in parts of at most four characters; punctuation and newlines separately."""
    return sum(-(-len(run) // 4) for run in re.findall(r"\w+|[^\w\s]|\n", text))


def utf8(text: str) -> int:
    return len(text.encode())


def plain(text: str) -> SourceText:
    return markdown((None, text))


def tiled(text: str, cuts: list[int], pages: bool = False) -> SourceText:
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(text)}), len(text)]
    sections = [
        Section(start=start, end=end, page=number if pages else None, heading=None if pages else f"H > {number}")
        for number, (start, end) in enumerate(pairwise(bounds), 1)
    ]
    return SourceText(text=text, content_hash="", title=None, sections=tuple(sections))


def markdown(*parts: tuple[str | None, str]) -> SourceText:
    sections, position = [], 0
    for heading, text in parts:
        sections.append(Section(start=position, end=position + len(text), heading=heading))
        position += len(text)
    text = "".join(text for _, text in parts)
    return SourceText(text=text, content_hash="", title=None, sections=tuple(sections))


def check(source: SourceText, count: Callable[[str], int], limit: int) -> list[TextChunk]:
    chunks = split_text(source, count_tokens=count, max_tokens=limit)
    covered, position = [], 0
    for chunk in chunks:
        assert source.text[chunk.start : chunk.end] == chunk.text
        assert chunk.text.strip() == chunk.text != ""
        assert count(chunk.text) <= limit or len(chunk.text) == 1
        assert source.text[position : chunk.start].strip() == ""
        covered.append(chunk.text)
        position = chunk.end
    assert source.text[position:].strip() == ""
    return chunks


def texts(source: SourceText, limit: int) -> list[str]:
    return [chunk.text for chunk in check(source, words, limit)]


PROSE = st.text(st.sampled_from("abcdé漢 .,\n\n\t-)\u00a0👩\u200d"), max_size=400)


@settings(max_examples=600 if NIGHTLY else 100)
@given(
    st.one_of(PROSE, st.text(max_size=200)),
    st.lists(st.integers(0, 400), max_size=8),
    st.booleans(),
    st.sampled_from([words, pieces, utf8, len]),
    st.integers(1, 40),
)
def test_chunks_are_exact_ordered_complete_and_short(text, cuts, pages, count, limit):
    source = tiled(text, cuts, pages)
    chunks = check(source, count, limit)
    if pages:
        for chunk in chunks:
            (page,) = (s for s in source.sections if s.start <= chunk.start and chunk.end <= s.end)
            assert chunk.page == page.page


GAPS = [a + b + c for a in " \u2000\u2001" for b in " \u2003\u2004\u2005\x0b" for c in map(chr, range(0x2000, 0x200B))]
ADVERSARIAL = {
    "one word": "x" * 20_000,
    "emoji": "👩‍👩‍👧" * 3_000,
    "newlines": "\n" * 20_000,
    "blanks": " \t\n\u2003" * 5_000 + "end",
    "no spaces": "漢字" * 10_000,
    "punctuation": ".,;:!?" * 3_000,
    "growing gaps": "".join("a" + "\n" * size for size in range(300)),
    "gaps of 1000 kinds": "".join(f"a{a}{b}" for a in GAPS for b in GAPS[:8]),
}


@pytest.mark.parametrize("text", ADVERSARIAL.values(), ids=ADVERSARIAL)
@pytest.mark.parametrize("count", [pieces, utf8, len])
def test_adversarial_texts_end(text, count):
    chunks = check(plain(text), count, 64)
    assert len(chunks) <= 2 * count(text) / 64 + len(text.split()) + 1


def test_the_smallest_texts_and_limits():
    assert check(plain("\n  one two\n\nthree.\n"), words, 3) == [TextChunk(text="one two\n\nthree.", start=3)]
    assert check(plain(""), words, 5) == check(plain(" \n\n\t"), words, 5) == []
    assert [chunk.text for chunk in check(plain("漢字 ab"), utf8, 2)] == ["漢", "字", "ab"]
    with pytest.raises(ConfigError, match="at least 1 token"):
        split_text(plain("x"), count_tokens=len, max_tokens=0)


def test_a_section_that_just_fits_is_one_chunk():
    """Keeping a heading with the text below it costs additional tokens, but text that fits is not split for it."""
    source = markdown(("A", "# A\n\nbb cc"))
    assert [chunk.text for chunk in check(source, utf8, 10)] == ["# A\n\nbb cc"]
    assert len(check(source, utf8, 9)) > 1


def test_paragraphs_then_sentences_then_words():
    text = "One two three. Four five.\n\nSix seven eight nine ten eleven."
    assert texts(plain(text), 6) == ["One two three. Four five.", "Six seven eight nine ten eleven."]
    assert texts(plain(text), 4)[:2] == ["One two three.", "Four five."]
    assert texts(plain("a b c d e"), 2) == ["a b", "c d", "e"]


@pytest.mark.parametrize("head", ["## Install the thing\n\n", "Install the thing\n---\n\n    "])
def test_heading_stays_with_what_follows(head):
    body = "word " * 40
    for source in (
        markdown(("A", "# A\n"), ("A > B", f"{head}{body}\n")),
        markdown(("B", f"{head}{body}\n")),
    ):
        chunks = check(source, pieces, 30)
        assert len(chunks) == 2
        assert chunks[0].text.endswith(" word word word word word")
        assert "thing" in chunks[0].text


def test_pages_and_rows_never_share_a_chunk():
    source = tiled("one two\n\nthree four\n\nfive", [9, 21], pages=True)
    assert [(chunk.page, chunk.text) for chunk in check(source, words, 100)] == [
        (1, "one two"),
        (2, "three four"),
        (3, "five"),
    ]
    text = "before\nrow one\nrow two\nafter\n"
    cuts = [(0, 7, False), (7, 15, True), (15, 23, True), (23, 29, False)]
    sections = tuple(Section(start=start, end=end, alone=alone) for start, end, alone in cuts)
    source = SourceText(text=text, content_hash="", title=None, sections=sections)
    assert texts(source, 100) == ["before", "row one", "row two", "after"]


def test_long_text_is_not_counted_over_and_over():
    counted = 0

    def count(text: str) -> int:
        nonlocal counted
        counted += len(text)
        return words(text)

    text = "\n\n".join(f"Sentence {number} of a long text. It goes on and on." for number in range(20_000))
    check_free = split_text(plain(text), count_tokens=count, max_tokens=200)
    assert len(check_free) > 900
    assert counted < 12 * len(text)


def headings(source: SourceText, limit: int) -> list[tuple[str | None, str]]:
    return [(chunk.heading, chunk.text) for chunk in check(source, words, limit)]


def row_of(numbers: range) -> str:
    return " ".join(f"w{number}" for number in numbers)


def test_a_heading_is_that_of_the_sections_that_the_chunk_touches():
    """A chunk that begins where a section ends does not touch it; nor does one that ends where a section begins."""
    body = row_of(range(17))
    source = markdown(("Guide > A", "one\ntwo.\n\n"), ("Guide > B", f"{body}\n"))
    assert headings(source, 17) == [("Guide > A", "one\ntwo."), ("Guide > B", body)]
    long = markdown(("Guide > A", "one\ntwo.\n\n"), ("Guide > B", row_of(range(30)) + "\n\n"), ("Guide > C", "end"))
    found = headings(long, 17)
    assert found[0] == ("Guide > A", "one\ntwo.")
    assert {heading for heading, _ in found[1:-1]} == {"Guide > B"}


def test_sections_that_share_a_chunk_share_their_heading():
    """Their common ancestor heading; without one, that of the start of the chunk."""
    assert headings(markdown(("G > A", "a\n"), ("G > B", "b\n")), 9) == [("G", "a\nb")]
    assert headings(markdown(("A > X", "a\n"), ("B > X", "b\n")), 9) == [("A > X", "a\nb")]
    assert headings(markdown((None, "a\n"), ("B", "b\n")), 9) == [("B", "a\nb")]
    source = markdown(
        ("Guide", "# Guide\n"),
        ("Guide > Install", "## Install\npip\n"),
        ("Guide > Use", "## Use\ngo on\n"),
        ("End", "# End\nbye now\n"),
    )
    assert [(chunk.heading, chunk.text) for chunk in check(source, words, 9)] == [
        ("Guide", "# Guide\n## Install\npip\n## Use\ngo on"),
        ("End", "# End\nbye now"),
    ]
    assert [chunk.heading for chunk in check(source, words, 5)] == ["Guide", "Guide > Use", "End"]
    assert [chunk.heading for chunk in check(source, words, 100)] == ["Guide"]
    # Three sections of two lines: the third does not fit, so the cut is before it, not inside it.
    source = markdown(("A", "a1\na2\n"), ("B", "b1\nb2\n"), ("C", "c1\nc2\n"), ("D", "d1\nd2\n"))
    assert [text for _, text in headings(source, 5)] == ["a1\na2\nb1\nb2", "c1\nc2\nd1\nd2"]


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("aaa bbb ccc ddd", 10, ["aaa bbb", "ccc ddd"]),  # at the last white space in the second half
        ("aaa bbb ccc", 7, ["aaa bbb", "ccc"]),  # the text that fits ends at white space
        ("ab " + "x" * 17, 10, ["ab xxxxxxx", "x" * 10]),  # the white space is too early, so the word is split
        ("x" * 25, 10, ["x" * 10, "x" * 10, "x" * 5]),
    ],
)
def test_what_semchunk_gives_up_is_cut_at_words(text, limit, expected, monkeypatch):
    def gives_up(*_: object, **__: object) -> None:
        raise RecursionError

    monkeypatch.setattr("semchunk.chunk", gives_up)
    assert [chunk.text for chunk in check(plain(text), len, limit)] == expected


@given(st.text("ab x\n", max_size=120), st.integers(2, 12))
def test_the_limit_holds_for_counters_that_are_not_monotone(text, limit):
    """A tokenizer may need more tokens for a shorter text: here a text that ends in x counts twice."""

    def count(part: str) -> int:
        return len(part) * (2 if part.endswith("x") and len(part) > 1 else 1)

    with pytest.MonkeyPatch.context() as patch:
        check(plain(text), count, limit)
        patch.setattr("semchunk.chunk", lambda *_, **__: (_ for _ in ()).throw(RecursionError()))
        check(plain(text), count, limit)


def test_a_very_long_text_is_cut_in_pieces_at_their_best_last_place(monkeypatch):
    """A piece of 40 characters ends after the last paragraph, else line, sentence or word, in its second half."""
    monkeypatch.setattr("ragkv.ingest.chunker.WINDOW", 40)
    paragraphs = "a" * 22 + "\n\n" + "b" * 6 + "\n\n" + "c" * 3 + "\nd e. " + "f" * 30
    assert texts(plain(paragraphs), 100)[0] == "a" * 22 + "\n\n" + "b" * 6
    sentences = "aaaa. " * 5 + "bb ccccccc " + "d" * 30
    assert texts(plain(sentences), 100)[0] == ("aaaa. " * 5).strip()
    early = "a b\n\n" + "c" * 50
    assert texts(plain(early), 100)[0] == "a b\n\n" + "c" * 35
    assert texts(plain("x" * 100), 100) == ["x" * 40, "x" * 40, "x" * 20]
    assert texts(plain("x" * 40), 100) == ["x" * 40]
    # a section longer than a piece shares no chunk with the next section
    assert texts(markdown(("A", "x" * 60 + "\n"), ("B", "end\n")), 100) == ["x" * 40, "x" * 20, "end"]
