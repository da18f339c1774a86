"""A few chunks are encoded, stored, loaded and asked about, to learn what all of them will cost on this machine.

Everything is done by what an ingest and a question use themselves: the model's own encode, the store's own codecs and
transactions, the engines. Rates of the ingest are means, because it will suffer from a busy machine as the trial does;
times that are compared with each other are medians.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ragkv.engines import ContextChunk, Request, make_engine
from ragkv.ingest import chunk_vectors
from ragkv.ingest.ingester import BATCH_TOKENS
from ragkv.store import KVIdentity, Store, codec_from_config
from ragkv.types import Chunk, Document, Encoding

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.model.language import LanguageModel
    from ragkv.pipeline import RagKV

__all__ = ["CodecTrial", "EncodeTrial", "EngineTrial", "try_codec", "try_encoding", "try_engines"]

MEASURE_SECONDS, LEAST_SLICES = 5.0, 3
"""Encoding is timed for at least so long and so many slices."""
SLICE_SECONDS = 5.0
"""A slice is made smaller where it would take longer."""
HOLD_BYTES = 256 << 20
PREFILL_SECONDS = 30.0
"""A context that would be prefilled for longer is tried with fewer chunks."""
ROUNDS = 5
QUESTION = "What do the documents say about it?"

Piece = tuple[str, tuple[int, ...]]
Records = dict[KVIdentity, "ChunkKV"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeTrial:
    """Seconds per token of one encoding, and what was encoded: of each of `pieces`, the KV in every encoding."""

    seconds_per_token: float
    pieces: tuple[Piece, ...]
    prefix: ChunkKV | None
    prefix_ids: tuple[int, ...]
    references: dict[str, list[KVIdentity]]
    records: Records

    @property
    def tokens(self) -> int:
        return sum(len(ids) for _, ids in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTrial:
    """What one codec made of the trial's chunks.

    Bytes and seconds are per token of a chunk, all encodings together for `bytes` and `write_seconds`, one encoding
    for `cold_seconds` (nothing of it in memory) and `warm_seconds` (in the page cache). `cold_seconds` is None where
    the system keeps no page cache of its own to drop.
    """

    codec: str
    bytes: float
    disk_bytes: float
    vector_bytes: float
    write_seconds: float
    cold_seconds: float | None
    warm_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTrial:
    """Milliseconds to the first token: KV from the store (page cache), beside transformers' own sdpa prefill."""

    engine: str
    first_token_ms: float
    prefill_ms: float
    chunks: int
    context_tokens: int


def try_encoding(rag: RagKV, pieces: Sequence[Piece]) -> EncodeTrial:
    """Encode chunks as an ingest does, in slices of its size, warm; the equal ones once."""
    model, encodings = rag.model, rag.index.recipe.encodings
    pieces = list({ids: (text, ids) for text, ids in pieces}.values())
    prefix_ids = rag.prompt.prefix_ids(model.tokens)
    prefix = model.encode([prefix_ids])[0] if prefix_ids else None
    first = pieces[0][1]
    rough = [_encode(rag, prefix, prefix_ids, [first])[1] for _ in range(2)][1]  # the first one warms up
    limit = min(BATCH_TOKENS, SLICE_SECONDS * len(first) * len(encodings) / rough)
    records: Records = {}
    used: list[Piece] = []
    encoded = 0
    spent = 0.0
    for number, batch in enumerate(_slices(pieces, limit / len(encodings)), start=1):
        made, seconds = _encode(rag, prefix, prefix_ids, [ids for _, ids in batch])
        records |= made
        used += batch
        encoded += sum(len(identity.chunk_ids) for identity in made)
        spent += seconds
        enough = spent > MEASURE_SECONDS and number >= LEAST_SLICES
        if enough or sum(kv.nbytes for kv in records.values()) > HOLD_BYTES:
            break
    return EncodeTrial(
        seconds_per_token=spent / encoded,
        pieces=tuple(used),
        prefix=prefix,
        prefix_ids=prefix_ids,
        references={f"plan-{i}": _identities(rag, prefix_ids, ids) for i, (_, ids) in enumerate(used)},
        records=records,
    )


