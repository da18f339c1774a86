"""How close does the store come to the hardware: a memcpy for reading, a plain file for writing?

- Reading: 100 MB of KV (12 chunks of 256 tokens of a 1B Llama: 16 layers, 8 KV heads of 64, bf16), from opening the
  transaction to tensors that attention can use, with checksums. The baseline is one `np.copyto` of the same bytes from
  warm memory, into a buffer that was written before ("warm", the stricter one) or into a new one ("fresh").
- Writing: `write_document` with that KV, encoded, committed and synced. The baseline writes the same bytes to a new
  file and fsyncs it.
- Churn: a fifth of the documents is replaced, six times.

Rounds of benchmark and baseline alternate; the report shows medians.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ragkv.attention.kv import ChunkKV
from ragkv.benchmarks.speed.report import Report, Row, machine, versions
from ragkv.store import Codec, KVIdentity, Raw, Store, Zstd
from ragkv.store.format.buffer import drop_spares
from ragkv.types import Chunk, Document, Encoding

__all__ = ["measure"]

LAYERS, KV_HEADS, HEAD_DIM, TOKENS = 16, 8, 64, 256
CHUNKS = 12
CHURN_ROUNDS = 6

Work = Callable[[], object]
T = TypeVar("T")


def measure(
    *, rounds: int = 15, documents: int = 100, folder: Path | None = None, on_step: Callable[[str], None] | None = None
) -> Report:
    """Medians over `rounds`. The churn is measured on `documents` documents. Works in a new folder under `folder`."""
    say = on_step or (lambda _: None)
    rows = []
    with tempfile.TemporaryDirectory(prefix="ragkv-bench-", dir=folder) as name:
        chunks = [_kv(seed) for seed in range(CHUNKS)]
        size = sum(kv.nbytes for kv in chunks)
        say(f"{CHUNKS} chunks of {TOKENS} tokens, {size / 1e6:.0f} MB of KV")
        rows += _reading(Path(name), chunks, rounds)
        say("writing …")
        rows += _writing(Path(name), chunks, max(3, rounds // 3))
        say(f"churn: a fifth of {documents} documents replaced, {CHURN_ROUNDS} times …")
        rows += _churn(Path(name), documents)
    packages = versions("lmdb", "numpy", "xxhash", "zstandard")
    return Report(bench="store", machine=machine("cpu"), versions=packages, rows=tuple(rows))


def _reading(folder: Path, chunks: list[ChunkKV], rounds: int) -> list[Row]:
    identities = [_identity(range(1000 * n, 1000 * n + TOKENS)) for n in range(len(chunks))]
    source = np.concatenate([_flat(kv) for kv in chunks])
    warm = np.zeros_like(source)
    with (
        _filled(folder / "raw", identities, chunks, Raw()) as raw,
        _filled(folder / "zstd", identities, chunks, Zstd()) as zstd,
    ):
        tier = raw.memory(budget=2 * source.nbytes)
        keys = [identity.key() for identity in identities]

        def load(_: object) -> dict[bytes, ChunkKV]:
            found = raw.get_many(identities)
            return {identity.key(): kv for identity, kv in found.items()}

        def mapped() -> None:
            for identity in identities:
                with raw.mapped_kv(identity) as kv:
                    _require(kv)

        def first_layer() -> object:
            reader = _require(raw.open_kv(identities[0]))
            return reader.layer(0)

        tier.get_many(keys, load)
        works: dict[str, Work] = {
            "warm memcpy": lambda: np.copyto(warm, source),
            "fresh memcpy": lambda: np.copyto(np.empty_like(source), source),
            "used": lambda: raw.get_many(identities),
            "cold": lambda: raw.get_many(identities),
            "mapped": mapped,
            "tier": lambda: tier.get_many(keys, load),
            "zstd": lambda: zstd.get_many(identities),
            "record": lambda: raw.get_kv(identities[0]),
            "layer": first_layer,
        }
        times = _interleaved(works, rounds, before={"cold": drop_spares})
    name = f"{source.nbytes / 1e6:.0f} MB"
    return [
        _row(f"read {name}, memory used again", times, "used", "memcpy, warm buffer", "warm memcpy"),
        _row(f"read {name}, fresh memory", times, "cold", "memcpy, fresh buffer", "fresh memcpy"),
        _row(f"read {name}, where it lies", times, "mapped", "memcpy, warm buffer", "warm memcpy"),
        _row(f"read {name}, from the memory tier", times, "tier", "memcpy, warm buffer", "warm memcpy"),
        _row(f"read {name}, zstd", times, "zstd", "memcpy, warm buffer", "warm memcpy"),
        _row("first layer of a record", times, "layer", "the whole record", "record"),
    ]


def _writing(folder: Path, chunks: list[ChunkKV], rounds: int) -> list[Row]:
    payload = b"".join(_flat(kv).tobytes() for kv in chunks)
    plain = folder / "plain"

    def write_file() -> None:
        with plain.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())

    with Store.create(folder / "write-raw") as raw, Store.create(folder / "write-zstd", codec=Zstd()) as zstd:
        times = _interleaved(
            {
                "plain": write_file,
                "raw": lambda: _write(raw, "document", chunks, version=0),
                "zstd": lambda: _write(zstd, "document", chunks, version=0),
            },
            rounds,
            before={
                "plain": lambda: plain.unlink(missing_ok=True),
                "raw": lambda: raw.delete_document("document"),
                "zstd": lambda: zstd.delete_document("document"),
            },
        )
    plain.unlink()
    name = f"{len(payload) / 1e6:.0f} MB"
    return [
        _row(f"write {name}, raw", times, "raw", "file and fsync", "plain"),
        _row(f"write {name}, zstd", times, "zstd", "file and fsync", "plain"),
    ]


def _churn(folder: Path, documents: int) -> list[Row]:
    """Replace every fifth document in each round by one of another length, as an edit would.

    LMDB reuses pages from the second transaction after the one that freed them on: whatever the number of
    documents, a replacement needs room for two more of them.
    """
    base = _kv(0)

    def replace(store: Store, number: int, version: int) -> float:
        tokens = TOKENS - (37 * number + 101 * version) % 64
        kv = ChunkKV(keys=tuple(t[:, :tokens] for t in base.keys), values=tuple(t[:, :tokens] for t in base.values))
        return _timed(lambda: _write(store, f"d{number}", [kv], version=version))

    with Store.create(folder / "churn") as store:
        for number in range(documents):
            replace(store, number, 0)
        before = store.stats().file_bytes
        rounds = [
            statistics.median(
                replace(store, number, version) for number in range(documents) if (number + version) % 5 == 0
            )
            for version in range(1, CHURN_ROUNDS + 1)
        ]
        after = store.stats().file_bytes
    return [
        Row(
            name=f"file after {CHURN_ROUNDS} rounds of churn",
            value=round(after / 1e6, 2),
            unit="MB",
            baseline="before",
            baseline_value=round(before / 1e6, 2),
            ratio=round(before / after, 3),
        ),
        Row(
            name="replace a document, last round",
            value=round(rounds[-1] * 1000, 2),
            unit="ms",
            baseline="first round",
            baseline_value=round(rounds[0] * 1000, 2),
            ratio=round(rounds[0] / rounds[-1], 2),
        ),
    ]


def _interleaved(works: dict[str, Work], rounds: int, *, before: dict[str, Work]) -> dict[str, float]:
    """Medians in seconds. The first round warms up, and what runs `before` each work is not timed."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            if name in before:
                before[name]()
            times[name].append(_timed(work))
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def _timed(work: Work) -> float:
    start = time.perf_counter()
    result = work()
    end = time.perf_counter()
    del result  # freeing it is not part of it
    return end - start


