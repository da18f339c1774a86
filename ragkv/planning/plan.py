"""Predict what an ingest will cost and what it will gain, before anything is ingested.

Counts come from a census of the files (`census`), and rates from a trial with a few of their chunks on the same model,
codecs and disk (`trial`). A plan is their product. Only a temporary folder is written to.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ragkv.config import NONE
from ragkv.errors import UsageError
from ragkv.pipeline import RagKV
from ragkv.planning.census import Census, Estimate, take_census
from ragkv.planning.stopwatch import Reading, Repeats, Stopwatch, Trust, waiting_share, weigh
from ragkv.planning.trial import CodecTrial, EncodeTrial, EngineTrial, try_codec, try_encoding, try_engines
from ragkv.store import codec_names

__all__ = ["SAMPLE_BYTES", "SECONDS", "CodecPlan", "Duration", "Plan", "plan_ingest"]

SAMPLE_BYTES = 8 << 20
SECONDS = 30.0
"""The default time for everything except loading the model."""
_UNTIL = {"reading": 0.35, "encoding": 0.6, "embedding": 0.7, "codecs": 0.85, "first token": 1.0}
"""When each part should be done, as a share of the time. Time that a part leaves over goes to the next."""
_ENCODE_SECONDS = 6.0
"""More time would not improve the estimate of encoding."""
CODECS = ("raw", "zstd", "int8", "int4")
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

    `fastest` and `slowest` are `seconds` according to the fastest and slowest repeats. `left_out` has a sentence for
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
    census: Census
    trial_chunks: int
    trial_tokens: int
    encode_seconds: float
    """Per token of one encoding."""
    recompute_seconds: float
    seconds: Duration
    fastest: Duration
    slowest: Duration
    encode: Repeats
    trust: Trust
    left_out: tuple[str, ...]
    asked_seconds: float
    spent_seconds: float
    codecs: tuple[CodecPlan, ...]
    disk_bytes: Estimate
    vector_bytes: float
    engines: tuple[EngineTrial, ...]
    questions: float | None

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv plan --json` prints."""
        census = self.census
        return {
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "parameters": self.parameters,
            "codec": self.codec,
            "encodings": list(self.encodings),
            "chunk_tokens": self.chunk_tokens,
            "files": census.sources,
            "source_bytes": census.source_bytes,
            "skipped": [{"path": str(s.path), "reason": s.reason} for s in census.skipped],
            "sample": {
                "whole": census.whole,
                "cut_short": census.cut_short,
                "files": census.read_sources,
                "bytes": census.read_bytes,
                "trial_chunks": self.trial_chunks,
                "trial_tokens": self.trial_tokens,
            },
            "documents": census.documents.to_json(),
            "chunks": census.chunks.to_json(),
            "tokens": census.tokens.to_json(),
            "distinct": round(census.distinct, 4),
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
                }
                for found in self.engines
            ],
            "default_engine": self.default_engine,
            "questions_until_repaid": None if self.questions is None else round(self.questions, 1),
        }


def plan_ingest(
    *paths: str | Path,
    device: str | None = None,
    folder: Path | None = None,
    sample_bytes: int = SAMPLE_BYTES,
    seed: int = 0,
    seconds: float = SECONDS,
    stopwatch: Stopwatch | None = None,
    on_step: Callable[[int, int, str], None] | None = None,
    **settings: Any,
) -> Plan:
    """Predict `RagKV.create(…, **settings).ingest(*paths)`; `settings` are the fields of `IndexConfig`.

    More than `sample_bytes` of documents are sampled. The trial's store is made in a temporary folder under `folder`,
    so that this disk is measured, and removed afterwards. The plan takes about `seconds` plus the time to load the
    model; a step that has begun is finished. `on_step(done, total, what)` gets a total of 0 if it is not known. Raises
    UsageError for a missing path, files without text, engines that store no KV, or invalid `seconds`; and ConfigError
    and ModelLoadError like `RagKV.create`.
    """
    if not 0 < seconds < math.inf:
        raise UsageError(f"--seconds must be more than 0, not {seconds}.")
    say = on_step or (lambda done, total, what: None)
    watch = stopwatch or Stopwatch()
    try:
        place = tempfile.TemporaryDirectory(prefix="ragkv-plan-", dir=folder)
    except OSError as error:
        raise UsageError(f"A temporary folder cannot be made in {folder or 'the system'}: {error.strerror}.") from error
    with place as name, _loaded(Path(name) / "index", device, settings, say) as rag:
        if not rag.index.recipe.encodings:
            raise UsageError(
                f"Engine {', '.join(rag.config.engines)} stores no KV, so there is nothing to plan; "
                "add one of ape, block and pced to --engines."
            )
        begun = watch.read()
        until = {part: begun.wall + share * seconds for part, share in _UNTIL.items()}

        def left(part: str) -> float:
            return max(0.0, until[part] - watch.now())

        say(0, 0, "reading")
        census = take_census(
            [Path(path) for path in paths],
            chunk_ids=lambda text: rag.prompt.chunk_ids(rag.model.tokens, text),
            max_tokens=rag.config.chunk_tokens,
            sample_bytes=sample_bytes,
            seed=seed,
            seconds=left("reading"),
            stopwatch=watch,
            on_step=lambda done, total: say(done, total, "reading"),
        )
        codecs = [rag.config.codec, *(c for c in CODECS if c != rag.config.codec and c in codec_names())]
        steps = len(codecs) + 3
        say(0, steps, "encoding")
        trial = try_encoding(rag, census.chunks_read, seconds=min(_ENCODE_SECONDS, left("encoding")), watch=watch)
        say(1, steps, "embedding")
        embedding = _embedding(rag, trial, left("embedding"), watch)
        tried: list[CodecTrial] = []
        for number, codec in enumerate(codecs, start=2):
            say(number, steps, f"codec {codec}")
            rest = left("codecs")
            if tried and not rest:
                break
            tried.append(
                try_codec(
                    rag,
                    trial,
                    codec,
                    Path(name) / codec,
                    per_document=census.chunks.value / max(1.0, census.documents.value),
                    embedded=embedding.texts,
                    seconds=rest / (len(codecs) - len(tried)),
                    watch=watch,
                )
            )
        say(steps - 1, steps, "first token")
        engines = try_engines(
            rag, trial, Path(name) / rag.config.codec, _engines(rag), seconds=left("first token"), watch=watch
        )
        say(steps, steps, "done")
        passed = watch.read().since(begun)
        plan = _plan(rag, census, trial, tried, engines, embedding)
        return replace(
            plan,
            asked_seconds=seconds,
            spent_seconds=passed.wall,
            left_out=_left_out(rag, census, trial, codecs[len(tried) :], engines),
            trust=_trust(rag, trial, engines, passed),
        )


