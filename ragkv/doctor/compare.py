"""Compare an engine's or a codec's next-token distributions with those of another one, along the same tokens.

KV is encoded anew and kept in memory, and nothing is written, so any model can be tried on an index's documents.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ragkv.attention.kv import ChunkKV
from ragkv.config import LLAMA_CPP, TRANSFORMERS
from ragkv.decoding import GREEDY, Decoding
from ragkv.engines import ContextChunk, Engine, Request
from ragkv.errors import KVMismatchError, UnsupportedModelError
from ragkv.index.index import fingerprint_of, load_language_model, runs_by_llama_cpp
from ragkv.ingest import encode_identities
from ragkv.ingest.encoding import chunk_identity, seen_before
from ragkv.model.checkpoint import resolve
from ragkv.model.prompt import render
from ragkv.runtime import Stream, runtime_of
from ragkv.runtime.decoding import Detokenizer
from ragkv.store import Codec, KVIdentity, MemoryTier
from ragkv.store.record import round_trip
from ragkv.types import Chunk, Document, Encoding, ScoredChunk

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel
    from ragkv.pipeline import RagKV

HELD_BYTES = 1 << 30
"""KV that is kept for the next questions, which often retrieve the same chunks."""


class ChunkReader:
    """Makes an engine's requests from chunks of an index, for the index's model or another one.

    `own`: it is the index's model; `current`: it also cut the chunks. A model that did not cut them reads their texts
    in its own tokens.
    """

    def __init__(
        self, rag: RagKV, name: str | None = None, dtype: str | None = None, *, engines: Sequence[str] = ()
    ) -> None:
        """`engines`: those that another model has to run, which decide about its runtime."""
        config, index = rag.config, rag.index
        self.name, dtype = name or config.model, dtype or config.dtype
        self._store = rag.store
        self.own = self.current = (self.name, dtype) == (config.model, config.dtype)
        self.model: LanguageModel
        if self.own:
            self.model, self.fingerprint, self.prompt = rag.model, index.fingerprint, index.prompt
            self.cut_by = index.cut_by
            try:
                index.require_same_model()
            except KVMismatchError:
                self.current = False
        else:
            checkpoint = resolve(self.name)
            settings = {"dtype": dtype, "codec": config.codec, "engines": engines, "encoding": config.encoding.context}
            runtime = LLAMA_CPP if runs_by_llama_cpp(checkpoint, settings) else TRANSFORMERS
            config = replace(config, model=self.name, dtype=cast("Any", dtype), executor=cast("Any", runtime))
            self.model = load_language_model(config, index.device)
            self.cut_by = self.fingerprint = fingerprint_of(config, index.device, lambda: self.model.revision)
            self.prompt = render(config.prompt, self.model.tokens)
        self._prefix_ids = self.prompt.prefix_ids(self.model.tokens)
        self._memory = MemoryTier(HELD_BYTES)

    def request(self, engine: Engine, question: str, scored: Sequence[ScoredChunk], *, window: int = 0) -> Request:
        """The request of a question about chunks, best first. `window`: the `[encoding] context` of a chunk."""
        best_last = scored[: engine.most_chunks][::-1]
        chunks = [self._cut(item.chunk) for item in best_last]
        kvs: Sequence[ChunkKV | None] = [None] * len(chunks)
        if engine.reads is not None:
            seen = dict(self._seen(chunks, window)) if engine.reads is Encoding.CONTEXT else {}
            kvs = self._kv(
                [self._identity(engine.reads, chunk.token_ids, seen.get(chunk.chunk_id, ())) for chunk in chunks]
            )
        return Request(
            prefix_ids=self._prefix_ids,
            prefix=None if engine.reads is None else self._prefix(),
            chunks=tuple(
                ContextChunk(token_ids=chunk.token_ids, score=item.score, kv=kv)
                for chunk, item, kv in zip(chunks, best_last, kvs, strict=True)
            ),
            suffix_ids=self.prompt.suffix_ids(self.model.tokens, question),
            question=question,
            prompt=self.prompt,
        )

    def to_json(self) -> dict[str, Any]:
        """The model as `ragkv doctor --json` prints it."""
        return {
            "model": self.name,
            "parameters": self.model.parameters,
            "dtype": self.model.precision,
            "device": str(self.model.device),
            "fingerprint": self.cut_by,
            "same": self.current,
        }

    def _cut(self, chunk: Chunk) -> Chunk:
        """The chunk in the tokens of this model."""
        if self.current:
            return chunk
        return replace(chunk, token_ids=self.prompt.chunk_ids(self.model.tokens, chunk.text))

    def _seen(self, chunks: Sequence[Chunk], window: int) -> list[tuple[str, tuple[int, ...]]]:
        """For each chunk id, the tokens of its document that the chunk sees."""

        def look(document: Document, chunk: Chunk, before: Iterator[Chunk]) -> tuple[str, tuple[int, ...]]:
            earlier = map(self._cut, before)
            return chunk.chunk_id, seen_before(chunk, earlier, document.title, window, self.prompt, self.model.tokens)

        return self._store.with_preceding([chunk.chunk_id for chunk in chunks], look)

    def _prefix(self) -> ChunkKV | None:
        """The KV of the prefix, or None for an empty prefix."""
        if not self._prefix_ids:
            return None
        return self._kv([self._identity(Encoding.STANDALONE, self._prefix_ids)])[0]

    def _kv(self, identities: Sequence[KVIdentity]) -> list[ChunkKV]:
        by_key = {identity.key(): identity for identity in identities}

        def load(keys: Sequence[bytes]) -> dict[bytes, ChunkKV]:
            encoded = encode_identities(self.model, [by_key[key] for key in keys], self._prefix)
            return {identity.key(): kv for identity, kv in encoded.items()}

        held, _ = self._memory.get_many(by_key, load)
        return [held[identity.key()] for identity in identities]

    def _identity(self, encoding: Encoding, ids: tuple[int, ...], seen: tuple[int, ...] = ()) -> KVIdentity:
        return chunk_identity(self.fingerprint, encoding, self._prefix_ids, ids, seen)


def with_kv(request: Request, change: Callable[[ChunkKV, tuple[int, ...]], ChunkKV]) -> Request:
    """The request with `change(kv, token ids)` in place of the KV of its prefix and of its chunks."""
    return replace(
        request,
        prefix=None if request.prefix is None else change(request.prefix, request.prefix_ids),
        chunks=tuple(
            each if each.kv is None else replace(each, kv=change(each.kv, each.token_ids)) for each in request.chunks
        ),
    )


class RoundTrip:
    """Encodes and decodes KV with a codec, as a store would do; a `change` for `with_kv`.

    It counts the bytes of payloads and tensors, and `exact` says whether every bit survived.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.exact = True
        self.stored_bytes = self.raw_bytes = 0

    def __call__(self, kv: ChunkKV, ids: tuple[int, ...]) -> ChunkKV:
        identity = KVIdentity(model="round trip", encoding=Encoding.STANDALONE, chunk_ids=ids)
        record, decoded = round_trip(kv, identity, self._codec)
        self.exact = self.exact and bit_equal(kv, decoded)
        self.stored_bytes += record.stored_bytes
        self.raw_bytes += kv.shape.nbytes(kv.tokens)
        return decoded.to(tuple(tensor.device for tensor in kv.keys))


