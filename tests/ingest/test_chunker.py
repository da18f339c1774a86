from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.errors import ConfigError
from ragkv.ingest.chunker import TextChunk, split_text
from ragkv.ingest.reader import Section, SourceText


def words(text: str) -> int:
    return len(text.split())


def pieces(text: str) -> int:
    """Like a tokenizer: words in parts of at most four characters, punctuation and line ends on their own."""
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


@settings(deadline=None, max_examples=300)
@given(
    st.one_of(PROSE, st.text(max_size=200)),
    st.lists(st.integers(0, 400), max_size=8),
    st.booleans(),
    st.sampled_from([words, pieces, utf8, len]),
    st.integers(1, 40),
)
def test_chunks_are_exact_ordered_complete_and_short(
    text: str, cuts: list[int], pages: bool, count: Callable[[str], int], limit: int
) -> None:
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
def test_adversarial_texts_end(text: str, count: Callable[[str], int]) -> None:
    chunks = check(plain(text), count, 64)
    assert len(chunks) <= 2 * count(text) / 64 + len(text.split()) + 1


def test_character_longer_than_a_chunk_stays_whole() -> None:
    assert [chunk.text for chunk in check(plain("漢字 ab"), utf8, 2)] == ["漢", "字", "ab"]


def test_blank_and_empty_texts_have_no_chunks() -> None:
    assert check(plain(""), words, 5) == check(plain(" \n\n\t"), words, 5) == []


def test_text_that_fits_is_one_chunk() -> None:
    assert check(plain("\n  one two\n\nthree.\n"), words, 3) == [
        TextChunk(start=3, end=18, text="one two\n\nthree.", page=None, heading=None)
    ]


def test_paragraphs_then_sentences_then_words() -> None:
    text = "One two three. Four five.\n\nSix seven eight nine ten eleven."
    assert texts(plain(text), 6) == ["One two three. Four five.", "Six seven eight nine ten eleven."]
    assert texts(plain(text), 4)[:2] == ["One two three.", "Four five."]
    assert texts(plain("a b c d e"), 2) == ["a b", "c d", "e"]


def test_small_sections_share_a_chunk_under_their_common_heading() -> None:
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


@pytest.mark.parametrize("head", ["## Install the thing\n\n", "Install the thing\n---\n\n    "])
def test_heading_stays_with_what_follows(head: str) -> None:
    body = "word " * 40
    for source in (
        markdown(("A", "# A\n"), ("A > B", f"{head}{body}\n")),
        markdown(("B", f"{head}{body}\n")),
    ):
        chunks = check(source, pieces, 30)
        assert len(chunks) == 2
        assert chunks[0].text.endswith(" word word word word word")
        assert "thing" in chunks[0].text


def test_pages_never_share_a_chunk() -> None:
    source = tiled("one two\n\nthree four\n\nfive", [9, 21], pages=True)
    assert [(chunk.page, chunk.text) for chunk in check(source, words, 100)] == [
        (1, "one two"),
        (2, "three four"),
        (3, "five"),
    ]


def test_long_text_is_not_counted_over_and_over() -> None:
    counted = 0

    def count(text: str) -> int:
        nonlocal counted
        counted += len(text)
        return words(text)

    text = "\n\n".join(f"Sentence {number} of a long text. It goes on and on." for number in range(20_000))
    check_free = split_text(plain(text), count_tokens=count, max_tokens=200)
    assert len(check_free) > 900
    assert counted < 12 * len(text)


def test_limit_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 token"):
        split_text(plain("x"), count_tokens=len, max_tokens=0)
