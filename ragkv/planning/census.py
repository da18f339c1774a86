"""Estimate how many documents, chunks and tokens a set of files will make, without reading all of it.

Every file is listed. If there is much text, the ingest's own reader and chunker process a sample. Files are drawn with
replacement and a probability proportional to their size. Then the amount per byte of a draw, times all bytes, is an
unbiased estimate (Hansen and Hurwitz), whose error follows from the spread between the draws. If all files should be
read but time runs out, the files that were read, in random order, are extrapolated by size.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ragkv.errors import UsageError
from ragkv.ingest.chunker import split_text
from ragkv.ingest.isolated import SourceReader
from ragkv.ingest.parser import Section
from ragkv.ingest.reader import SourceText, UnreadableSource
from ragkv.ingest.source import Skipped, SourceFile, find_sources
from ragkv.planning.stopwatch import Stopwatch

__all__ = ["Census", "Estimate", "take_census"]

WINDOW = 1 << 18  # characters that a draw cuts, because a book need not be cut whole
LEAST_WINDOW = 1 << 12
LEAST_DRAWS, MOST_DRAWS = 30, 400
PROBE = 1 << 16
"""If there are more bytes than this, a part is read first to find out how much there is time for."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number and its 1.96 standard errors, which are 0 if everything was counted."""

    value: float
    spread: float = 0.0

    def to_json(self) -> dict[str, float]:
        return {key: round(value, 3) for key, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """What an ingest of these files would make.

    `tokens` counts the tokens of all chunks; `distinct` is the share that has to be encoded, because equal chunks share
    one KV. `read_seconds` is the time to read and cut everything, including the start of the parsers. `chunks_read` are
    the sample's chunks (text and tokens) in random order. `read_sources` and `read_bytes` describe the files that the
    estimate is based on. `whole`: all files were read. `cut_short`: time ran out before all planned files were read.
    """

    sources: int
    source_bytes: int
    skipped: tuple[Skipped, ...]
    read_sources: int
    read_bytes: int
    whole: bool
    cut_short: bool
    documents: Estimate
    chunks: Estimate
    tokens: Estimate
    distinct: float
    read_seconds: float
    chunks_read: tuple[tuple[str, Ids], ...]


@dataclass(frozen=True, slots=True)
class _Draw:
    """The result of reading one file. If only a window of it was cut, counts are scaled to the whole file."""

    size: int
    chunks: float
    tokens: float
    seconds: float
    pieces: tuple[tuple[str, Ids], ...]


def take_census(
    paths: Sequence[Path],
    *,
    chunk_ids: Callable[[str], Ids],
    max_tokens: int,
    sample_bytes: int,
    seed: int = 0,
    seconds: float = math.inf,
    stopwatch: Stopwatch | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> Census:
    """Count the files in `paths`: all of them if they have at most `sample_bytes`, else a sample of about that size.

    `chunk_ids` returns a chunk's tokens as in the prompt. After `seconds` no further file is read, unless none had text
    so far. Raises UsageError for a missing path, or if no file can be read.
    """
    with SourceReader() as reader:
        cutter = _Cutter(reader, chunk_ids, max_tokens, stopwatch or Stopwatch())
        return _count(paths, cutter, sample_bytes=sample_bytes, seed=seed, seconds=seconds, on_step=on_step)


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Reads files, cuts them into chunks, and measures how long that takes."""

    reader: SourceReader
    chunk_ids: Callable[[str], Ids]
    max_tokens: int
    watch: Stopwatch

    def draw(self, source: SourceFile, generator: random.Random, *, window: int | None) -> _Draw | UnreadableSource:
        """Read a file and cut all of it, or a random part of `window` characters."""
        watch = self.watch
        started = watch.now()
        try:
            text = self.reader.read(source)
        except UnreadableSource as error:
            return error
        read = watch.now() - started
        length = len(text.text)
        if window is not None and length > window:
            text = _window(text, generator.randrange(length - window + 1), window)
        share = len(text.text) / length
        started = watch.now()
        spans = split_text(text, count_tokens=lambda t: len(self.chunk_ids(t)), max_tokens=self.max_tokens)
        pieces = [(span.text, self.chunk_ids(span.text)) for span in spans]
        cut = watch.now() - started
        tokens = sum(len(ids) for _, ids in pieces)
        return _Draw(source.size, len(pieces) / share, tokens / share, read + cut / share, tuple(pieces))

    def warm_up(self, sources: Sequence[SourceFile]) -> float:
        """Load the parsers of all formats, as an ingest does once, and return the seconds that it took."""
        seconds = 0.0
        for source in {source.media_type: source for source in sorted(sources, key=lambda s: -s.size)}.values():
            took = []
            for _ in range(2):
                started = self.watch.now()
                self.draw(source, random.Random(0), window=LEAST_WINDOW)
                took.append(self.watch.now() - started)
            seconds += max(0.0, took[0] - took[1])
        return seconds

    def affordable(self, sources: Sequence[SourceFile], *, seed: int, deadline: float) -> float:
        """The number of bytes that there is time for, judged by a part of one file; 0 if the time is over."""
        drawn = random.Random(seed).choices(sources, weights=[source.size for source in sources])
        found = self.draw(drawn[0], random.Random(seed), window=PROBE // 4)
        left = max(0.0, deadline - self.watch.now())
        if isinstance(found, UnreadableSource) or found.seconds <= 0:
            return math.inf if left else 0.0
        return left * found.size / found.seconds


def _count(
    paths: Sequence[Path],
    cutter: _Cutter,
    *,
    sample_bytes: int,
    seed: int,
    seconds: float,
    on_step: Callable[[int, int], None] | None,
) -> Census:
    watch = cutter.watch
    deadline = watch.now() + seconds
    sources, skipped = find_sources(paths)
    total = sum(source.size for source in sources)
    if not sources:
        reasons = "; ".join(f"{s.path}: {s.reason}" for s in skipped[:3])
        raise UsageError(f"Nothing to plan for: {reasons or 'no supported files found'}; name other files.")
    generator = random.Random(seed)
    whole = total <= sample_bytes
    startup = cutter.warm_up(sources)
    affordable, window = math.inf, WINDOW
    if total > PROBE and seconds < math.inf:
        affordable = cutter.affordable(sources, seed=seed, deadline=deadline)
        window = min(WINDOW, max(LEAST_WINDOW, round(affordable / LEAST_DRAWS)))
    reduced = affordable < min(total, sample_bytes)
    whole = whole and not reduced
    drawn = (
        random.Random(seed).sample(sources, len(sources))
        if whole
        else _draw(sources, min(sample_bytes, affordable), window, generator)
    )
    kept: dict[str, _Draw | UnreadableSource] = {}
    draws: list[_Draw] = []
    for number, source in enumerate(drawn):
        if watch.now() >= deadline and any(draw.pieces for draw in draws):
            break
        if on_step is not None:
            on_step(number, len(drawn))
        found = kept.get(source.document_id)
        if found is None:
            found = cutter.draw(source, generator, window=None if whole else window)
            # every draw of a file larger than the window cuts another part
            if whole or source.size <= window or isinstance(found, UnreadableSource):
                kept[source.document_id] = found
        if isinstance(found, UnreadableSource):
            draws.append(_Draw(source.size, 0, 0, 0, ()))
        else:
            draws.append(found)
    cut_short, drawn = len(draws) < len(drawn), drawn[: len(draws)]
    failed = {of: found for of, found in sorted(kept.items()) if isinstance(found, UnreadableSource)}
    unread = {of: Skipped(path=Path(of), reason=found.reason) for of, found in failed.items()}
    pieces = [piece for draw in {id(draw): draw for draw in draws}.values() for piece in draw.pieces]
    if not pieces:
        reasons = "; ".join(f"{s.path}: {s.reason}" for s in list(unread.values())[:3])
        raise UsageError(f"Nothing to plan for: {reasons or 'no text found'}; name other files.")
    tokens = sum(len(ids) for _, ids in pieces)
    generator.shuffle(pieces)
    readable = sum(1 for source in drawn if source.document_id not in unread) / len(drawn)
    sizes = {source.document_id: source.size for source in drawn}
    all_read = whole and not cut_short

    def estimate(amounts: Sequence[float]) -> Estimate:
        found = list(zip(amounts, (draw.size for draw in draws), strict=True))
        return _by_size(found, total, len(sources)) if whole else _estimate(found, total)

    return Census(
        sources=len(sources),
        source_bytes=total,
        skipped=(*skipped, *unread.values()),
        read_sources=len(sizes),
        read_bytes=sum(sizes.values()),
        whole=all_read,
        cut_short=cut_short or reduced,
        documents=Estimate(value=len(sources) - len(unread) if all_read else round(len(sources) * readable)),
        chunks=estimate([draw.chunks for draw in draws]),
        tokens=estimate([draw.tokens for draw in draws]),
        distinct=sum(len(ids) for ids in {ids for _, ids in pieces}) / tokens,
        read_seconds=startup + estimate([draw.seconds for draw in draws]).value,
        chunks_read=tuple(pieces),
    )


def _draw(
    sources: Sequence[SourceFile], sample_bytes: float, window: int, generator: random.Random
) -> list[SourceFile]:
    """Draw a fixed number of files that will read about `sample_bytes`."""
    sizes = [source.size for source in sources]
    mean = sum(size * min(size, window) for size in sizes) / sum(sizes)
    count = round(sample_bytes / mean)
    return generator.choices(sources, weights=sizes, k=min(MOST_DRAWS, max(LEAST_DRAWS, count)))


def _window(text: SourceText, start: int, length: int) -> SourceText:
    """`length` characters of the text from `start` on, with their sections."""
    end = start + length
    sections = tuple(
        Section(
            start=max(section.start, start) - start,
            end=min(section.end, end) - start,
            page=section.page,
            heading=section.heading,
        )
        for section in text.sections
        if section.start < end and section.end > start
    )
    return SourceText(text=text.text[start:end], content_hash="", title=text.title, sections=sections)


def _estimate(found: Sequence[tuple[float, int]], total: int) -> Estimate:
    """`total` times the mean of (amount / size) over draws that are proportional to size."""
    rates = [amount / size for amount, size in found]
    mean = statistics.fmean(rates)
    error = statistics.stdev(rates) / len(rates) ** 0.5 if len(rates) > 1 else mean
    return Estimate(value=total * mean, spread=1.96 * total * error)


def _by_size(found: Sequence[tuple[float, int]], total: int, sources: int) -> Estimate:
    """`total` times (sum of amounts / sum of sizes) over a uniform sample of the `sources`; exact if all were read.

    The spread is that of a ratio estimate without replacement (Cochran, Sampling Techniques, 6.4).
    """
    n, amounts, sizes = len(found), sum(amount for amount, _ in found), sum(size for _, size in found)
    if n == sources:
        return Estimate(value=amounts)
    ratio = amounts / sizes
    if n == 1:
        return Estimate(value=total * ratio, spread=1.96 * total * ratio)
    squares = sum((amount - ratio * size) ** 2 for amount, size in found) / (n - 1)
    error = ((1 - n / sources) * squares / n) ** 0.5 / (sizes / n)
    return Estimate(value=total * ratio, spread=1.96 * total * error)