def try_codec(rag: RagKV, trial: EncodeTrial, codec: str, folder: Path, *, per_document: float) -> CodecTrial:
    """Write the trial's chunks as documents of `per_document` chunks with `codec` into `folder`, and load them."""
    own = codec == rag.config.codec
    vectors = {}
    width = max(1, min(len(trial.pieces), round(per_document)))
    chunks = [
        Chunk(
            chunk_id=f"plan-{i}",
            document_id=f"plan-{i // width}",
            ordinal=i % width,
            text=text,
            token_ids=ids,
            start=0,
            end=len(text),
        )
        for i, (text, ids) in enumerate(trial.pieces)
    ]
    if own and rag.embedder is not None:
        vectors = chunk_vectors(rag.embedder, chunks, rag.config.vectors)
    identities = [found for references in trial.references.values() for found in references]
    with Store.create(folder, codec=codec_from_config({"id": codec})) as store:
        before = store.stats().used_bytes
        started = time.perf_counter()
        for at in range(0, len(chunks), width):
            some = chunks[at : at + width]
            references = {chunk.chunk_id: trial.references[chunk.chunk_id] for chunk in some}
            store.write_document(
                Document(document_id=some[0].document_id, source="plan", content_hash="plan", media_type="text/plain"),
                "\n".join(chunk.text for chunk in some),
                some,
                recipe="plan",
                records=[(i, trial.records[i]) for found in references.values() for i in found],
                references=references,
                vectors={name: vectors[name] for name in references if name in vectors},
            )
        written = time.perf_counter() - started
        stats = store.stats()
        beside = sum(found.vector_bytes for found in store.document_stats()) if vectors else 0
    cold = None
    if _drop_cache(folder):
        with Store.open(folder, readonly=True) as store:
            cold = _load(store, identities, rag)
    with Store.open(folder, readonly=True) as store:
        _load(store, identities, rag)
        warm = statistics.median(_load(store, identities, rag) for _ in range(ROUNDS))
    loaded = trial.tokens * len(rag.index.recipe.encodings)
    return CodecTrial(
        codec=codec,
        bytes=stats.kv_bytes / trial.tokens,
        disk_bytes=(stats.used_bytes - before) / trial.tokens,
        vector_bytes=beside / trial.tokens,
        write_seconds=written / trial.tokens,
        cold_seconds=None if cold is None else max(cold, warm) / loaded,
        warm_seconds=warm / loaded,
    )


def try_engines(rag: RagKV, trial: EncodeTrial, folder: Path, names: Sequence[str]) -> list[EngineTrial]:
    """First token of each engine over the store in `folder`, beside a prefill of the same tokens, rounds interleaved.

    The context is the index's `top_k` chunks, fewer where their prefill would take too long.
    """
    model = rag.model
    fitting = max(1.0, PREFILL_SECONDS / trial.seconds_per_token)
    pieces: list[Piece] = []
    for piece in trial.pieces[: rag.config.top_k]:
        if pieces and sum(len(ids) for _, ids in [*pieces, piece]) > fitting:
            break
        pieces.append(piece)
    suffix = rag.prompt.suffix_ids(model.tokens, QUESTION)
    prompt = [*trial.prefix_ids, *(i for _, ids in pieces for i in ids), *suffix]
    times: dict[str, list[float]] = {name: [] for name in (*names, "")}
    slow = trial.seconds_per_token * len(prompt) > 1
    with Store.open(folder, readonly=True) as store:
        for _ in range((1 if slow else ROUNDS) + 1):  # the first round warms up
            times[""].append(_prefill(model, prompt))
            for name in names:
                times[name].append(_answer(rag, store, trial, name, pieces, suffix))
    median = {name: statistics.median(found[1:]) * 1000 for name, found in times.items()}
    return [
        EngineTrial(
            engine=name,
            first_token_ms=median[name],
            prefill_ms=median[""],
            chunks=len(pieces),
            context_tokens=sum(len(ids) for _, ids in pieces),
        )
        for name in names
    ]


