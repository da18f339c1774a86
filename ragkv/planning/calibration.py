"""What a model needs, and times for a few chunks, from which the cost of all chunks on this machine is estimated.

`model_requirements` loads a model and finds the engines that run on it, bytes of KV per codec, memory and slow paths.
`ChunkCalibration` times encoding, storing, loading and answering, with the same code as an ingest and a question.
Everything is timed five times, or as often as there is time, but at least once. The median counts; the range of the
repeats shows its error.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ragkv.config import NONE
from ragkv.engines import ContextChunk, Request, engine_names, make_engine, unsupported_reason
from ragkv.ingest import chunk_vectors, encode_identities
from ragkv.ingest.encoding import chunk_identity
from ragkv.ingest.ingester import BATCH_TOKENS
from ragkv.model.checkpoint import computes_in
from ragkv.runtime import Stream
from ragkv.store import KVIdentity, Store, codec_from_config, codec_names
from ragkv.store.record import encode_record
from ragkv.types import Chunk, Document, Encoding

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.model.language_model import LanguageModel
    from ragkv.pipeline import RagKV

ROUNDS = 5
"""Repeats of each timing, if there is time for them."""
FEWEST = 3
"""The fewest repeats that show whether they agree."""
WIDE = 0.25
"""If repeats are further apart than this share of their median, the machine was not steady."""
STEPS = 4
"""Tokens of an answer that are timed after the second one."""
QUESTION = "What do the documents say about it?"

Clock = Callable[[], float]
TrialChunk = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """The seconds of each repetition of some work; never empty."""

    seconds: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median, which a single disturbance does not change."""
        return statistics.median(self.seconds)

    @property
    def low(self) -> float:
        return min(self.seconds)

    @property
    def high(self) -> float:
        return max(self.seconds)

    @property
    def spread(self) -> float:
        """The range as a share of the median. Of five or more repeats, the fastest and slowest are ignored."""
        found = sorted(self.seconds)
        found = found[1:-1] if len(found) >= 5 else found
        return (found[-1] - found[0]) / self.value if self.value > 0 else 0.0

    def to_json(self, unit: float) -> dict[str, float]:
        """Median, fastest and slowest in multiples of `unit` seconds, and the number of repeats."""
        found = {"value": self.value, "low": self.low, "high": self.high}
        return {**{name: round(value / unit, 3) for name, value in found.items()}, "repeats": len(self.seconds)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingQuality:
    """Whether timings are reliable; if not, `reasons` has a sentence for each reason."""

    reasons: tuple[str, ...]

    @classmethod
    def of(cls, repeats: Mapping[str, Repeats]) -> TimingQuality:
        """Judge named repeats by their number and their range."""
        reasons = []
        for name, found in repeats.items():
            if len(found.seconds) < FEWEST:
                times = "once" if len(found.seconds) == 1 else f"{len(found.seconds)} times"
                reasons.append(f"{name} was timed only {times}, so its error is unknown.")
            elif found.spread > WIDE:
                reasons.append(
                    f"{len(found.seconds)} repeats of {name} are {found.spread:.0%} of their median apart: "
                    "the machine was not steady."
                )
        return cls(reasons=tuple(reasons))

    @property
    def trusted(self) -> bool:
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        return {"trusted": self.trusted, "reasons": list(self.reasons), "waited": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedCalibration:
    """The seconds to load the embedder, its seconds per token, and the number of texts that it embedded."""

    start: float
    repeats: Repeats
    texts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCalibration:
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
class EngineCalibration:
    """Seconds to the first token with KV from the store (page cache), and with transformers' own sdpa prefill.

    `second_token` includes the work that is done once before it; `token` is the time of any later one.
    """

    engine: str
    first_token: Repeats
    second_token: Repeats
    token: Repeats
    prefill: Repeats
    chunks: int
    context_tokens: int
    prompt_tokens: int

    @property
    def first_token_ms(self) -> float:
        return self.first_token.value * 1000

    @property
    def prefill_ms(self) -> float:
        return self.prefill.value * 1000

    def overtaken_after(self, prefill: float, decode: float) -> int | None:
        """The number of the answer's token from which another runtime, with these tokens per second, is ahead."""
        first, second, token = (found.value for found in (self.first_token, self.second_token, self.token))
        return overtaken_after((first, second, token), (self.prompt_tokens / prefill, 1 / decode, 1 / decode))


def overtaken_after(ours: tuple[float, float, float], others: tuple[float, float, float]) -> int | None:
    """The number of the token that another runtime delivers earlier than this one; None if it never does.

    Both are given as the seconds of the first token, of the second one, and of each later one.
    """
    ahead = others[0] - ours[0]
    if ahead < 0:
        return 1
    ahead += others[1] - ours[1]
    if ahead < 0:
        return 2
    behind = ours[2] - others[2]
    return 3 + math.floor(ahead / behind) if behind > 0 else None


class ChunkCalibration:
    """A trial with a few chunks and an index that is empty; its stores are folders in `folder`.

    `encode` is the seconds per token of one encoding. A step that has begun by the `deadline` is finished.
    """

    def __init__(
        self,
        rag: RagKV,
        chunks: Sequence[TrialChunk],
        folder: Path,
        *,
        now: Clock,
        deadline: float,
        seen: int = 0,
    ) -> None:
        """Encode distinct chunks as an ingest does, after a warm-up; also what a question reads, if there is time.

        In `context` encoding every chunk sees the same `seen` tokens, because only their number costs time.
        """
        self._rag, self._folder, self._now, self._deadline = rag, folder, now, deadline
        self._seen = tuple(islice(cycle(i for _, ids in chunks for i in ids), seen))
        self._packet = rag.index.packet
        self.prefix_ids = rag.prompt.prefix_ids(rag.model.tokens)
        self._prefix = rag.model.encode([self.prefix_ids])[0] if self.prefix_ids else None
        self._records: dict[KVIdentity, ChunkKV] = {}
        distinct = list({ids: (text, ids) for text, ids in chunks}.values())
        self.chunks = distinct[:1]
        self._encode()  # warms up
        self.encode = Repeats(seconds=(self._encode(),))
        if self.left:  # otherwise one chunk has to suffice
            question = sum(len(ids) for _, ids in distinct[: rag.config.top_k])
            self.chunks = self._fitting(distinct, max(BATCH_TOKENS, question), len(rag.index.recipe.encodings))
            self.encode = self._repeated(self._encode)

    @property
    def left(self) -> float:
        """The seconds that remain."""
        return max(0.0, self._deadline - self._now())

    @property
    def tokens(self) -> int:
        return sum(len(ids) for _, ids in self.chunks)

    def _repeated(self, work: Callable[[], float]) -> Repeats:
        """The results of `work`, repeated as often as there is time."""
        found = [work()]
        while len(found) < ROUNDS and self.left:
            found.append(work())
        return Repeats(seconds=tuple(found))

    def _fitting(self, chunks: Sequence[TrialChunk], tokens: int, times: int) -> list[TrialChunk]:
        """As many chunks as have at most `tokens`, and take at most a quarter of the time if encoded `times` times."""
        most = min(tokens, self.left / 4 / ROUNDS / times / max(self.encode.value, 1e-9))
        sums = accumulate(len(ids) for _, ids in chunks)
        return [*chunks[:1], *(chunk for chunk, total in list(zip(chunks, sums, strict=True))[1:] if total <= most)]

    def _encode(self) -> float:
        started = self._now()
        for encoding in self._rag.index.recipe.encodings:
            self._records |= self._made([self._identity(encoding, ids) for _, ids in self.chunks])
        self._finish()
        return (self._now() - started) / (self.tokens * len(self._rag.index.recipe.encodings))

    def _made(self, wanted: Sequence[KVIdentity]) -> dict[KVIdentity, ChunkKV]:
        """The KV of these chunks, encoded by the model; all in one encoding."""
        return encode_identities(self._rag.model, wanted, lambda: self._prefix, self._packet)

    def _identity(self, encoding: Encoding, ids: tuple[int, ...]) -> KVIdentity:
        seen = self._seen if encoding is Encoding.CONTEXT else ()
        return chunk_identity("plan", encoding, self.prefix_ids, ids, seen, self._packet)

    def _finish(self) -> None:
        if self._rag.model.device.type == "cuda":
            torch.cuda.synchronize(self._rag.model.device)

    def embedding(self) -> EmbedCalibration:
        """Load the embedder, if the index has one, and embed chunks."""
        if self._rag.config.embedder == NONE:
            return EmbedCalibration(start=0.0, repeats=Repeats(seconds=(0.0,)), texts=0)
        started = self._now()
        embedder = self._rag.embedder
        assert embedder is not None
        texts = [text for text, _ in self.chunks][:64]
        embedder.embed_documents(texts[:1])
        loaded = self._now()
        embedder.embed_documents(texts[:1])  # a warm run shows how long one text takes
        one = self._now() - loaded
        texts = texts[: max(1, int(self.left / 4 / ROUNDS / max(one, 1e-9)))]
        tokens = sum(len(ids) for _, ids in self.chunks[: len(texts)])

        def embed() -> float:
            begun = self._now()
            embedder.embed_documents(texts)
            return (self._now() - begun) / tokens

        return EmbedCalibration(start=loaded - started, repeats=self._repeated(embed), texts=len(texts))

    def codec(self, codec: str, *, per_document: float, embedded: int) -> CodecCalibration:
        """Write the chunks with `codec`, as documents of `per_document` chunks, and load them.

        With the index's own codec, the first `embedded` chunks get vectors.
        """
        rag, folder = self._rag, self._folder / codec
        width = max(1, min(len(self.chunks), round(per_document)))
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
            for i, (text, ids) in enumerate(self.chunks)
        ]
        vectors = {}
        if codec == rag.config.codec and rag.embedder is not None:
            vectors = chunk_vectors(rag.embedder, chunks[:embedded], rag.config.vectors)
        encodings = rag.index.recipe.encodings
        with Store.create(folder, codec=codec_from_config({"id": codec})) as store:
            before = store.stats().used_bytes
            started = self._now()
            for at in range(0, len(chunks), width):
                some = chunks[at : at + width]
                references = {c.chunk_id: [self._identity(each, c.token_ids) for each in encodings] for c in some}
                store.write_document(
                    Document(
                        document_id=some[0].document_id, source="plan", content_hash="plan", media_type="text/plain"
                    ),
                    "\n".join(chunk.text for chunk in some),
                    some,
                    recipe="plan",
                    records=[(i, self._records[i]) for found in references.values() for i in found],
                    references=references,
                    vectors={name: vectors[name] for name in references if name in vectors},
                )
            written = self._now() - started
            stats = store.stats()
            beside = sum(found.vector_bytes for found in store.document_stats()) if vectors else 0
        cold = None
        if _drop_cache(folder):
            with Store.open(folder, readonly=True) as store:
                cold = self._load(store)
        with Store.open(folder, readonly=True) as store:
            self._load(store)
            warm = self._repeated(lambda: self._load(store)).value
        with_vectors = sum(len(ids) for _, ids in self.chunks[:embedded])
        return CodecCalibration(
            codec=codec,
            bytes=stats.kv_bytes / self.tokens,
            disk_bytes=(stats.used_bytes - before) / self.tokens,
            vector_bytes=beside / with_vectors if beside else 0.0,
            write_seconds=written / self.tokens,
            cold_seconds=None if cold is None else max(cold, warm),
            warm_seconds=warm,
        )

    def _load(self, store: Store) -> float:
        """The seconds per token of one encoding to load all records."""
        encodings = self._rag.index.recipe.encodings
        wanted = [self._identity(encoding, ids) for encoding in encodings for _, ids in self.chunks]
        started = self._now()
        found = store.get_many(wanted, device=self._rag.model.place)
        self._finish()
        seconds = self._now() - started
        if len(found) != len(set(wanted)):
            raise RuntimeError("the trial's own store lost a record")
        return seconds / (self.tokens * len(encodings))

    def engines(self, names: Sequence[str]) -> list[EngineCalibration]:
        """Time the first token of each engine with the store of the index's codec, and a prefill of the same tokens.

        The context has the index's `top_k` chunks, or fewer if rounds over them would take too much time.
        """
        rag = self._rag
        chunks = self._fitting(self.chunks[: rag.config.top_k], self.tokens, 1)
        suffix = rag.prompt.suffix_ids(rag.model.tokens, QUESTION)
        prompt = [*self.prefix_ids, *(i for _, ids in chunks for i in ids), *suffix]
        prefills: list[float] = []
        answers: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
        with Store.open(self._folder / rag.config.codec, readonly=True) as store:
            for done in range(ROUNDS + 1):  # the first round warms up
                if done and not self.left:
                    break
                prefills.append(self._prefill(prompt))
                for name in names:
                    answers[name].append(self._answer(store, name, chunks, suffix))

        def repeats(found: Sequence[float]) -> Repeats:
            # if there was time for the warm-up round only, it has to suffice
            return Repeats(seconds=tuple(found[1:] or found))

        return [
            EngineCalibration(
                engine=name,
                first_token=repeats([first for first, _, _ in found]),
                second_token=repeats([second for _, second, _ in found]),
                token=repeats([token for _, _, token in found]),
                prefill=repeats(prefills),
                chunks=len(chunks),
                context_tokens=sum(len(ids) for _, ids in chunks),
                prompt_tokens=len(prompt),
            )
            for name, found in answers.items()
        ]

    def _answer(
        self, store: Store, name: str, chunks: Sequence[TrialChunk], suffix: tuple[int, ...]
    ) -> tuple[float, float, float]:
        """Seconds until the first token (load KV, read the question, sample); of the second token; of a later one."""
        rag = self._rag
        engine = make_engine(name, rag.config.tuning, context=rag.config.encoding.context)
        encoding = engine.reads
        chunks = chunks[: engine.most_chunks]
        started = self._now()
        found: dict[KVIdentity, ChunkKV] = {}
        wanted = [] if encoding is None else [self._identity(encoding, ids) for _, ids in chunks]
        if wanted:
            found = store.get_many(wanted, device=rag.model.place)
            # an engine whose encoding is not stored encodes its misses
            if missing := [identity for identity in dict.fromkeys(wanted) if identity not in found]:
                found |= self._made(missing)
        request = Request(
            prefix_ids=self.prefix_ids,
            prefix=None if encoding is None else self._prefix,
            chunks=tuple(
                ContextChunk(token_ids=ids, score=0.5, kv=found[wanted[i]] if wanted else None)
                for i, (_, ids) in enumerate(chunks)
            ),
            suffix_ids=suffix,
            question=QUESTION,
            prompt=rag.prompt,
        )
        stream = Stream(rag.index.runtime, engine, request)
        token = stream.best()  # on the host, so the device has finished
        ends = [self._now()]
        for _ in range(1 + STEPS):
            stream.advance(token)
            token = stream.best()
            ends.append(self._now())
        stream.close()
        return ends[0] - started, ends[1] - ends[0], (ends[-1] - ends[1]) / STEPS

    def _prefill(self, prompt: list[int]) -> float:
        tokens = torch.tensor([prompt], device=self._rag.model.device)
        with self._rag.model.plain() as plain:
            started = self._now()
            int(plain(input_ids=tokens, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
            return self._now() - started


def _drop_cache(folder: Path) -> bool:
    """Drop the store's file from the page cache, so that it is read from the disk; False if the system cannot."""
    dropped = False
    if sys.platform == "linux":
        descriptor = os.open(folder / "store" / "data.mdb", os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not on the disk yet would stay in memory
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            dropped = True
        finally:
            os.close(descriptor)
    return dropped


_TOKENS = 256
"""Tokens of the chunk that is encoded: the default size of a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequirements:
    """The requirements of a loaded model. `engines`: None for an exact one, else why it is refused.

    `kv_bytes` by codec: bytes per additional token of a chunk. `state_bytes` per chunk, for recurrent layers.
    `expanded_bytes` per token: the size of full keys and values, for latent attention. `slow`: sentences on what will
    be slow, and why.
    """

    name: str
    family: str
    dtype: str
    device: str
    parameters: int
    weight_bytes: int
    positions: int | None
    windows: tuple[int, ...]
    quantised: str | None
    engines: Mapping[str, str | None]
    kv_bytes: Mapping[str, float]
    state_bytes: int
    expanded_bytes: int | None
    slow: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As `ragkv models MODEL --json` prints it."""
        fields = asdict(self)
        engines = fields.pop("engines")
        reasons = {name: reason for name, reason in engines.items() if reason is not None}
        verdicts = {name: "exact" if reason is None else "refused" for name, reason in engines.items()}
        return {**fields, "engines": verdicts, "reasons": reasons}


def model_requirements(name: str, *, dtype: str = "auto", device: str | None = None) -> ModelRequirements:
    """Load a model and measure it. Raises ModelLoadError or UnsupportedModelError if it cannot be run."""
    from ragkv.model.self_check import load_model

    model = load_model(name, dtype=dtype, device=device)
    engines = {each: unsupported_reason(make_engine(each, {}), model) for each in engine_names()}
    packed = model.checkpoint.quantised(model.device, model.revision)
    tokens = min(_TOKENS, model.max_positions or _TOKENS)
    ids = [i % min(model.config.vocab_size, 1000) for i in range(3, 3 + tokens)]
    kv, half = model.encode([ids, ids[: tokens // 2]])
    return ModelRequirements(
        name=name,
        family=model.config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        device=", ".join(dict.fromkeys(map(str, model.place))) if isinstance(model.place, tuple) else str(model.place),
        parameters=model.parameters,
        weight_bytes=sum(p.numel() * p.element_size() for p in model.module.parameters()),
        positions=model.max_positions,
        windows=tuple(model.windows),
        quantised=None if packed is None else packed.regime,
        engines=engines,
        kv_bytes={
            codec: max(0, _stored(kv, codec) - _stored(half, codec))
            / (kv.tokens - half.tokens)  # without the part of constant size
            for codec in sorted(codec_names(), key=lambda each: each != "raw")
        },
        state_bytes=kv.shape.state_bytes,
        expanded_bytes=_expanded(model),
        slow=tuple(_slow(model, engines)),
    )


def _stored(kv: ChunkKV, codec: str) -> int:
    """Bytes of a record in a codec."""
    identity = KVIdentity(model="requirements", encoding=Encoding.STANDALONE, prefix_ids=(), chunk_ids=(0,) * kv.tokens)
    return encode_record(kv, identity, codec_from_config({"id": codec})).stored_bytes


def _expanded(model: LanguageModel) -> int | None:
    """Bytes per token of the keys and values that latent attention expands from its cache; None for other models."""
    if not getattr(model.config, "kv_lora_rank", None):
        return None
    from ragkv.model.attention_hook import latent_bytes

    return latent_bytes(model.config, model.dtype.itemsize)[1]


def _slow(model: LanguageModel, engines: Mapping[str, str | None]) -> list[str]:
    """What a user should know before an ingest of hours."""
    found = []
    packed = model.checkpoint.quantised(model.device, model.revision)
    if not computes_in(model.device, model.dtype):
        found.append(f"this processor has no units for {model.dtype}: --dtype float32 is several times faster")
    if packed is not None and packed.unpacked:
        found.append(f"its {packed.method} weights are unpacked here, so they take the memory of ordinary ones")
    if not model.joins:
        found.append("every sequence continues from its own cache, so questions cannot share the reading of chunks")
    if engines.get("block") is not None and engines.get("ape") is not None:
        found.append("each retrieved chunk has a sequence of its own (pced), so a question costs a pass per chunk")
    if getattr(model.config, "attn_logit_softcapping", None):
        found.append("its soft-capped scores have no fast kernel: attention is a plain matrix product")
    return found
