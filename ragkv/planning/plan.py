"""Predict what an ingest will cost and what it will gain, before anything is ingested.

Counts of documents, chunks and tokens come from the files, rates from a trial with a few of their chunks on the same
model, codecs and disk (`ChunkCalibration`). The plan multiplies the two. Only a temporary folder is written to.

If there is much text, the ingest's own reader and chunker process only a sample. Files are drawn with replacement and a
probability proportional to their size. Then the amount per byte of a draw, times all bytes, is an unbiased estimate
(Hansen and Hurwitz), whose error follows from the spread between the draws. If all files should be read but time runs
out, the files that were read, in random order, are extrapolated by size.

For an existing index, `plan_budgets` estimates which share of KV lookups each KV budget would serve from the store. It
simulates the eviction over known questions, or over questions that follow Zipf's law.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ragkv.errors import UsageError
from ragkv.ingest.chunker import split_text
from ragkv.ingest.parser import Section
from ragkv.ingest.sandbox import SourceReader, SourceText, UnreadableSource
from ragkv.ingest.source import GivenPath, Skipped, SourceFile, find_sources, flat_paths
from ragkv.pipeline import RagKV
from ragkv.planning.calibration import (
    ChunkCalibration,
    Clock,
    CodecCalibration,
    EmbedCalibration,
    EngineCalibration,
    Repeats,
    TimingQuality,
)
from ragkv.store import codec_names
from ragkv.store.maintenance.eviction import simulate

WINDOW = 1 << 18  # characters that a draw cuts, because a book need not be cut completely
LEAST_WINDOW = 1 << 12
LEAST_DRAWS, MOST_DRAWS = 30, 400
PROBE = 1 << 16
"""With more bytes than this, a part is read first to find out how much there is time for."""

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number and its 1.96 standard errors, which are 0 if everything was counted."""

    value: float
    spread: float = 0.0

    def to_json(self) -> dict[str, float]:
        return {key: round(value, 3) for key, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusEstimate:
    """What an ingest of these files would make.

    `tokens` counts the tokens of all chunks; `seen` are those before a chunk in its document that are within the window
    of `[encoding] context`, on average; `distinct` is the share that has to be encoded, because equal chunks share
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
    seen: float
    read_seconds: float
    chunks_read: tuple[tuple[str, Ids], ...]


@dataclass(frozen=True, slots=True)
class _Draw:
    """The result of reading one file. If only a window of it was cut, counts are scaled to the whole file."""

    size: int
    chunks: float
    tokens: float
    seconds: float
    texts: tuple[tuple[str, Ids], ...]
    seen: int = 0
    """Tokens within the windows of all `texts`."""


def estimate_corpus(
    paths: Sequence[Path | SourceFile],
    *,
    chunk_ids: Callable[[str], Ids],
    max_tokens: int,
    sample_bytes: int,
    window: int = 0,
    seed: int = 0,
    seconds: float = math.inf,
    now: Clock | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> CorpusEstimate:
    """Count the files in `paths`: all of them if they have at most `sample_bytes`, else a sample of about that size.

    `chunk_ids` returns a chunk's tokens as in the prompt, and `window` is `[encoding] context`. After `seconds` no
    further file is read, unless none had text so far. Raises UsageError for a missing path, or if no file can be read.
    """
    now = now or perf_counter
    deadline = now() + seconds
    sources, skipped = find_sources(paths)
    total = sum(source.size for source in sources)
    if not sources:
        reasons = "; ".join(f"{s.path}: {s.reason}" for s in skipped[:3])
        raise UsageError(f"Nothing to plan for: {reasons or 'no supported files found'}; name other files.")
    generator = random.Random(seed)
    whole = total <= sample_bytes
    kept: dict[str, _Draw | UnreadableSource] = {}
    draws: list[_Draw] = []
    with SourceReader() as reader:
        cutter = _Cutter(reader, chunk_ids, max_tokens, window, now)
        startup = cutter.warm_up(sources)
        affordable, most = math.inf, WINDOW
        if total > PROBE and seconds < math.inf:
            affordable = cutter.affordable(sources, seed=seed, deadline=deadline)
            most = min(WINDOW, max(LEAST_WINDOW, round(affordable / LEAST_DRAWS)))
        reduced = affordable < min(total, sample_bytes)
        whole = whole and not reduced
        drawn = (
            random.Random(seed).sample(sources, len(sources))
            if whole
            else _draw(sources, min(sample_bytes, affordable), most, generator)
        )
        for number, source in enumerate(drawn):
            if now() >= deadline and any(draw.texts for draw in draws):
                break
            if on_step is not None:
                on_step(number, len(drawn))
            found = kept.get(source.document_id)
            if found is None:
                found = cutter.draw(source, generator, window=None if whole else most)
                # every draw of a file larger than the window cuts another part
                if whole or source.size <= most or isinstance(found, UnreadableSource):
                    kept[source.document_id] = found
            if isinstance(found, UnreadableSource):
                draws.append(_Draw(source.size, 0, 0, 0, ()))
            else:
                draws.append(found)
    cut_short, drawn = len(draws) < len(drawn), drawn[: len(draws)]
    failed = {of: found for of, found in sorted(kept.items()) if isinstance(found, UnreadableSource)}
    unread = {of: Skipped(path=Path(of), reason=found.reason) for of, found in failed.items()}
    distinct = {id(draw): draw for draw in draws}.values()
    texts = [text for draw in distinct for text in draw.texts]
    if not texts:
        reasons = "; ".join(f"{s.path}: {s.reason}" for s in list(unread.values())[:3])
        raise UsageError(f"Nothing to plan for: {reasons or 'no text found'}; name other files.")
    tokens = sum(len(ids) for _, ids in texts)
    generator.shuffle(texts)
    readable = sum(1 for source in drawn if source.document_id not in unread) / len(drawn)
    sizes = {source.document_id: source.size for source in drawn}
    all_read = whole and not cut_short

    def estimate(amounts: Sequence[float]) -> Estimate:
        found = list(zip(amounts, (draw.size for draw in draws), strict=True))
        return _by_size(found, total, len(sources)) if whole else _estimate(found, total)

    return CorpusEstimate(
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
        distinct=sum(len(ids) for ids in {ids for _, ids in texts}) / tokens,
        seen=sum(draw.seen for draw in distinct) / len(texts),
        read_seconds=startup + estimate([draw.seconds for draw in draws]).value,
        chunks_read=tuple(texts),
    )


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Reads files, cuts them into chunks, and measures how long that takes."""

    reader: SourceReader
    chunk_ids: Callable[[str], Ids]
    max_tokens: int
    window: int
    now: Clock

    def draw(self, source: SourceFile, generator: random.Random, *, window: int | None) -> _Draw | UnreadableSource:
        """Read a file and cut all of it, or a random part of `window` characters."""
        started = self.now()
        try:
            text = self.reader.read(source)
        except UnreadableSource as error:
            return error
        read = self.now() - started
        length = len(text.text)
        if window is not None and length > window:
            text = _window(text, generator.randrange(length - window + 1), window)
        share = len(text.text) / length
        started = self.now()
        spans = split_text(text, count_tokens=lambda t: len(self.chunk_ids(t)), max_tokens=self.max_tokens)
        texts = [(span.text, self.chunk_ids(span.text)) for span in spans]
        cut = self.now() - started
        ends = list(accumulate(len(ids) for _, ids in texts))
        seen, tokens = sum(min(end, self.window) for end in ends[:-1]), ends[-1] if ends else 0
        return _Draw(source.size, len(texts) / share, tokens / share, read + cut / share, tuple(texts), seen)

    def warm_up(self, sources: Sequence[SourceFile]) -> float:
        """Load the parsers of all formats, as an ingest does once, and return the seconds that it took."""
        seconds = 0.0
        for source in {source.media_type: source for source in sorted(sources, key=lambda s: -s.size)}.values():
            took = []
            for _ in range(2):
                started = self.now()
                self.draw(source, random.Random(0), window=LEAST_WINDOW)
                took.append(self.now() - started)
            seconds += max(0.0, took[0] - took[1])
        return seconds

    def affordable(self, sources: Sequence[SourceFile], *, seed: int, deadline: float) -> float:
        """The number of bytes that there is time for, judged by a part of one file; 0 if the time is over."""
        drawn = random.Random(seed).choices(sources, weights=[source.size for source in sources])
        found = self.draw(drawn[0], random.Random(seed), window=PROBE // 4)
        left = max(0.0, deadline - self.now())
        if isinstance(found, UnreadableSource) or found.seconds <= 0:
            return math.inf if left else 0.0
        return left * found.size / found.seconds


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


SAMPLE_BYTES = 8 << 20
SECONDS = 30.0
"""The default time for everything except loading the model."""
_READING = 1 / 3
"""The share of the time after which no further file is read."""
CODECS = ("raw", "half", "zstd", "q8", "int8", "int4")
MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """The seconds of each part of the ingest. `start` is the time to load parsers and embedder once."""

    start: float
    read: float
    encode: float
    embed: float
    write: float

    @property
    def total(self) -> float:
        return self.start + self.read + self.encode + self.embed + self.write

    def to_json(self) -> dict[str, float]:
        return {**{name: round(value, 3) for name, value in asdict(self).items()}, "total": round(self.total, 3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecPlan:
    """One codec for all documents: the bytes of KV (as in `ragkv stats`), and when loading is worth it.

    Seconds are per token of one encoding: loading from the disk (`cold_seconds`, None if it could not be measured) and
    from the page cache (`warm_seconds`), to be compared with `Plan.recompute_seconds`. `least_disk` is the break-even:
    on a disk with fewer bytes per second, recomputing is faster. It is None if decoding alone takes longer than
    recomputing.
    """

    codec: str
    kv_bytes: Estimate
    bytes_per_million_tokens: float
    cold_seconds: float | None
    warm_seconds: float
    least_disk: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "codec": self.codec,
            "kv_bytes": self.kv_bytes.to_json(),
            "bytes_per_million_tokens": round(self.bytes_per_million_tokens),
            "cold_us_per_token": None if self.cold_seconds is None else round(self.cold_seconds * MILLION, 3),
            "warm_us_per_token": round(self.warm_seconds * MILLION, 3),
            "least_disk_bytes_per_second": None if self.least_disk is None else round(self.least_disk),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The prediction. `disk_bytes` is the size of the store's file: KV in the chosen codec, text, vectors, free pages.

    `recompute_seconds` per token is the cheaper one of encoding and prefilling. After `questions` questions, the saved
    prefill time has repaid the ingest; it is None if no question gets faster.

    `fastest` and `slowest` are the range of `seconds` over the repeats. `left_out` has a sentence for
    everything that there was no time for within `asked_seconds`. `spent_seconds` is the time that the plan took without
    loading the model.
    """

    model: str
    device: str
    dtype: str
    parameters: int
    codec: str
    encodings: tuple[str, ...]
    default_engine: str
    chunk_tokens: int
    beside: tuple[float, float] | None
    """Tokens per second at which another runtime prefills and decodes."""
    corpus: CorpusEstimate
    trial_chunks: int
    trial_tokens: int
    encode_seconds: float
    """Seconds per token of one encoding."""
    recompute_seconds: float
    seconds: Duration
    fastest: Duration
    slowest: Duration
    encode: Repeats
    trust: TimingQuality
    left_out: tuple[str, ...]
    asked_seconds: float
    spent_seconds: float
    codecs: tuple[CodecPlan, ...]
    disk_bytes: Estimate
    vector_bytes: float
    engines: tuple[EngineCalibration, ...]
    questions: float | None

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv plan --json` prints."""
        corpus = self.corpus
        return {
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "parameters": self.parameters,
            "codec": self.codec,
            "encodings": list(self.encodings),
            "chunk_tokens": self.chunk_tokens,
            "files": corpus.sources,
            "source_bytes": corpus.source_bytes,
            "skipped": [{"path": str(s.path), "reason": s.reason} for s in corpus.skipped],
            "sample": {
                "whole": corpus.whole,
                "cut_short": corpus.cut_short,
                "files": corpus.read_sources,
                "bytes": corpus.read_bytes,
                "trial_chunks": self.trial_chunks,
                "trial_tokens": self.trial_tokens,
            },
            "documents": corpus.documents.to_json(),
            "chunks": corpus.chunks.to_json(),
            "tokens": corpus.tokens.to_json(),
            "distinct": round(corpus.distinct, 4),
            "context_tokens": round(corpus.seen, 1),
            "encode_tokens_per_second": round(1 / self.encode_seconds, 1),
            "recompute_us_per_token": round(self.recompute_seconds * MILLION, 3),
            "encode_us_per_token": self.encode.to_json(1e-6),
            "seconds": self.seconds.to_json(),
            "seconds_fastest": self.fastest.to_json(),
            "seconds_slowest": self.slowest.to_json(),
            "trust": self.trust.to_json(),
            "left_out": list(self.left_out),
            "asked_seconds": self.asked_seconds,
            "spent_seconds": round(self.spent_seconds, 1),
            "codecs": [codec.to_json() for codec in self.codecs],
            "disk_bytes": self.disk_bytes.to_json(),
            "vector_bytes": round(self.vector_bytes),
            "first_token": [
                {
                    "engine": found.engine,
                    "ms": round(found.first_token_ms, 3),
                    "prefill_ms": round(found.prefill_ms, 3),
                    "ratio": round(found.prefill_ms / found.first_token_ms, 2),
                    "ms_low": round(found.first_token.low * 1000, 3),
                    "ms_high": round(found.first_token.high * 1000, 3),
                    "repeats": len(found.first_token.seconds),
                    "chunks": found.chunks,
                    "context_tokens": found.context_tokens,
                    "second_token_ms": round(found.second_token.value * 1000, 3),
                    "token_ms": round(found.token.value * 1000, 3),
                    "overtaken_after": None if self.beside is None else found.overtaken_after(*self.beside),
                }
                for found in self.engines
            ],
            "default_engine": self.default_engine,
            "questions_until_repaid": None if self.questions is None else round(self.questions, 1),
        }


def plan_ingest(
    *paths: GivenPath | Iterable[GivenPath],
    device: str | None = None,
    folder: Path | None = None,
    sample_bytes: int = SAMPLE_BYTES,
    seed: int = 0,
    seconds: float = SECONDS,
    beside: tuple[float, float] | None = None,
    now: Clock | None = None,
    on_step: Callable[[int, int, str], None] | None = None,
    **settings: Any,
) -> Plan:
    """Predict `RagKV.create(…, **settings).ingest(*paths)`; `settings` are the fields of `IndexConfig`.

    More than `sample_bytes` of documents are sampled. The trial's store is made in a temporary folder under `folder`,
    so that this disk is measured, and removed afterwards. The plan takes about `seconds` plus the time to load the
    model; a step that has begun is finished. `beside` has the tokens per second at which another runtime prefills and
    decodes; each engine then gets the number of the token from which that runtime would be ahead.
    `on_step(done, total, what)` gets a total of 0 if it is not known. Raises UsageError for a missing path, files
    without text, engines that store no KV, or invalid `seconds` or `beside`; and ConfigError and ModelLoadError like
    `RagKV.create`.
    """
    if not 0 < seconds < math.inf:
        raise UsageError(f"--seconds must be more than 0, not {seconds}.")
    if beside is not None and not all(0 < rate < math.inf for rate in beside):
        raise UsageError(f"--beside takes two rates above 0, in tokens/s, not {beside[0]} {beside[1]}.")
    step = on_step or (lambda done, total, what: None)
    now = now or perf_counter
    try:
        place = tempfile.TemporaryDirectory(prefix="ragkv-plan-", dir=folder)
    except OSError as error:
        raise UsageError(f"A temporary folder cannot be made in {folder or 'the system'}: {error.strerror}.") from error
    step(0, 0, "loading the model")
    with place as name, RagKV.create(Path(name) / "index", device=device, **settings) as rag:
        if not rag.index.recipe.encodings:
            raise UsageError(
                f"Engine {', '.join(rag.config.engines)} stores no KV, so there is nothing to plan; "
                "add one of ape, block and pced to --engines."
            )
        begun = now()
        step(0, 0, "reading")
        corpus = estimate_corpus(
            flat_paths(paths),
            chunk_ids=lambda text: rag.prompt.chunk_ids(rag.model.tokens, text),
            max_tokens=rag.config.chunk_tokens,
            sample_bytes=sample_bytes,
            window=rag.index.recipe.context,
            seed=seed,
            seconds=seconds * _READING,
            now=now,
            on_step=lambda done, total: step(done, total, "reading"),
        )
        codecs = [rag.config.codec, *(c for c in CODECS if c != rag.config.codec and c in codec_names())]
        steps = len(codecs) + 3
        step(0, steps, "encoding")
        trial = ChunkCalibration(
            rag, corpus.chunks_read, Path(name), now=now, deadline=begun + seconds, seen=round(corpus.seen)
        )
        step(1, steps, "embedding")
        embedding = trial.embedding()
        per_document = corpus.chunks.value / max(1.0, corpus.documents.value)
        step(2, steps, f"codec {codecs[0]}")
        tried = [trial.codec(codecs[0], per_document=per_document, embedded=embedding.texts)]
        step(3, steps, "first token")
        engines = trial.engines(list(dict.fromkeys((rag.config.default_engine, *rag.config.engines))))
        for number, codec in enumerate(codecs[1:], start=4):
            if not trial.left:
                break
            step(number, steps, f"codec {codec}")
            tried.append(trial.codec(codec, per_document=per_document, embedded=embedding.texts))
        step(steps, steps, "done")
        plan = _plan(rag, corpus, trial, tried, engines, embedding)
        left_out = _left_out(rag, corpus, trial, codecs[len(tried) :], engines)
        return replace(plan, beside=beside, asked_seconds=seconds, spent_seconds=now() - begun, left_out=left_out)


def _left_out(
    rag: RagKV,
    corpus: CorpusEstimate,
    trial: ChunkCalibration,
    codecs: Sequence[str],
    engines: Sequence[EngineCalibration],
) -> tuple[str, ...]:
    """Sentences about what there was no time for."""
    found = []
    if corpus.cut_short:
        read, files = corpus.read_sources, corpus.sources
        few = f"Parts of {read:,} of {files:,} files" if read < files else "Parts of the files"
        found.append(f"{few} were read, and the rest was extrapolated.")
    if codecs:
        found.append(f"Codec {' and '.join(codecs)} {'was' if len(codecs) == 1 else 'were'} not tried.")
    wanted = min(rag.config.top_k, len(trial.chunks))
    if engines[0].chunks < wanted:
        found.append(f"First tokens are over {engines[0].chunks} of {wanted} chunks.")
    return tuple(found)


def _plan(
    rag: RagKV,
    corpus: CorpusEstimate,
    trial: ChunkCalibration,
    tried: Sequence[CodecCalibration],
    engines: Sequence[EngineCalibration],
    embedding: EmbedCalibration,
) -> Plan:
    """The product of corpus and trial. The caller fills in what is left out, and the times of the whole plan."""
    encodings = rag.index.recipe.encodings
    tokens, own = corpus.tokens, tried[0]
    prefill = engines[0].prefill_ms / 1000 / (engines[0].context_tokens + len(trial.prefix_ids))
    recompute = min(trial.encode.value, prefill)
    stored = _times(tokens, corpus.distinct)

    def lasts(encode: float, embed: float) -> Duration:
        return Duration(
            start=embedding.start,
            read=corpus.read_seconds,
            encode=stored.value * len(encodings) * encode,
            embed=tokens.value * embed,
            write=stored.value * own.write_seconds,
        )

    encode, embed = trial.encode, embedding.repeats
    seconds = lasts(encode.value, embed.value)
    first = engines[0]
    saved = (first.prefill_ms - first.first_token_ms) / 1000
    return Plan(
        model=rag.config.model,
        device=str(rag.model.device),
        dtype=str(rag.model.dtype).removeprefix("torch."),
        parameters=rag.model.parameters,
        codec=rag.config.codec,
        encodings=tuple(encoding.value for encoding in encodings),
        default_engine=rag.config.default_engine,
        chunk_tokens=rag.config.chunk_tokens,
        beside=None,
        corpus=corpus,
        trial_chunks=len(trial.chunks),
        trial_tokens=trial.tokens,
        encode_seconds=encode.value,
        recompute_seconds=recompute,
        seconds=seconds,
        fastest=lasts(encode.low, embed.low),
        slowest=lasts(encode.high, embed.high),
        encode=encode,
        trust=TimingQuality.of({"encoding": encode, "prefill": first.prefill}),
        left_out=(),
        asked_seconds=0.0,
        spent_seconds=0.0,
        codecs=tuple(
            CodecPlan(
                codec=found.codec,
                kv_bytes=_times(stored, found.bytes),
                bytes_per_million_tokens=found.bytes * MILLION,
                cold_seconds=found.cold_seconds,
                warm_seconds=found.warm_seconds,
                least_disk=(
                    found.bytes / len(encodings) / (recompute - found.warm_seconds)
                    if found.warm_seconds < recompute
                    else None
                ),
            )
            for found in sorted(tried, key=lambda found: -found.bytes)
        ),
        disk_bytes=_times(stored, own.disk_bytes),
        vector_bytes=tokens.value * own.vector_bytes,
        engines=tuple(engines),
        questions=seconds.total / saved if saved > 0 else None,
    )


def _times(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(value=estimate.value * factor, spread=estimate.spread * factor)


SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
READS = 200_000
"""The maximum number of reads in a simulation, which has ten reads per chunk of the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPlan:
    """A budget, as a share of all KV in one encoding and in bytes.

    `hits` is the share of chunks whose KV is stored when a question reads them, from an empty start; `later` that of
    the second half, when most of the wanted KV has been encoded once. `saved_seconds` are those of a thousand questions
    of the second half; None if no encoding rate is known.
    """

    share: float
    bytes: int
    hits: float
    later: float
    saved_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPlans:
    """The budgets, and the simulated load: `reads` of `distinct` chunks among `chunks`, from `source`."""

    source: str
    chunks: int
    bytes: int
    reads: int
    distinct: int
    top_k: int
    rooms: tuple[BudgetPlan, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv plan --index --json` prints."""
        return asdict(self)


def plan_budgets(
    rag: RagKV,
    *,
    questions: Sequence[Mapping[str, Any]] | None = None,
    zipf: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
) -> BudgetPlans:
    """Simulate budgets over a log of `questions`, draws by Zipf's law with exponent `zipf`, or the uses on record.

    Raises UsageError if none of the three is available.
    """
    packet = rag.kv_loader.packet(*rag.index.encodings)
    lengths = {c.chunk_id: len(c.token_ids) + (packet.tokens if packet else 0) for c in rag.store.chunks()}
    sizes = {chunk_id: (length, rag.index.shape.nbytes(length)) for chunk_id, length in lengths.items()}
    most = rag.config.top_k if top_k is None else top_k
    draw = np.random.default_rng(seed)
    reads = min(10 * len(sizes), READS)
    names = sorted(sizes)
    if questions is not None:
        source = f"{len(questions)} questions"
        found = [rag.retrieve(each["question"], top_k=each.get("top_k") or most) for each in questions]
        asked = [scored.chunk.chunk_id for each in found for scored in each]
    elif zipf is not None:
        if not 0 <= zipf <= 10:
            raise UsageError(f"--zipf must be between 0 and 10, not {zipf:g}.")
        source = f"Zipf {zipf:g}, seed {seed}"
        asked = _sampled_reads(names, np.arange(1, len(names) + 1) ** -zipf, reads, draw, shuffle=True)
    else:
        source = "recorded uses"
        weights = _recorded(rag)
        asked = _sampled_reads(list(weights), np.array(list(weights.values())), reads, draw) if weights else []
    if not asked:
        raise UsageError(
            "There are no questions to go by: give a log with --questions FILE, or assume a law with --zipf 1.0."
        )
    rate = rag.store.ledger().seconds_per_token
    total = sum(nbytes for _, nbytes in sizes.values())
    rooms = tuple(_room(share, total, asked, sizes, most, rate) for share in SHARES)
    return BudgetPlans(
        source=source,
        chunks=len(sizes),
        bytes=total,
        reads=len(asked),
        distinct=len(set(asked)),
        top_k=most,
        rooms=rooms,
    )


def _room(
    share: float, total: int, asked: Sequence[str], sizes: Mapping[str, tuple[int, int]], top_k: int, rate: float
) -> BudgetPlan:
    room, half = int(share * total), len(asked) // 2
    whole, first = simulate(asked, room, sizes), simulate(asked[:half], room, sizes)
    later = (whole.hits - first.hits) / max(len(asked) - half, 1)
    tokens = sum(sizes[name][0] for name in asked[half:]) / max(len(asked) - half, 1)
    saved = round(1000 * top_k * later * tokens * rate, 3) if rate else None
    return BudgetPlan(share=share, bytes=room, hits=round(whole.rate, 4), later=round(later, 4), saved_seconds=saved)


def _sampled_reads(
    names: Sequence[str], weights: np.ndarray[Any, Any], reads: int, draw: np.random.Generator, *, shuffle: bool = False
) -> list[str]:
    """Draw this many names by weight; the weights are assigned in a random order or in the given one."""
    order = draw.permutation(len(names)) if shuffle else np.arange(len(names))
    return [names[order[n]] for n in draw.choice(len(names), reads, p=weights / weights.sum())] if len(names) else []


def _recorded(rag: RagKV) -> dict[str, float]:
    """Each chunk's recorded use, weighted by how recent it is, by its id; deleted chunks are left out."""
    rows = list(rag.store.uses())
    chunks = rag.store.chunks_of({row.owner for _, row in rows})
    top = max((row.weight for _, row in rows), default=0.0)
    found: dict[str, float] = {}
    for _, row in sorted(rows, key=lambda each: each[0]):
        if row.owner in chunks:
            name = chunks[row.owner].chunk_id
            found[name] = found.get(name, 0.0) + 2.0 ** max(row.weight - top, -1000.0)
    return found