def _identities(rag: RagKV, prefix_ids: tuple[int, ...], ids: tuple[int, ...]) -> list[KVIdentity]:
    return [_identity(encoding, prefix_ids, ids) for encoding in rag.index.recipe.encodings]


def _identity(encoding: Encoding, prefix_ids: tuple[int, ...], ids: tuple[int, ...]) -> KVIdentity:
    before = prefix_ids if encoding is Encoding.PREFIXED else ()
    return KVIdentity(model="plan", encoding=encoding, prefix_ids=before, chunk_ids=ids)


def _encode(
    rag: RagKV, prefix: ChunkKV | None, prefix_ids: tuple[int, ...], chunks: Sequence[tuple[int, ...]]
) -> tuple[Records, float]:
    """These chunks' KV in every encoding, and the seconds that it took."""
    made: Records = {}
    started = time.perf_counter()
    for encoding in rag.index.recipe.encodings:
        kvs = rag.model.encode(chunks, prefix=prefix if encoding is Encoding.PREFIXED else None)
        made |= zip([_identity(encoding, prefix_ids, ids) for ids in chunks], kvs, strict=True)
    _finish(rag.model)
    return made, time.perf_counter() - started


def _slices(pieces: Sequence[Piece], tokens: float) -> list[list[Piece]]:
    """Runs of chunks with at most so many tokens each, or one chunk."""
    slices: list[list[Piece]] = []
    held = 0
    for piece in pieces:
        if not slices or held + len(piece[1]) > tokens:
            slices.append([])
            held = 0
        slices[-1].append(piece)
        held += len(piece[1])
    return slices


def _load(store: Store, identities: Sequence[KVIdentity], rag: RagKV) -> float:
    started = time.perf_counter()
    found = store.get_many(identities, device=rag.model.device)
    _finish(rag.model)
    seconds = time.perf_counter() - started
    if len(found) != len(set(identities)):
        raise RuntimeError("the trial's own store lost a record")
    return seconds


def _answer(
    rag: RagKV, store: Store, trial: EncodeTrial, name: str, pieces: Sequence[Piece], suffix: tuple[int, ...]
) -> float:
    """Load, read the question, choose the first token."""
    engine = make_engine(name, rag.config.tuning)
    encoding, most = engine.encoding, engine.most_chunks
    pieces = pieces if most is None else pieces[:most]
    started = time.perf_counter()
    found: Records = {}
    if encoding is not None:
        wanted = [_identity(encoding, trial.prefix_ids, ids) for _, ids in pieces]
        found = store.get_many(wanted, device=rag.model.device)
        # an engine whose encoding is not stored has to encode what it misses
        missing = [identity for identity in dict.fromkeys(wanted) if identity not in found]
        if missing:
            prefix = trial.prefix if encoding is Encoding.PREFIXED else None
            made = rag.model.encode([identity.chunk_ids for identity in missing], prefix=prefix)
            found |= zip(missing, made, strict=True)
    request = Request(
        prefix_ids=trial.prefix_ids,
        prefix=None if encoding is None else trial.prefix,
        chunks=tuple(
            ContextChunk(
                token_ids=ids,
                score=0.5,
                kv=None if encoding is None else found[_identity(encoding, trial.prefix_ids, ids)],
            )
            for _, ids in pieces
        ),
        suffix_ids=suffix,
        question=QUESTION,
        prompt=rag.prompt,
    )
    engine.start(rag.model, request).best()  # ends with the token on the host, so the device is done
    return time.perf_counter() - started


def _prefill(model: LanguageModel, prompt: list[int]) -> float:
    tokens = torch.tensor([prompt], device=model.device)
    with model.plain() as plain:
        started = time.perf_counter()
        int(plain(input_ids=tokens, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        return time.perf_counter() - started


def _finish(model: LanguageModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _drop_cache(folder: Path) -> bool:
    """Have the system forget the store's file, so that it is read from the disk again; False where it cannot."""
    if not hasattr(os, "posix_fadvise"):
        return False
    descriptor = os.open(folder / "store" / "data.mdb", os.O_RDONLY)
    try:
        os.fsync(descriptor)  # pages that are not on the disk yet stay in memory
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return True
