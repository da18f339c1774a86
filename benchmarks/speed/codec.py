"""What does a codec save, what does it cost, and does it change answers?

Size is compared with the same tensors in bf16, speed with a memcpy of the same bytes, both for whole records
(including segments and checksums). For answers, questions about held-out worlds are answered greedily from raw KV.
Every codec then reads the same answer token by token, and the Kullback-Leibler divergence of its next-token
distribution from that of raw KV is measured at every token. An answer counts as unchanged if the greedy choice is the
same at every token.

The baseline of the divergence is raw KV with a random last bf16 bit. That is about the difference between two machines
that prefill the same chunk, so it is the model's own noise. The baseline of the answers is the target of each codec.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ragkv.attention.kv import ChunkKV
from ragkv.benchmarks.speed.report import Report, Row, machine, versions
from ragkv.engines import engine_class, make_engine
from ragkv.errors import UsageError
from ragkv.pipeline import RagKV
from ragkv.runtime import Stream, runtime_of
from ragkv.store import Codec, KVIdentity, Raw, Zstd, codec_from_config
from ragkv.store.format.encode import encode_record
from ragkv.store.format.record import EncodedRecord, Manifest
from ragkv.store.format.tensor import decode_record
from ragkv.types import Encoding
from ragkv.worlds import World

if TYPE_CHECKING:
    from ragkv.engines import Engine, Request
    from ragkv.model.language import LanguageModel

__all__ = ["measure"]

ENGINES = ("block", "ape", "pced")
TARGETS = {"int8": 99.0, "int4": 97.0}
"""Lossy codecs, and the percentage of answers that each should leave unchanged."""
SEED = 910_000
WORLD_SIZE = 40
QUESTIONS_PER_WORLD = 22
TOP_K = 8
ANSWER_TOKENS = 32
LONG_TOKENS = 1024
LAST_BIT = "raw, last bit random"
SIZED_CHUNKS = 80

Transform = Callable[[ChunkKV, tuple[int, ...]], ChunkKV]


@dataclass(slots=True)
class _Quality:
    """The divergence from raw KV at every token, and the number of answers that equal those of raw KV."""

    divergences: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)


def measure(
    *,
    questions: int = 330,
    model: str = "mini",
    dtype: str = "auto",
    quick: bool = False,
    engines: Sequence[str] = ENGINES,
    device: str | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Report:
    """Rows per codec, then per codec and engine; `quick` asks six questions and times fewer rounds.

    Raises UsageError for an engine that is unknown or reads no stored KV.
    """
    say = on_step or (lambda _: None)
    for name in engines:
        if engine_class(name).encoding is None:
            raise UsageError(f"Engine {name!r} reads no stored KV, so no codec changes its answers; leave it out.")
    asked = 6 if quick else questions
    with tempfile.TemporaryDirectory(prefix="ragkv-bench-") as scratch:
        folder = Path(scratch)
        with RagKV.create(folder / "index", model=model, dtype=dtype, device=device) as rag:
            texts = _write_worlds(folder / "documents", asked)
            say(f"{rag.model.checkpoint.name}, {rag.model.dtype}: prefilling {len(texts)} documents …")
            rag.ingest(folder / "documents")
            rows = list(_size_rows(rag)) + list(_speed_rows(rag, rounds=3 if quick else 9))
            for engine in engines:
                rows += _quality_rows(rag, engine, _questions(asked), say)
            machine_name = machine(str(rag.model.device))
    return Report(bench="codec", machine=machine_name, versions=versions("numpy", "zstandard"), rows=tuple(rows))


def _write_worlds(folder: Path, questions: int) -> list[Path]:
    folder.mkdir()
    paths = []
    for number, world in enumerate(_worlds(questions)):
        for place, document in enumerate(world.documents):
            paths.append(folder / f"{number:03}-{place:03}.txt")
            paths[-1].write_text(document.text, encoding="utf-8")
    return paths


def _worlds(questions: int) -> Iterator[World]:
    """Worlds whose names mini has never seen, with seeds that neither its training nor the examples use."""
    for number in range(-(-questions // QUESTIONS_PER_WORLD)):
        yield World.generate(SEED + number, split="heldout", size=WORLD_SIZE)


def _questions(count: int) -> list[str]:
    found: list[str] = []
    for world in _worlds(count):
        drawn = random.Random(world.seed).sample(world.questions, QUESTIONS_PER_WORLD)
        found += [question.question for question in drawn]
    return found[:count]


def _size_rows(rag: RagKV) -> Iterator[Row]:
    """The bytes of the payloads of some chunks, in both encodings."""
    chunks = [chunk.token_ids for chunk in islice(rag.store.chunks(), SIZED_CHUNKS)]
    both = (Encoding.STANDALONE, Encoding.PREFIXED)
    kvs = [(ids, kv) for encoding in both for ids, kv in zip(chunks, _encoded(rag, encoding, chunks), strict=True)]
    tokens = sum(kv.tokens for _, kv in kvs)
    in_bf16 = sum(2 * sum(t.numel() for t in (*kv.keys, *kv.values)) for _, kv in kvs) / tokens
    for codec in _codecs():
        stored = sum(_record(codec, kv, ids).stored_bytes for ids, kv in kvs) / tokens
        yield _row(f"{codec.id}: size", stored, "B/token", "bf16", in_bf16, in_bf16 / stored, digits=1)


def _encoded(rag: RagKV, encoding: Encoding, chunks: Sequence[tuple[int, ...]]) -> Iterator[ChunkKV]:
    prefix = rag.recall.prefix() if encoding is Encoding.PREFIXED else None
    return rag.model.encode_each(chunks, prefix=prefix)


def _speed_rows(rag: RagKV, rounds: int) -> Iterator[Row]:
    """Median GB/s of tensor bytes for one long chunk; each round also times a memcpy into a fresh buffer."""
    together = [i for chunk in rag.store.chunks() for i in chunk.token_ids]
    ids = tuple(together[: min(LONG_TOKENS, rag.model.max_positions or LONG_TOKENS)])
    [kv] = rag.model.encode([ids])
    source = np.concatenate([t.cpu().reshape(-1).view(torch.uint8).numpy() for t in (*kv.keys, *kv.values)])
    for codec in _codecs():
        record = _record(codec, kv, ids)
        times: dict[str, list[float]] = {"encode": [], "decode": [], "memcpy": []}
        for _ in range(rounds + 1):  # the first round warms up
            times["memcpy"].append(_timed(source.copy))
            times["encode"].append(_timed(lambda codec=codec: _record(codec, kv, ids)))  # type: ignore[misc]
            times["decode"].append(_timed(lambda record=record: _decoded(record)))  # type: ignore[misc]
        speed = {name: source.nbytes / statistics.median(found[1:]) / 1e9 for name, found in times.items()}
        for name in ("encode", "decode"):
            ratio = speed[name] / speed["memcpy"]
            yield _row(f"{codec.id}: {name}", speed[name], "GB/s", "memcpy", speed["memcpy"], ratio, digits=3)


def _quality_rows(rag: RagKV, name: str, questions: Sequence[str], say: Callable[[str], None]) -> list[Row]:
    """Mean and largest divergence and the share of unchanged answers, for one engine."""
    engine = make_engine(name, rag.config.tuning)
    changes: dict[str, Transform] = {LAST_BIT: _last_bit}
    changes |= {codec: _through(codec_from_config({"id": codec})) for codec in TARGETS}
    found = {change: _Quality() for change in changes}
    kept: dict[tuple[str, tuple[int, ...]], ChunkKV] = {}
    for number, question in enumerate(questions, start=1):
        scored = rag.retrieve(question, top_k=TOP_K)[::-1]
        request, _ = rag.request(engine, question, scored)
        tokens, expected = _answer(rag.model, engine, request)
        for change, transform in changes.items():
            changed = _changed(request, change, transform, kept)
            _, seen = _answer(rag.model, engine, changed, tokens)
            found[change].divergences += [_divergence(p, q) for p, q in zip(expected, seen, strict=True)]
            found[change].same.append([int(q.argmax()) for q in seen] == [int(p.argmax()) for p in expected])
        if number % 20 == 0 or number == len(questions):
            share = ", ".join(f"{change} {sum(q.same) / number:.1%}" for change, q in found.items())
            say(f"{name}: {number} of {len(questions)} questions, same answers: {share}")
    floor = found.pop(LAST_BIT)
    same = _percent(floor)
    rows = [_row(f"{LAST_BIT}, {name}: same answers", same, "%", "raw", 100.0, same / 100, digits=1)]
    return rows + [row for codec, quality in found.items() for row in _compared(codec, name, quality, floor)]


def _compared(codec: str, engine: str, quality: _Quality, floor: _Quality) -> Iterator[Row]:
    for what, of in (("mean KL", statistics.fmean), ("max KL", max)):
        value, least = of(quality.divergences), of(floor.divergences)
        ratio = least / value if value else 1.0
        yield _row(f"{codec}, {engine}: {what}", value, "nats", LAST_BIT, least, ratio, digits=7)
    share, target = _percent(quality), TARGETS[codec]
    yield _row(f"{codec}, {engine}: same answers", share, "%", "target", target, share / target, digits=1)


def _percent(quality: _Quality) -> float:
    return 100 * sum(quality.same) / len(quality.same)


def _changed(
    request: Request, change: str, transform: Transform, kept: dict[tuple[str, tuple[int, ...]], ChunkKV]
) -> Request:
    """The request with `transform` applied to every KV."""

    def changed(kv: ChunkKV, ids: tuple[int, ...]) -> ChunkKV:
        if (change, ids) not in kept:
            kept[change, ids] = transform(kv, ids)
        return kept[change, ids]

    chunks = tuple(replace(chunk, kv=changed(chunk.stored(), chunk.token_ids)) for chunk in request.chunks)
    if request.prefix is None:
        return replace(request, chunks=chunks)
    return replace(request, chunks=chunks, prefix=changed(request.prefix, request.prefix_ids))


def _last_bit(kv: ChunkKV, ids: tuple[int, ...]) -> ChunkKV:
    """Every number rounded to bf16 with a random last bit, which depends on the token ids only."""
    generator = torch.Generator().manual_seed(zlib.crc32(np.asarray(ids, "<u4").tobytes()))

    def noisy(tensor: Tensor) -> Tensor:
        bits = tensor.to("cpu", torch.bfloat16).contiguous().view(torch.int16)
        bits = bits ^ torch.randint(0, 2, bits.shape, generator=generator, dtype=torch.int16)
        return bits.view(torch.bfloat16).to(tensor)

    return replace(kv, keys=tuple(map(noisy, kv.keys)), values=tuple(map(noisy, kv.values)))


def _through(codec: Codec) -> Transform:
    """The KV as the store would return it."""
    return lambda kv, ids: _decoded(_record(codec, kv, ids)).to(kv.keys[0].device)


def _answer(
    model: LanguageModel, engine: Engine, request: Request, tokens: Sequence[int] | None = None
) -> tuple[list[int], list[Tensor]]:
    """Greedy tokens, or the given ones, with the log-probabilities `(vocab,)` before each of them."""
    stream = Stream(runtime_of(model), engine, request)
    taken: list[int] = []
    seen: list[Tensor] = []
    while True:
        seen.append(stream.scores.log_softmax(-1))
        taken.append(stream.best() if tokens is None else tokens[len(taken)])
        if tokens is None:
            ended = len(taken) == ANSWER_TOKENS or taken[-1] in model.eos_ids
        else:
            ended = len(taken) == len(tokens)
        if ended:
            return taken, seen
        stream.advance(taken[-1])


def _divergence(raw: Tensor, changed: Tensor) -> float:
    """KL(raw ‖ changed) of two rows of log-probabilities; float64, so that rounding does not look like a difference."""
    p, q = raw.double(), changed.double()
    return max(0.0, float((p.exp() * (p - q)).nansum()))  # a probability of 0 adds nothing


def _codecs() -> list[Codec]:
    return [Raw(), Zstd(), *(codec_from_config({"id": name}) for name in TARGETS)]


def _record(codec: Codec, kv: ChunkKV, ids: tuple[int, ...]) -> EncodedRecord:
    return encode_record(kv, KVIdentity(model="bench", encoding=Encoding.STANDALONE, chunk_ids=ids), codec)


def _decoded(record: EncodedRecord) -> ChunkKV:
    return decode_record(Manifest.parse(record.manifest), record.segments.__getitem__)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _row(name: str, value: float, unit: str, baseline: str, reference: float, ratio: float, *, digits: int) -> Row:
    return Row(
        name=name,
        value=round(value, digits),
        unit=unit,
        baseline=baseline,
        baseline_value=round(reference, digits),
        ratio=round(ratio, 4),
    )