def bit_equal(one: ChunkKV, other: ChunkKV) -> bool:
    """Whether all bits are equal, including those of NaNs."""
    pairs = zip(one.wide().tensors, other.wide().tensors, strict=True)
    return all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().flatten().view(torch.uint8)


_LEAST = -100.0
"""Lower bound for log-probabilities, so that one impossible token leaves the mean finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTrace:
    """A greedy answer: its tokens (with the end token), its text, and the distribution that each token came from.

    `log_probs[i]` is `(vocab,)` in fp32 and belongs to the token `ids[i]`. `first_token` is the seconds from the
    request, its KV in memory, to the first token's scores.
    """

    ids: tuple[int, ...]
    text: str
    log_probs: tuple[Tensor, ...]
    first_token: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run along a reference's tokens: for each, KL(reference ‖ run) in nats and whether the first choice agrees.

    `same`: its own answer equals the reference's exactly.
    """

    kl: tuple[float, ...]
    agreed: tuple[bool, ...]
    same: bool = True


class Comparer:
    """Answers requests greedily on one model, and compares answers."""

    def __init__(self, model: LanguageModel, *, max_new_tokens: int, decoding: Decoding = GREEDY) -> None:
        self._model = model
        self._limit = max_new_tokens
        self._decoding = decoding

    def answer(self, engine: Engine, request: Request) -> LogitTrace:
        """The engine's own answer."""
        stream, seconds = self._start(engine, request)
        trace = greedy(self._model, stream, max_new_tokens=self._limit, decoding=self._decoding)
        return replace(trace, first_token=seconds)

    def along(self, engine: Engine, request: Request, reference: LogitTrace) -> tuple[Comparison, LogitTrace]:
        """The engine's run along the reference's tokens (teacher forcing), so that every step has the same past, and
        its own answer.
        """
        model = self._model
        stream, seconds = self._start(engine, request)
        kl, agreed, log_probs = [], [], []
        for step, token_id in enumerate(reference.ids):
            if step:
                stream.advance(reference.ids[step - 1])
            log_probs.append(_log_probs(model, stream.scores))
            kl.append(next_token_kl(reference.log_probs[step], log_probs[-1]))
            agreed.append(stream.best() == token_id)
        trace = replace(reference, log_probs=tuple(log_probs)) if all(agreed) else self.answer(engine, request)
        same = trace.text == reference.text
        return Comparison(kl=tuple(kl), agreed=tuple(agreed), same=same), replace(trace, first_token=seconds)

    def _start(self, engine: Engine, request: Request) -> tuple[Stream, float]:
        started = time.perf_counter()
        stream = Stream(runtime_of(self._model), engine, request)
        return stream, time.perf_counter() - started


