"""Encode, store, load and ask about a few chunks, to estimate what all chunks will cost on this machine.

The trial uses the same code as an ingest and a question: the model's encode, the store's codecs and transactions, the
engines. Everything is timed several times while the given time lasts, but at least once. The median counts, and the
repeats show how far it may be off.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ragkv.engines import ContextChunk, Request, make_engine
from ragkv.ingest import chunk_vectors
from ragkv.ingest.ingester import BATCH_TOKENS
from ragkv.planning.stopwatch import Repeats, Stopwatch
from ragkv.runtime import Stream
from ragkv.store import KVIdentity, Store, codec_from_config
from ragkv.types import Chunk, Document, Encoding

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.model.language import LanguageModel
    from ragkv.pipeline import RagKV

__all__ = ["CodecTrial", "EncodeTrial", "EngineTrial", "try_codec", "try_encoding", "try_engines"]

ROUNDS = 5
"""Repeats of each timing, if there is time for them."""
HOLD_BYTES = 128 << 20

QUESTION = "What do the documents say about it?"

Piece = tuple[str, tuple[int, ...]]
Records = dict[KVIdentity, "ChunkKV"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeTrial:
    """Seconds per token of one encoding, and the chunks that were encoded, with their KV in every encoding."""

    repeats: Repeats
    pieces: tuple[Piece, ...]
    prefix: ChunkKV | None
    prefix_ids: tuple[int, ...]
    references: dict[str, list[KVIdentity]]
    records: Records

    @property
    def seconds_per_token(self) -> float:
        return self.repeats.value

    @property
    def tokens(self) -> int:
        return sum(len(ids) for _, ids in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTrial:
    """Size and speed of one codec on the trial's chunks.

    Bytes and seconds are per token of a chunk: for all encodings together in `bytes` and `write_seconds`, for one
    encoding in `cold_seconds` (read from the disk) and `warm_seconds` (read from the page cache). `cold_seconds` is
    None if the page cache cannot be dropped.
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
    """Seconds to the first token with KV from the store (page cache), and with transformers' own sdpa prefill."""

    engine: str
    first_token: Repeats
    prefill: Repeats
    chunks: int
    context_tokens: int

    @property
    def first_token_ms(self) -> float:
        return self.first_token.value * 1000

    @property
    def prefill_ms(self) -> float:
        return self.prefill.value * 1000


def try_encoding(rag: RagKV, pieces: Sequence[Piece], *, seconds: float, watch: Stopwatch) -> EncodeTrial:
    """Encode distinct chunks as an ingest does, in batches of its size, after a warm-up.

    As many batches as a round has time for are encoded ROUNDS times, or fewer times if `seconds` run out.
    """
    deadline = watch.now() + seconds
    model, encodings = rag.model, rag.index.recipe.encodings
    pieces = list({ids: (text, ids) for text, ids in pieces}.values())
    prefix_ids = rag.prompt.prefix_ids(model.tokens)
    prefix = model.encode([prefix_ids])[0] if prefix_ids else None
    first = pieces[0][1]
    # the first one warms up
    records, rough = [_encode(rag, prefix, prefix_ids, [first], watch) for _ in range(2)][1]
    used = pieces[:1]
    rough /= len(first) * len(encodings)
    rates = [rough]
    each = seconds / (ROUNDS + 1)
    if watch.now() < deadline:  # otherwise one chunk has to be enough
        limit = min(BATCH_TOKENS, each / max(rough, 1e-9))
        slices = _slices(pieces, limit / len(encodings))
        records, used, rates, round_slices = {}, [], [], 0
        for number in range(ROUNDS):
            begun, spent, encoded = watch.now(), 0.0, 0
            for batch in slices if number == 0 else slices[:round_slices]:
                made, took = _encode(rag, prefix, prefix_ids, [ids for _, ids in batch], watch)
                spent += took
                encoded += sum(len(identity.chunk_ids) for identity in made)
                if number == 0:
                    records |= made
                    used += batch
                    round_slices += 1
                    if spent >= each or sum(kv.nbytes for kv in records.values()) > HOLD_BYTES:
                        break
            rates.append(spent / encoded)
            if watch.now() + (watch.now() - begun) > deadline:
                break
    return EncodeTrial(
        repeats=Repeats(seconds=tuple(rates)),
        pieces=tuple(used),
        prefix=prefix,
        prefix_ids=prefix_ids,
        references={f"plan-{i}": _identities(rag, prefix_ids, ids) for i, (_, ids) in enumerate(used)},
        records=records,
    )


def try_codec(
    rag: RagKV,
    trial: EncodeTrial,
    codec: str,
    folder: Path,
    *,
    per_document: float,
    embedded: int,
    seconds: float,
    watch: Stopwatch,
) -> CodecTrial:
    """Write the trial's chunks with `codec` into `folder`, as documents of `per_document` chunks, and load them.

    With the index's own codec, the first `embedded` chunks get vectors. Loading is repeated until `seconds` are over.
    """
    deadline = watch.now() + seconds
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
        vectors = chunk_vectors(rag.embedder, chunks[:embedded], rag.config.vectors)
    identities = [found for references in trial.references.values() for found in references]
    with Store.create(folder, codec=codec_from_config({"id": codec})) as store:
        before = store.stats().used_bytes
        started = watch.now()
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
        written = watch.now() - started
        stats = store.stats()
        beside = sum(found.vector_bytes for found in store.document_stats()) if vectors else 0
    cold = None
    if _drop_cache(folder):
        with Store.open(folder, readonly=True) as store:
            cold = _load(store, identities, rag, watch)
    with Store.open(folder, readonly=True) as store:
        _load(store, identities, rag, watch)
        loads = [_load(store, identities, rag, watch)]
        while len(loads) < ROUNDS and watch.now() < deadline:
            loads.append(_load(store, identities, rag, watch))
    warm = statistics.median(loads)
    loaded = trial.tokens * len(rag.index.recipe.encodings)
    with_vectors = sum(len(ids) for _, ids in trial.pieces[:embedded])
    return CodecTrial(
        codec=codec,
        bytes=stats.kv_bytes / trial.tokens,
        disk_bytes=(stats.used_bytes - before) / trial.tokens,
        vector_bytes=beside / with_vectors if beside else 0.0,
        write_seconds=written / trial.tokens,
        cold_seconds=None if cold is None else max(cold, warm) / loaded,
        warm_seconds=warm / loaded,
    )