def _trust(rag: RagKV, trial: EncodeTrial, engines: Sequence[EngineTrial], passed: Reading) -> Trust:
    # with an accelerator the processor is idle anyway, so its waiting says nothing about other processes
    waited = waiting_share(passed) if rag.model.device.type == "cpu" else None
    return weigh({"encoding": trial.repeats, "prefill": engines[0].prefill}, waited)


def _left_out(
    rag: RagKV, census: Census, trial: EncodeTrial, codecs: Sequence[str], engines: Sequence[EngineTrial]
) -> tuple[str, ...]:
    """Sentences about what there was no time for."""
    found = []
    if census.cut_short:
        read, files = census.read_sources, census.sources
        few = f"Parts of {read:,} of {files:,} files" if read < files else "Parts of the files"
        found.append(f"{few} were read, and the rest was extrapolated.")
    if codecs:
        found.append(f"Codec {' and '.join(codecs)} {'was' if len(codecs) == 1 else 'were'} not tried.")
    wanted = min(rag.config.top_k, len(trial.pieces))
    if engines[0].chunks < wanted:
        found.append(f"First tokens are over {engines[0].chunks} of {wanted} chunks.")
    return tuple(found)


def _loaded(
    index: Path, device: str | None, settings: Mapping[str, Any], say: Callable[[int, int, str], None]
) -> RagKV:
    """An index with the engines that its model can run; loading is not part of the measured time."""
    say(0, 0, "loading the model")
    return RagKV.create(index, device=device, **settings)


def _engines(rag: RagKV) -> Sequence[str]:
    return tuple(dict.fromkeys((rag.config.default_engine, *rag.config.engines)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Embedding:
    """The seconds to load the embedder, its seconds per token, and the number of texts that it embedded."""

    start: float
    repeats: Repeats
    texts: int


def _embedding(rag: RagKV, trial: EncodeTrial, seconds: float, watch: Stopwatch) -> _Embedding:
    """Embed as many of the trial's chunks as a third of `seconds` allows, up to three times."""
    if rag.config.embedder == NONE:
        return _Embedding(start=0.0, repeats=Repeats(seconds=(0.0,)), texts=0)
    deadline = watch.now() + seconds
    started = watch.now()
    embedder = rag.embedder
    assert embedder is not None
    texts = [text for text, _ in trial.pieces][:64]
    embedder.embed_documents(texts[:1])
    loaded = watch.now()
    embedder.embed_documents(texts[:1])  # warm, to find out how long one text takes
    one = watch.now() - loaded
    texts = texts[: max(1, int(max(0.0, deadline - watch.now()) / 3 / max(one, 1e-9)))]
    tokens = sum(len(ids) for _, ids in trial.pieces[: len(texts)])
    rates: list[float] = []
    while len(rates) < 3 and (not rates or watch.now() < deadline):
        begun = watch.now()
        embedder.embed_documents(texts)
        rates.append((watch.now() - begun) / tokens)
    return _Embedding(start=loaded - started, repeats=Repeats(seconds=tuple(rates)), texts=len(texts))


def _plan(
    rag: RagKV,
    census: Census,
    trial: EncodeTrial,
    tried: Sequence[CodecTrial],
    engines: Sequence[EngineTrial],
    embedding: _Embedding,
) -> Plan:
    """The product of census and trial. The caller fills in the times and the trust of the whole plan."""
    encodings = rag.index.recipe.encodings
    tokens, own = census.tokens, tried[0]
    prefill = engines[0].prefill_ms / 1000 / (engines[0].context_tokens + len(trial.prefix_ids))
    recompute = min(trial.seconds_per_token, prefill)
    stored = _times(tokens, census.distinct)

    def lasts(encode: float, embed: float) -> Duration:
        return Duration(
            start=embedding.start,
            read=census.read_seconds,
            encode=stored.value * len(encodings) * encode,
            embed=tokens.value * embed,
            write=stored.value * own.write_seconds,
        )

    encode, embed = trial.repeats, embedding.repeats
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
        census=census,
        trial_chunks=len(trial.pieces),
        trial_tokens=trial.tokens,
        encode_seconds=trial.seconds_per_token,
        recompute_seconds=recompute,
        seconds=seconds,
        fastest=lasts(encode.low, embed.low),
        slowest=lasts(encode.high, embed.high),
        encode=encode,
        trust=Trust(reasons=(), waited=None),
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