def greedy(model: LanguageModel, stream: Stream, *, max_new_tokens: int, decoding: Decoding = GREEDY) -> LogitTrace:
    """The stream's own first choices, up to an end token, a stop of `decoding`, or `max_new_tokens`.

    Other settings of `decoding` are ignored, because the comparison is about the engine's unchanged scores.
    """
    ends = model.eos_ids.union(decoding.stop_ids)
    ids: list[int] = []
    log_probs = []
    while True:
        log_probs.append(_log_probs(model, stream.scores))
        ids.append(stream.best())
        text = model.tokens.decode([i for i in ids if i not in ends])
        cuts = [at for stop in decoding.stop if (at := text.find(stop)) >= 0]
        if cuts or ids[-1] in ends or len(ids) == max_new_tokens:
            break
        stream.advance(ids[-1])
    if not cuts:  # as answers are decoded: without an unfinished character at the end
        detokenizer = Detokenizer(model.tokens)
        text = "".join(detokenizer.push(i) for i in ids if i not in ends) + detokenizer.flush()
    return LogitTrace(ids=tuple(ids), text=text[: min(cuts, default=None)].strip(), log_probs=tuple(log_probs))


def next_token_kl(reference: Tensor, other: Tensor) -> float:
    """KL(reference ‖ other) in nats of two `(vocab,)` log-distributions.

    It is computed in float64, so that rounding does not look like a difference.
    """
    p, q = reference.double(), other.double()
    terms = p.exp() * (p - q.clamp_min(_LEAST))
    return max(0.0, float(terms.where(p.isfinite(), 0.0).sum()))  # 0·log 0 = 0


@torch.inference_mode()
def _log_probs(model: LanguageModel, scores: Tensor) -> Tensor:
    log_probs = torch.log_softmax(scores.float(), -1)
    if math.isnan(float(log_probs.sum())):
        raise UnsupportedModelError(
            f"Model {model.checkpoint.name!r} computes NaN scores in {str(model.dtype)[6:]}; "
            "use another dtype, such as float32 or bfloat16."
        )
    return log_probs
