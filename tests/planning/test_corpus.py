"""Estimates from a sample, compared with reading all files."""

import random
from pathlib import Path
from typing import Any

import pytest
from steady import steady

from ragkv.errors import UsageError
from ragkv.planning import plan
from ragkv.planning.plan import estimate_corpus

TEXT = "valve bolt river founded Halden Works in the town of Varn, makes pumps and paper. The mayor is Ann Lee."
WORDS = TEXT.split()


def count(paths: list[Path], sample_bytes: int, seed: int = 0, **time: Any) -> plan.CorpusEstimate:
    settings = {"chunk_ids": lambda text: tuple(text.encode()), "max_tokens": 200} | time
    return estimate_corpus(paths, sample_bytes=sample_bytes, seed=seed, **settings)


@pytest.fixture
def many(tmp_path) -> Path:
    """120 files of text and Markdown, of one line up to some hundred."""
    generator = random.Random(3)
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(120):
        lines = [" ".join(generator.choices(WORDS, k=12)) for _ in range(int(generator.paretovariate(0.9)) % 300 + 1)]
        if number % 3:
            (folder / f"{number}.txt").write_text("\n".join(lines))
        else:
            (folder / f"{number}.md").write_text("\n\n".join(f"# Part {i}\n\n{line}" for i, line in enumerate(lines)))
    return folder


@pytest.fixture
def book(tmp_path) -> Path:
    """One text with many parts."""
    generator = random.Random(5)
    lines = [" ".join(generator.choices(WORDS, k=generator.randrange(3, 30))) for _ in range(2000)]
    path = tmp_path / "book.md"
    path.write_text("\n\n".join(f"# Part {i}\n\n{line}" for i, line in enumerate(lines)))
    return path


def test_small_inputs_are_counted(tmp_path):
    (tmp_path / "a.txt").write_text("Bolt Ltd makes valves.")
    (tmp_path / "b.md").write_text("# Bolt\n\nBolt Ltd makes valves.")
    (tmp_path / "c.txt").write_text("Bolt Ltd makes valves.")
    (tmp_path / "d.bin").write_bytes(b"\0")
    (tmp_path / "e.pdf").write_bytes(b"no pdf")
    found = count([tmp_path], 1000)
    assert found.whole
    assert (found.documents.value, found.chunks.value, found.chunks.spread) == (3, 3, 0)
    assert found.tokens.value == 2 * 22 + 30
    assert found.distinct == pytest.approx((22 + 30) / (2 * 22 + 30))
    assert {skipped.path.name for skipped in found.skipped} == {"d.bin", "e.pdf"}
    assert {text for text, _ in found.chunks_read} == {"# Bolt\n\nBolt Ltd makes valves.", "Bolt Ltd makes valves."}


def test_a_sample_is_near_and_says_how_near(many):
    true = count([many], 1 << 30)
    hits = 0
    for seed in range(10):
        found = count([many], true.source_bytes // 5, seed)
        assert not found.whole
        assert found.read_bytes < true.source_bytes
        assert found.documents == true.documents
        assert found.chunks.value == pytest.approx(true.chunks.value, rel=0.2)
        assert found.tokens.value == pytest.approx(true.tokens.value, rel=0.05)
        hits += abs(found.chunks.value - true.chunks.value) <= found.chunks.spread
    assert hits >= 8  # of ten intervals of 95 %


def test_the_same_seed_draws_the_same(many):
    first, again, other = (count([many], 20_000, seed).chunks for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_of_a_long_text_parts_are_cut(book, monkeypatch):
    monkeypatch.setattr(plan, "WINDOW", 4000)
    true = count([book], 1 << 30)
    found = count([book], 40_000)
    assert sum(len(text) for text, _ in found.chunks_read) < true.source_bytes
    assert found.chunks.value == pytest.approx(true.chunks.value, rel=0.1)
    assert 0 < found.chunks.spread < 0.2 * true.chunks.value


def test_when_time_is_over_some_files_speak_for_the_others(many, monkeypatch):
    monkeypatch.setattr(plan, "PROBE", 1 << 40)
    true = count([many], 1 << 30)
    hits = 0
    for seed in range(10):
        found = count([many], 1 << 30, seed, seconds=60, now=steady(0.2))
        assert (found.whole, found.cut_short) == (False, True)
        assert 10 < found.read_sources < 100
        assert found.documents == true.documents
        assert found.tokens.value == pytest.approx(true.tokens.value, rel=0.1)
        hits += abs(found.chunks.value - true.chunks.value) <= found.chunks.spread
    assert hits >= 8


def test_of_one_large_file_as_much_is_cut_as_there_is_time_for(book):
    spent = 0.0

    def chunk_ids(text: str) -> tuple[int, ...]:
        nonlocal spent
        spent += len(text)
        return tuple(text.encode())

    clock = {"chunk_ids": chunk_ids, "now": lambda: spent}
    true = count([book], 1 << 30, seconds=1e12, **clock)
    found = count([book], 1 << 30, seconds=spent / 2, **clock)
    assert true.whole
    assert (found.whole, found.cut_short, found.read_sources) == (False, True, 1)
    assert 5000 < sum(len(text) for text, _ in found.chunks_read) < true.source_bytes
    assert found.chunks.value == pytest.approx(true.chunks.value, rel=0.1)
    assert 0 < found.chunks.spread < 0.2 * true.chunks.value


def test_a_sample_is_cut_short_too_and_one_file_is_always_read(many):
    for size in (60_000, 1 << 30):
        found = count([many], size, seconds=0, now=steady())
        assert (found.cut_short, found.read_sources) == (True, 1)
        assert found.chunks.spread > found.chunks.value  # one file gives no estimate of the error


def test_nothing_to_read(tmp_path):
    with pytest.raises(UsageError, match="Nothing to plan for: no supported files found; name other files"):
        count([tmp_path], 1000)
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(UsageError, match=r"blank\.txt: no text found"):
        count([tmp_path], 1000)
