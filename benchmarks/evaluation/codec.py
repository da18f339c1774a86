"""`python -m ragkv.benchmarks.evaluation codec`: what every codec costs in bytes, time and changed answers.

A codec's size is compared with the same tensors in bf16, its speed with a memcpy of the same bytes, both for whole
records (including segments and checksums). For answers, questions about held-out worlds are answered greedily from raw
KV. Every codec then reads the same answer token by token, and the Kullback-Leibler divergence of its next-token
distribution from that of raw KV is measured at every token. An answer counts as unchanged if the greedy choice is the
same at every token. The baseline of the divergence is raw KV with a random last bf16 bit: about the difference between
two machines that prefill the same chunk, so the model's own noise. The baseline of the answers is each codec's target.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from ragkv.attention.kv import ChunkKV
from ragkv.benchmarks.evaluation.worlds.world import World
from ragkv.benchmarks.speed.report import BenchRow, OnStep, Quick, Report, alternating, machine, unseen, versions
from ragkv.cli.options import Device, given_names
from ragkv.doctor.compare import Comparer, Comparison, RoundTrip, with_kv
from ragkv.engines import make_engine
from ragkv.errors import UsageError
from ragkv.pipeline import RagKV
from ragkv.store import Codec, KVIdentity, Raw, Zstd, codec_from_config
from ragkv.store.record import EncodedRecord, Manifest, decode_record, encode_record
from ragkv.types import Encoding

Work = Callable[[], object]

TARGETS = {"half": 99.0, "q8": 99.0, "int8": 99.0, "int4": 97.0}
"""Lossy codecs, and the percentage of answers that each should leave unchanged."""
SEED = 910_000
WORLD_SIZE = 40
QUESTIONS_PER_WORLD = 22
TOP_K = 8
ANSWER_TOKENS = 32
LONG_TOKENS = 1024
LAST_BIT = "raw, last bit random"
SIZED_CHUNKS = 80


def measure_codec(
    questions: Annotated[int, typer.Option(help="Questions per engine.", min=1)] = 330,
    engines: Annotated[str, typer.Option(help="Engines to compare answers of.")] = "block,ape,pced",
    model: Annotated[str, typer.Option(help="Model whose KV is stored.")] = "mini",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16 or int8.")] = "auto",
    quick: Quick = False,
    device: Device = None,
    on_step: OnStep = unseen,
) -> Report:
    """Size, speed and changed answers of every codec, compared with bf16, memcpy and a random last bit.

    Questions are about generated worlds that mini has never seen.

    Example: `python -m ragkv.benchmarks.evaluation codec --quick`
    """
    names = given_names("--engines", engines)
    for name in names:
        if make_engine(name, {}).encoding is None:
            raise UsageError(f"Engine {name!r} reads no stored KV, so no codec changes its answers; leave it out.")
    asked = 6 if quick else questions
    with tempfile.TemporaryDirectory(prefix="ragkv-bench-") as scratch:
        folder = Path(scratch)
        with RagKV.create(folder / "index", model=model, dtype=dtype, device=device, codec="raw") as rag:
            texts = _write_worlds(folder / "documents", asked)
            on_step(f"{rag.model.checkpoint.name}, {rag.model.dtype}: prefilling {len(texts)} documents …")
            rag.ingest(folder / "documents")
            rows = list(_size_rows(rag)) + list(_speed_rows(rag, rounds=3 if quick else 9))
            for engine in names:
                rows += _quality_rows(rag, engine, _questions(asked), on_step)
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
    questions: list[str] = []
    for world in _worlds(count):
        drawn = random.Random(world.seed).sample(world.questions, QUESTIONS_PER_WORLD)
        questions += [question.question for question in drawn]
    return questions[:count]


_codec_row = partial(BenchRow.of, ratio_digits=4)


def _size_rows(rag: RagKV) -> Iterator[BenchRow]:
    """The bytes of the payloads of some chunks, in both encodings."""
    chunks = [chunk.token_ids for chunk in islice(rag.store.chunks(), SIZED_CHUNKS)]
    both = (Encoding.STANDALONE, Encoding.PREFIXED)
    kvs = [(ids, kv) for encoding in both for ids, kv in zip(chunks, _encoded(rag, encoding, chunks), strict=True)]
    tokens = sum(kv.tokens for _, kv in kvs)
    in_bf16 = sum(2 * sum(t.numel() for t in (*kv.keys, *kv.values)) for _, kv in kvs) / tokens
    for codec in _codecs():
        stored = sum(_record(codec, kv, ids).stored_bytes for ids, kv in kvs) / tokens
        yield _codec_row(f"{codec.id}: size", stored, "B/token", "bf16", in_bf16, in_bf16 / stored, digits=1)


def _encoded(rag: RagKV, encoding: Encoding, chunks: Sequence[tuple[int, ...]]) -> Iterator[ChunkKV]:
    prefix = rag.kv_source.prefix() if encoding is Encoding.PREFIXED else None
    return rag.model.encode_each(chunks, prefix=prefix)


def _speed_rows(rag: RagKV, rounds: int) -> Iterator[BenchRow]:
    """Median GB/s of tensor bytes for one long chunk; each round also times a memcpy into a fresh buffer."""
    together = [i for chunk in rag.store.chunks() for i in chunk.token_ids]
    ids = tuple(together[: min(LONG_TOKENS, rag.model.max_positions or LONG_TOKENS)])
    [kv] = rag.model.encode([ids])
    source = np.concatenate([t.cpu().reshape(-1).view(torch.uint8).numpy() for t in (*kv.keys, *kv.values)])
    for codec in _codecs():
        record = _record(codec, kv, ids)
        works: dict[str, Work] = {
            "memcpy": source.copy,
            "encode": partial(_record, codec, kv, ids),
            "decode": partial(_decoded, record),
        }
        speed = {name: source.nbytes / seconds / 1e9 for name, seconds in alternating(works, rounds).items()}
        for name in ("encode", "decode"):
            ratio = speed[name] / speed["memcpy"]
            yield _codec_row(f"{codec.id}: {name}", speed[name], "GB/s", "memcpy", speed["memcpy"], ratio)


def _quality_rows(rag: RagKV, name: str, questions: Sequence[str], on_step: OnStep) -> list[BenchRow]:
    """Mean and largest divergence and the share of unchanged answers, for one engine."""
    engine = make_engine(name, rag.config.tuning)
    comparer = Comparer(rag.model, max_new_tokens=ANSWER_TOKENS)
    series: dict[str, list[Comparison]] = {change: [] for change in (LAST_BIT, *TARGETS)}
    for number, question in enumerate(questions, start=1):
        request, _ = rag.request(engine, question, rag.retrieve(question, top_k=TOP_K)[::-1])
        reference = comparer.answer(engine, request)
        for changed, compared in series.items():
            change = _last_bit if changed == LAST_BIT else RoundTrip(codec_from_config({"id": changed}))
            compared.append(comparer.along(engine, with_kv(request, change), reference)[0])
        if number % 20 == 0 or number == len(questions):
            share = ", ".join(f"{change} {_percent(compared) / 100:.1%}" for change, compared in series.items())
            on_step(f"{name}: {number} of {len(questions)} questions, same answers: {share}")
    floor = series.pop(LAST_BIT)
    same = _percent(floor)
    rows = [_codec_row(f"{LAST_BIT}, {name}: same answers", same, "%", "raw", 100.0, same / 100, digits=1)]
    return rows + [row for codec, compared in series.items() for row in _compared(codec, name, compared, floor)]


def _compared(
    codec: str, engine: str, compared: Sequence[Comparison], floor: Sequence[Comparison]
) -> Iterator[BenchRow]:
    for what, of in (("mean KL", statistics.fmean), ("max KL", max)):
        value, least = (of([kl for each in some for kl in each.kl]) for some in (compared, floor))
        ratio = least / value if value else 1.0
        yield _codec_row(f"{codec}, {engine}: {what}", value, "nats", LAST_BIT, least, ratio, digits=7)
    share, target = _percent(compared), TARGETS[codec]
    yield _codec_row(f"{codec}, {engine}: same answers", share, "%", "target", target, share / target, digits=1)


def _percent(compared: Sequence[Comparison]) -> float:
    """The percentage of answers in which every token stays the first choice."""
    return 100 * sum(all(each.agreed) for each in compared) / len(compared)


def _last_bit(kv: ChunkKV, ids: tuple[int, ...]) -> ChunkKV:
    """Every number rounded to bf16 with a random last bit, which depends on the token ids only."""
    generator = torch.Generator().manual_seed(zlib.crc32(np.asarray(ids, "<u4").tobytes()))

    def noisy(tensor: Tensor) -> Tensor:
        bits = tensor.to("cpu", torch.bfloat16).contiguous().view(torch.int16)
        bits = bits ^ torch.randint(0, 2, bits.shape, generator=generator, dtype=torch.int16)
        return bits.view(torch.bfloat16).to(tensor)

    return replace(kv, keys=tuple(map(noisy, kv.keys)), values=tuple(map(noisy, kv.values)))


def _codecs() -> list[Codec]:
    return [Raw(), Zstd(), *(codec_from_config({"id": name}) for name in TARGETS)]


def _record(codec: Codec, kv: ChunkKV, ids: tuple[int, ...]) -> EncodedRecord:
    return encode_record(kv, KVIdentity(model="bench", encoding=Encoding.STANDALONE, chunk_ids=ids), codec)


def _decoded(record: EncodedRecord) -> ChunkKV:
    return decode_record(Manifest.parse(record.manifest), record.segments.__getitem__)
