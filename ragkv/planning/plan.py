"""What an ingest will cost, and what it will buy, before anything is ingested.

Counts come from a census of the files (`census`), rates from a trial on a few of their chunks with the very model,
codecs and disk (`trial`); a plan is their product. Nothing is written but into a temporary folder.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragkv.config import NONE
from ragkv.errors import UsageError
from ragkv.pipeline import RagKV
from ragkv.planning.census import Census, Estimate, take_census
from ragkv.planning.trial import CodecTrial, EncodeTrial, EngineTrial, try_codec, try_encoding, try_engines
from ragkv.store import codec_names

__all__ = ["SAMPLE_BYTES", "CodecPlan", "Duration", "Plan", "plan_ingest"]

SAMPLE_BYTES = 8 << 20
CODECS = ("raw", "zstd", "int8", "int4")
MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """Seconds of each part of the ingest; `start` is loading parsers and embedder, once."""

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
    """One codec for all documents: bytes of KV (what `ragkv stats` shows) and when loading it pays.

    Seconds are per token of one encoding: loading from the disk (`cold_seconds`, None where it could not be measured)
    and from the page cache (`warm_seconds`), beside `Plan.recompute_seconds`. `least_disk` is the break-even: on a disk
    of fewer bytes per second, recomputing is faster; None when decoding alone takes longer than recomputing.
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
    """The whole prediction. `disk_bytes` is the store's file: KV in the chosen codec, text, vectors, empty room.

    `recompute_seconds` per token is the cheaper of encoding and prefilling. `questions` is after how many of them the
    ingest is repaid, in time that they would have taken to prefill; None when no question gets faster.
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
            "seconds": self.seconds.to_json(),
            "codecs": [codec.to_json() for codec in self.codecs],
            "disk_bytes": self.disk_bytes.to_json(),
            "vector_bytes": round(self.vector_bytes),
            "first_token": [
                {
                    "engine": found.engine,
                    "ms": round(found.first_token_ms, 3),
                    "prefill_ms": round(found.prefill_ms, 3),
                    "ratio": round(found.prefill_ms / found.first_token_ms, 2),
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
    on_step: Callable[[int, int, str], None] | None = None,
    **settings: Any,
) -> Plan:
    """Predict `RagKV.create(…, **settings).ingest(*paths)`; `settings` are the fields of `IndexConfig`.

    Documents of more than `sample_bytes` are sampled. The trial's store is made in a temporary folder under `folder`,
    so that it is that disk which is measured, and removed. Raises UsageError for a missing path, files that hold no
    text, or engines that store no KV; ConfigError and ModelLoadError as `RagKV.create` does.
    """
    say = on_step or (lambda done, total, what: None)
    try:
        place = tempfile.TemporaryDirectory(prefix="ragkv-plan-", dir=folder)
    except OSError as error:
        raise UsageError(f"No temporary folder can be made in {folder or 'the system'}: {error.strerror}.") from error
    with place as name, RagKV.create(Path(name) / "index", device=device, **settings) as rag:
        if not rag.index.recipe.encodings:
            raise UsageError(
                f"Engine {', '.join(rag.config.engines)} stores no KV, so there is nothing to plan; "
                "add one of ape, block and pced to --engines."
            )
        say(0, 1, "loading the model")
        rag.model  # noqa: B018 - its time is no part of what is measured
        census = take_census(
            [Path(path) for path in paths],
            chunk_ids=lambda text: rag.prompt.chunk_ids(rag.model.tokens, text),
            max_tokens=rag.config.chunk_tokens,
            sample_bytes=sample_bytes,
            seed=seed,
            on_step=lambda done, total: say(done, total, "reading"),
        )
        codecs = [rag.config.codec, *(c for c in CODECS if c != rag.config.codec and c in codec_names())]
        steps = len(codecs) + 2
        say(0, steps, "encoding")
        trial = try_encoding(rag, census.chunks_read)
        start, embed = _embedding(rag, trial)
        tried = []
        for number, codec in enumerate(codecs, start=1):
            say(number, steps, codec)
            per_document = census.chunks.value / max(1.0, census.documents.value)
            tried.append(try_codec(rag, trial, codec, Path(name) / codec, per_document=per_document))
        say(steps - 1, steps, "first token")
        engines = try_engines(rag, trial, Path(name) / rag.config.codec, _engines(rag))
        return _plan(rag, census, trial, tried, engines, start=start, embed=embed)


def _engines(rag: RagKV) -> Sequence[str]:
    return tuple(dict.fromkeys((rag.config.default_engine, *rag.config.engines)))


def _embedding(rag: RagKV, trial: EncodeTrial) -> tuple[float, float]:
    """Seconds to load the embedder, and then per token of the chunks that it embeds."""
    if rag.config.embedder == NONE:
        return 0.0, 0.0
    started = time.perf_counter()
    embedder = rag.embedder
    assert embedder is not None
    texts = [text for text, _ in trial.pieces][:64]
    embedder.embed_documents(texts[:1])
    warm = time.perf_counter()
    embedder.embed_documents(texts)
    done = time.perf_counter()
    return warm - started, (done - warm) / sum(len(ids) for _, ids in trial.pieces[: len(texts)])


def _plan(
    rag: RagKV,
    census: Census,
    trial: EncodeTrial,
    tried: Sequence[CodecTrial],
    engines: Sequence[EngineTrial],
    *,
    start: float,
    embed: float,
) -> Plan:
    encodings = rag.index.recipe.encodings
    tokens, own = census.tokens, tried[0]
    prefill = engines[0].prefill_ms / 1000 / (engines[0].context_tokens + len(trial.prefix_ids))
    recompute = min(trial.seconds_per_token, prefill)
    stored = _times(tokens, census.distinct)
    seconds = Duration(
        start=start,
        read=census.read_seconds,
        encode=stored.value * len(encodings) * trial.seconds_per_token,
        embed=tokens.value * embed,
        write=stored.value * own.write_seconds,
    )
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
