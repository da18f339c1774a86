"""How close does the store come to the hardware?

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
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from ragkv.attention.kv import ChunkKV
from ragkv.benchmarks.speed.report import (
    BenchRow,
    OnStep,
    Quick,
    Report,
    alternating,
    machine,
    seconds_of,
    unseen,
    versions,
)
from ragkv.cli.options import WorkFolder
from ragkv.store import Codec, KVIdentity, Raw, Store, Zstd
from ragkv.store.record import drop_pool
from ragkv.types import Chunk, Document, Encoding

LAYERS, KV_HEADS, HEAD_DIM, TOKENS = 16, 8, 64, 256
CHUNKS = 12
CHURN_ROUNDS = 6

Work = Callable[[], object]
T = TypeVar("T")


def measure_store(
    rounds: Annotated[int, typer.Option(help="Rounds; medians are shown.", min=1)] = 15,
    folder: WorkFolder = None,
    quick: Quick = False,
    on_step: OnStep = unseen,
) -> Report:
    """Speed of the store on 100 MB of raw KV: reading against a memcpy, writing against a plain file, and churn.

    Example: `ragkv bench store --quick`
    """
    rounds, documents = (5, 60) if quick else (rounds, 100)
    rows = []
    with tempfile.TemporaryDirectory(prefix="ragkv-bench-", dir=folder) as name:
        chunks = [_kv(seed) for seed in range(CHUNKS)]
        size = sum(kv.nbytes for kv in chunks)
        on_step(f"{CHUNKS} chunks of {TOKENS} tokens, {size / 1e6:.0f} MB of KV")
        rows += _reading(Path(name), chunks, rounds)
        on_step("writing …")
        rows += _writing(Path(name), chunks, max(3, rounds // 3))
        on_step(f"churn: a fifth of {documents} documents replaced, {CHURN_ROUNDS} times …")
        rows += _churn(Path(name), documents)
    packages = versions("lmdb", "numpy", "xxhash", "zstandard")
    return Report(bench="store", machine=machine("cpu"), versions=packages, rows=tuple(rows))


def _reading(folder: Path, chunks: list[ChunkKV], rounds: int) -> list[BenchRow]:
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

        tier.get_many(keys, load)
        works: dict[str, Work] = {
            "warm memcpy": lambda: np.copyto(warm, source),
            "fresh memcpy": lambda: np.copyto(np.empty_like(source), source),
            "used": lambda: raw.get_many(identities),
            "cold": lambda: raw.get_many(identities),
            "tier": lambda: tier.get_many(keys, load),
            "zstd": lambda: zstd.get_many(identities),
        }
        times = alternating(works, rounds, before={"cold": drop_pool})
    name = f"{source.nbytes / 1e6:.0f} MB"
    return [
        _row(f"read {name}, memory used again", times, "used", "memcpy, warm buffer", "warm memcpy"),
        _row(f"read {name}, fresh memory", times, "cold", "memcpy, fresh buffer", "fresh memcpy"),
        _row(f"read {name}, from the memory tier", times, "tier", "memcpy, warm buffer", "warm memcpy"),
        _row(f"read {name}, zstd", times, "zstd", "memcpy, warm buffer", "warm memcpy"),
    ]


def _writing(folder: Path, chunks: list[ChunkKV], rounds: int) -> list[BenchRow]:
    payload = b"".join(_flat(kv).tobytes() for kv in chunks)
    plain = folder / "plain"

    def write_file() -> None:
        with plain.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())

    with Store.create(folder / "write-raw") as raw, Store.create(folder / "write-zstd", codec=Zstd()) as zstd:
        times = alternating(
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


def _churn(folder: Path, documents: int) -> list[BenchRow]:
    """Replace every fifth document in each round by one of another length, as an edit would.

    LMDB reuses pages from the second transaction after the one that freed them, so whatever the number of documents, a
    replacement needs room for two more of them.
    """
    base = _kv(0)

    def rewrite(store: Store, number: int, version: int) -> float:
        tokens = TOKENS - (37 * number + 101 * version) % 64
        kv = ChunkKV(keys=tuple(t[:, :tokens] for t in base.keys), values=tuple(t[:, :tokens] for t in base.values))
        return seconds_of(lambda: _write(store, f"d{number}", [kv], version=version))

    with Store.create(folder / "churn") as store:
        for number in range(documents):
            rewrite(store, number, 0)
        before = store.stats().file_bytes
        rounds = [
            statistics.median(
                rewrite(store, number, version) for number in range(documents) if (number + version) % 5 == 0
            )
            for version in range(1, CHURN_ROUNDS + 1)
        ]
        after = store.stats().file_bytes
    return [
        BenchRow.of(
            f"file after {CHURN_ROUNDS} rounds of churn",
            after / 1e6,
            "MB",
            "before",
            before / 1e6,
            ratio_digits=3,
            digits=2,
        ),
        BenchRow.of(
            "replace a document, last round", rounds[-1] * 1000, "ms", "first round", rounds[0] * 1000, digits=2
        ),
    ]


def _row(name: str, times: dict[str, float], value: str, baseline: str, beside: str) -> BenchRow:
    return BenchRow.of(name, times[value] * 1000, "ms", baseline, times[beside] * 1000)


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
    """The KV's bytes in the store's order."""
    pairs = zip(kv.keys, kv.values, strict=True)
    return np.concatenate([t.reshape(-1).view(torch.uint8).numpy() for pair in pairs for t in pair])


def _require(found: T | None) -> T:
    if found is None:
        raise RuntimeError("the benchmark's own store lost a record")
    return found