def try_engines(
    rag: RagKV, trial: EncodeTrial, folder: Path, names: Sequence[str], *, seconds: float, watch: Stopwatch
) -> list[EngineTrial]:
    """Time the first token of each engine with the store in `folder`, and a prefill of the same tokens, in turn.

    The context has the index's `top_k` chunks, or fewer if a round over them would take too much of `seconds`.
    """
    model = rag.model
    deadline = watch.now() + seconds
    fitting = seconds / 3 / max(trial.seconds_per_token, 1e-9)  # for a warm-up round, a counted round, and the engines
    pieces: list[Piece] = []
    for piece in trial.pieces[: rag.config.top_k]:
        if pieces and sum(len(ids) for _, ids in [*pieces, piece]) > fitting:
            break
        pieces.append(piece)
    suffix = rag.prompt.suffix_ids(model.tokens, QUESTION)
    prompt = [*trial.prefix_ids, *(i for _, ids in pieces for i in ids), *suffix]
    times: dict[str, list[float]] = {name: [] for name in (*names, "")}
    with Store.open(folder, readonly=True) as store:
        for _ in range(ROUNDS + 1):  # the first round warms up
            begun = watch.now()
            times[""].append(_prefill(model, prompt, watch))
            for name in names:
                times[name].append(_answer(rag, store, trial, name, pieces, suffix, watch))
            if watch.now() + (watch.now() - begun) > deadline:
                break
    # if there was time for the warm-up round only, it has to be enough
    repeats = {name: Repeats(seconds=tuple(found[1:] or found)) for name, found in times.items()}
    return [
        EngineTrial(
            engine=name,
            first_token=repeats[name],
            prefill=repeats[""],
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
    rag: RagKV,
    prefix: ChunkKV | None,
    prefix_ids: tuple[int, ...],
    chunks: Sequence[tuple[int, ...]],
    watch: Stopwatch,
) -> tuple[Records, float]:
    """The chunks' KV in every encoding, and the seconds that encoding took."""
    made: Records = {}
    started = watch.now()
    for encoding in rag.index.recipe.encodings:
        kvs = rag.model.encode(chunks, prefix=prefix if encoding is Encoding.PREFIXED else None)
        made |= zip([_identity(encoding, prefix_ids, ids) for ids in chunks], kvs, strict=True)
    _finish(rag.model)
    return made, watch.now() - started


def _slices(pieces: Sequence[Piece], tokens: float) -> list[list[Piece]]:
    """Runs of chunks with at most `tokens` tokens each, or of one longer chunk."""
    slices: list[list[Piece]] = []
    held = 0
    for piece in pieces:
        if not slices or held + len(piece[1]) > tokens:
            slices.append([])
            held = 0
        slices[-1].append(piece)
        held += len(piece[1])
    return slices


def _load(store: Store, identities: Sequence[KVIdentity], rag: RagKV, watch: Stopwatch) -> float:
    started = watch.now()
    found = store.get_many(identities, device=rag.model.place)
    _finish(rag.model)
    seconds = watch.now() - started
    if len(found) != len(set(identities)):
        raise RuntimeError("the trial's own store lost a record")
    return seconds


def _answer(
    rag: RagKV,
    store: Store,
    trial: EncodeTrial,
    name: str,
    pieces: Sequence[Piece],
    suffix: tuple[int, ...],
    watch: Stopwatch,
) -> float:
    """The seconds to load KV, read the question, and choose the first token."""
    engine = make_engine(name, rag.config.tuning)
    encoding, most = engine.encoding, engine.most_chunks
    pieces = pieces if most is None else pieces[:most]
    started = watch.now()
    found: Records = {}
    if encoding is not None:
        wanted = [_identity(encoding, trial.prefix_ids, ids) for _, ids in pieces]
        found = store.get_many(wanted, device=rag.model.place)
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
    Stream(rag.index.runtime, engine, request).best()  # ends with the token on the host, so the device is done
    return watch.now() - started


def _prefill(model: LanguageModel, prompt: list[int], watch: Stopwatch) -> float:
    tokens = torch.tensor([prompt], device=model.device)
    with model.plain() as plain:
        started = watch.now()
        int(plain(input_ids=tokens, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        return watch.now() - started


def _finish(model: LanguageModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _drop_cache(folder: Path) -> bool:
    """Drop the store's file from the page cache, so that it is read from the disk; False if the system cannot."""
    if not hasattr(os, "posix_fadvise"):
        return False
    descriptor = os.open(folder / "store" / "data.mdb", os.O_RDONLY)
    try:
        os.fsync(descriptor)  # pages that are not on the disk yet would stay in memory
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return True