def _row(name: str, times: dict[str, float], value: str, baseline: str, beside: str) -> Row:
    return Row(
        name=name,
        value=round(times[value] * 1000, 3),
        unit="ms",
        baseline=baseline,
        baseline_value=round(times[beside] * 1000, 3),
        ratio=round(times[beside] / times[value], 2),
    )


def _filled(folder: Path, identities: list[KVIdentity], chunks: list[ChunkKV], codec: Codec) -> Store:
    store = Store.create(folder, codec=codec)
    store.stage_kv(zip(identities, chunks, strict=True))
    return store


def _write(store: Store, name: str, kvs: list[ChunkKV], *, version: int) -> None:
    chunks = [_chunk(name, ordinal, version, kv.tokens) for ordinal, kv in enumerate(kvs)]
    identities = {chunk.chunk_id: _identity(chunk.token_ids) for chunk in chunks}
    store.write_document(
        Document(document_id=name, source=name, content_hash=str(version)),
        "text",
        chunks,
        recipe="bench",
        records=zip(identities.values(), kvs, strict=True),
        references={chunk_id: [identity] for chunk_id, identity in identities.items()},
    )


def _chunk(name: str, ordinal: int, version: int, tokens: int) -> Chunk:
    """A chunk with token ids that no other chunk has."""
    chunk_id = f"{name}/{version}/{ordinal}"
    first = zlib.crc32(chunk_id.encode()) >> 1
    return Chunk(
        chunk_id=chunk_id,
        document_id=name,
        ordinal=ordinal,
        text="text",
        token_ids=tuple(range(first, first + tokens)),
        start=0,
        end=4,
    )


def _identity(chunk_ids: Sequence[int]) -> KVIdentity:
    return KVIdentity(model="bench", encoding=Encoding.STANDALONE, chunk_ids=tuple(chunk_ids))


def _kv(seed: int) -> ChunkKV:
    """Normal numbers with a scale per channel, like keys and values. They only affect how well zstd compresses."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(HEAD_DIM, generator=generator) * 3
    shape = (2 * LAYERS, KV_HEADS, TOKENS, HEAD_DIM)
    tensors = (torch.randn(shape, generator=generator) * scale).bfloat16().unbind()
    return ChunkKV(keys=tensors[:LAYERS], values=tensors[LAYERS:])


def _flat(kv: ChunkKV) -> NDArray[np.uint8]:
    """The KV's bytes in the order in which the store keeps them."""
    pairs = zip(kv.keys, kv.values, strict=True)
    return np.concatenate([t.reshape(-1).view(torch.uint8).numpy() for pair in pairs for t in pair])


def _require(found: T | None) -> T:
    if found is None:
        raise RuntimeError("the benchmark's own store lost a record")
    return found
