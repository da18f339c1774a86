"""Predict what an ingest costs, and whether stored KV pays, before anything is ingested.

Documents are read and cut as an ingest does: all of them, or as many, in random order, as there is time for; these
stand for the rest by size. A few of their chunks are ingested into a temporary index in several batches, and a question
over them is answered by the index's engine and by `full`, which prefills the same chunks. Sizes do not depend on the
machine. Times do: there is no verdict if the machine was busy or the repeats disagree.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any

from ragkv.errors import UsageError
from ragkv.ingest import ParseLimits, ReadyChunk, ReadyDocument, Section
from ragkv.ingest.chunker import split_text
from ragkv.ingest.sandbox import SourceReader, SourceText, UnreadableSource
from ragkv.ingest.source import GivenPath, Skipped, SourceFile, find_sources, flat_paths
from ragkv.pipeline import RagKV
from ragkv.store import KVIdentity, codec_from_config
from ragkv.store.record import encode_record
from ragkv.types import Capability, Document, Encoding, ScoredChunk
from ragkv.util.processors import cores

SECONDS = 30.0
"""The default time for everything except loading the model."""
WINDOW_CHARACTERS = 1 << 18
"""Of a longer text, only this much is cut into chunks."""
BATCHES = 3
"""Repeats of each timing, after one that warms up."""
WIDE_SHARE = 0.25
"""If repeats are further apart than this share of their median, there is no verdict."""
CODECS = ("raw", "half", "zstd", "q8", "int8", "int4")
QUESTION = "What do the documents say about it?"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusEstimate:
    """The documents, chunks and tokens that an ingest of `files` would make, judged by the `read_files`.

    `distinct` is the share of tokens that is encoded, because equal chunks share one KV. `read_seconds` is the time to
    read and cut everything.
    """

    files: int
    source_bytes: int
    read_files: int
    skipped: Sequence[Skipped]
    documents: float
    chunks: float
    tokens: float
    distinct: float
    read_seconds: float


def estimate_corpus(
    paths: Sequence[Path | SourceFile],
    count_tokens: Callable[[str], int],
    *,
    max_tokens: int,
    limits: ParseLimits | None = None,
    seconds: float = math.inf,
) -> tuple[CorpusEstimate, list[str]]:
    """Read and cut the files in random order; also the texts of the chunks. After `seconds` no further file is read,
    unless none had text so far. Raises UsageError for a missing path, or if no file can be read.
    """
    sources, skipped = find_sources(paths)
    unread: list[Skipped] = []
    read: list[tuple[int, float, float, float]] = []  # size, chunks, tokens, seconds
    texts: list[str] = []
    begun = perf_counter()
    with SourceReader(limits) as reader:
        for source in random.Random(0).sample(sources, len(sources)):
            started = perf_counter()
            if texts and started - begun >= seconds:
                break
            try:
                text = reader.read(source)
            except UnreadableSource as error:
                unread.append(Skipped(path=source.shown, reason=error.reason))
                read.append((source.size, 0, 0, 0))
                continue
            read_seconds, whole = perf_counter() - started, len(text.text)
            if whole > WINDOW_CHARACTERS:
                window = Section(start=0, end=WINDOW_CHARACTERS)
                text = SourceText(text=text.text[: window.end], content_hash="", sections=[window])
            chunks = split_text(text, count_tokens=count_tokens, max_tokens=max_tokens)
            texts += [chunk.text for chunk in chunks]
            share = len(text.text) / whole
            tokens = sum(count_tokens(chunk.text) for chunk in chunks)
            seconds_each = read_seconds + (perf_counter() - started - read_seconds) / share
            read.append((source.size, len(chunks) / share, tokens / share, seconds_each))
    if not texts:
        reasons = "; ".join(f"{skip.path}: {skip.reason}" for skip in [*skipped, *unread][:3])
        raise UsageError(f"Nothing to plan for: {reasons or 'no supported files found'}; name other files.")
    total = sum(source.size for source in sources)
    share = 1 if len(read) == len(sources) else sum(size for size, *_ in read) / total
    estimate = CorpusEstimate(
        files=len(sources),
        source_bytes=total,
        read_files=len(read),
        skipped=[*skipped, *unread],
        documents=round(len(sources) * (1 - len(unread) / len(read))),
        chunks=sum(chunks for _, chunks, _, _ in read) / share,
        tokens=sum(tokens for _, _, tokens, _ in read) / share,
        distinct=sum(map(len, set(texts))) / sum(map(len, texts)),
        read_seconds=sum(took for *_, took in read) / share,
    )
    return estimate, texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The prediction. `seconds` of an ingest by part; `kv_bytes` by codec, `disk_bytes` of the store's file with
    `codec`; the seconds of a first token with stored KV and with a prefill, over `context_tokens`.

    `no_verdict` has a sentence for each reason not to trust times. `repaid_after` is the number of questions whose
    saved time equals that of the ingest; None if no question gets faster.
    """

    model: str
    device: str
    dtype: str
    parameters: int
    engine: str
    codec: str
    encodings: Sequence[str]
    chunk_tokens: int
    corpus: CorpusEstimate
    seconds: Mapping[str, float]
    encode_tokens_per_second: float
    kv_bytes: Mapping[str, float]
    disk_bytes: float
    first_token_seconds: float
    prefill_seconds: float
    context_tokens: int
    no_verdict: Sequence[str]

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def pays(self) -> bool | None:
        """Whether a first token is faster with stored KV; None without a verdict."""
        return None if self.no_verdict else self.first_token_seconds < self.prefill_seconds

    @property
    def repaid_after(self) -> int | None:
        saved = self.prefill_seconds - self.first_token_seconds
        return math.ceil(self.total_seconds / saved) if self.pays else None

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv plan --json` prints."""
        fields = asdict(self) | {name: getattr(self, name) for name in ("total_seconds", "pays", "repaid_after")}
        for skip in fields["corpus"]["skipped"]:
            skip["path"] = str(skip["path"])
        return fields


def plan_ingest(
    *paths: GivenPath | Iterable[GivenPath],
    device: str | None = None,
    folder: Path | None = None,
    seconds: float = SECONDS,
    on_step: Callable[[int, int, str], object] = lambda done, total, what: None,
    **settings: Any,
) -> Plan:
    """Predict `RagKV.create(…, **settings).ingest(*paths)`; `settings` are the fields of `IndexConfig`.

    The temporary index is made under `folder`, so that this disk is measured. It takes about `seconds`, besides loading
    the model. Raises UsageError for a missing path, files without text and engines that store no KV, and the errors of
    `RagKV.create`.
    """
    if not 0 < seconds < math.inf:
        raise UsageError(f"--seconds must be more than 0, not {seconds}.")
    no_verdict = busy()
    try:
        place = tempfile.TemporaryDirectory(prefix="ragkv-plan-", dir=folder)
    except OSError as error:
        raise UsageError(f"A temporary folder cannot be made in {folder or 'the system'}: {error.strerror}.") from error
    on_step(0, 4, "loading the model")
    with place as name, RagKV.create(Path(name) / "index", device=device, **settings) as rag:
        if not rag.index.recipe.encodings:
            raise UsageError(
                f"Engine {', '.join(rag.config.engines)} stores no KV, so there is nothing to plan; "
                "add one of ape, block and pced to --engines."
            )
        tokens_of = partial(rag.index.prompt.chunk_ids, rag.model.tokens)
        on_step(1, 4, "reading")
        corpus, texts = estimate_corpus(
            flat_paths(paths),
            lambda text: len(tokens_of(text)),
            max_tokens=rag.config.chunk_tokens,
            limits=ParseLimits.of(rag.config.ingest),
            seconds=seconds / 3,
        )
        on_step(2, 4, "encoding")
        _ingest(rag, texts[:1], 0)  # loads the embedder, and warms up
        single = _ingest(rag, texts[:1], 1)
        affordable = seconds / 3 / BATCHES / (single.tokens * sum(single.per_token.values()))
        fitting = (rag.model.max_positions or math.inf) / 2 / rag.config.chunk_tokens
        size = max(1, math.floor(min(rag.config.top_k, affordable, fitting)))
        before = rag.store.stats()
        endless = cycle(dict.fromkeys(texts))
        batches = [_ingest(rag, list(islice(endless, size)), 2 + number) for number in range(BATCHES)]
        after = rag.store.stats()
        rates = {part: statistics.median(batch.per_token[part] for batch in batches) for part in single.per_token}
        on_step(3, 4, "answering")
        engine = rag.config.default_engine
        first, prefill = (_first_tokens(rag, name, seconds / 6) for name in (engine, "full"))
        repeats = {"encoding": [batch.per_token["encode"] for batch in batches], engine: first, "a prefill": prefill}
        no_verdict += [sentence for what, each in repeats.items() if (sentence := disagreement(what, each))]
        stored = corpus.tokens * corpus.distinct
        scale = stored / sum(batch.tokens for batch in batches)
        kv_bytes = scale * (after.kv_bytes - before.kv_bytes)
        sizes = _record_bytes(rag, tokens_of(max(texts[:size], key=len)))
        on_step(4, 4, "done")
        return Plan(
            model=rag.config.model,
            device=str(rag.model.device),
            dtype=str(rag.model.dtype).removeprefix("torch."),
            parameters=rag.model.parameters,
            engine=engine,
            codec=rag.config.codec,
            encodings=[encoding.value for encoding in rag.index.recipe.encodings],
            chunk_tokens=rag.config.chunk_tokens,
            corpus=corpus,
            seconds={"read": corpus.read_seconds} | {part: rate * stored for part, rate in rates.items()},
            encode_tokens_per_second=1 / rates["encode"],
            kv_bytes={codec: kv_bytes * nbytes / sizes[rag.config.codec] for codec, nbytes in sizes.items()},
            disk_bytes=scale * (after.used_bytes - before.used_bytes),
            first_token_seconds=statistics.median(first),
            prefill_seconds=statistics.median(prefill),
            context_tokens=batches[0].tokens,
            no_verdict=no_verdict,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The tokens of a batch's chunks, and the seconds for each of them by part of the work."""

    tokens: int
    per_token: Mapping[str, float]


def _ingest(rag: RagKV, texts: Sequence[str], number: int) -> _Batch:
    """Ingest these texts as the chunks of a document; the first is new to the index."""
    texts = [f"{number}. {text}" for text in texts]
    starts = accumulate((len(text) + 2 for text in texts), initial=0)
    name = f"plan-{number}"
    chunks = [
        ReadyChunk(text=text, start=start, chunk_id=f"{name}-{start}")
        for text, start in zip(texts, starts, strict=False)
    ]
    document = Document(document_id=name, source=name, content_hash=name, media_type="text/plain")
    report = rag.add_chunks([ReadyDocument(document=document, text="\n\n".join(texts), chunks=chunks)])
    parts = {"encode": report.encode_seconds, "embed": report.embed_seconds}
    parts["write"] = report.seconds - sum(parts.values())
    tokens = sum(len(chunk.token_ids) for chunk in rag.store.chunks(name))
    return _Batch(tokens=tokens, per_token={part: max(0.0, value) / tokens for part, value in parts.items()})


def _first_tokens(rag: RagKV, engine: str, seconds: float) -> list[float]:
    """Seconds to the first token over the chunks of each batch, which no question has read before."""
    repeats: list[float] = []
    begun = perf_counter()
    for number in range(1, 2 + BATCHES):
        if len(repeats) > 1 and perf_counter() - begun > seconds:
            break
        scored = [
            ScoredChunk(chunk=chunk, source="plan", retrieval_score=0.5, rerank_score=None, score=0.5)
            for chunk in rag.store.chunks(f"plan-{number}")
        ]
        timing = rag.query(QUESTION, chunks=scored, engine=engine, max_new_tokens=1).timing
        repeats.append((timing.load + timing.first_token) / 1000)
    return repeats[1:]  # the first warms up


def _record_bytes(rag: RagKV, token_ids: tuple[int, ...]) -> dict[str, int]:
    """The bytes of a chunk's record by codec, that of the index first; alone if the runtime stores its own states."""
    [kv] = rag.model.encode([token_ids])
    identity = KVIdentity(model="plan", encoding=Encoding.STANDALONE, prefix_ids=(), chunk_ids=token_ids)
    opaque = Capability.TENSORS in rag.model.missing_capabilities  # a state of the runtime's, which no codec changes
    codecs = dict.fromkeys((rag.config.codec, *(() if opaque else CODECS)))
    return {name: encode_record(kv, identity, codec_from_config({"id": name})).stored_bytes for name in codecs}


def busy(load: float | None = None) -> list[str]:
    """Why the machine is too busy to measure: its load average, or `load`, is above the number of idle cores."""
    number, load = cores(), os.getloadavg()[0] if load is None else load
    return [f"the machine is busy: its load is {load:.1f} on {number} cores"] if load > number - load else []


def disagreement(what: str, repeats: Sequence[float]) -> str:
    """Why these repeats of a measurement prove nothing; empty if they agree."""
    if len(repeats) < BATCHES:
        return f"there was only time to repeat {what} {len(repeats)} times"
    apart = (max(repeats) - min(repeats)) / statistics.median(repeats)
    return f"{len(repeats)} repeats of {what} are {apart:.0%} apart" if apart > WIDE_SHARE else ""
