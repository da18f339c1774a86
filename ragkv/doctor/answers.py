"""Let several candidates answer questions, and compare their scores or their next-token distributions.

A candidate is a model with an engine, its settings, a codec, and a way of ranking chunks. KV is kept in memory and
nothing is written to an index. Each chunk is encoded once, and answers can be saved, so that a stopped run continues.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor

from ragkv.attention.kv import ChunkKV
from ragkv.config import MODES, NONE, EncodingConfig, Mode, PromptConfig, StepsConfig, build_config
from ragkv.decoding import GREEDY, Decoding
from ragkv.doctor.io import Progress, ResultCache, Spec, digest_of
from ragkv.doctor.metrics import Example, Task, score
from ragkv.engines import ContextChunk, Engine, Request, engine_class
from ragkv.errors import ConfigError, KVMismatchError, PromptTooLongError, UnsupportedModelError, UsageError
from ragkv.index.conversation import Conversation, Turn, WrittenQueries
from ragkv.ingest import encode_identities
from ragkv.ingest.encoding import chunk_identity, seen_before
from ragkv.model.apb.document import SequentialExecutor, document_for_question
from ragkv.model.checkpoint import HEADS, MINI, digest_files, pick_device, resolve
from ragkv.model.prompt import Prompt, render
from ragkv.runtime import Generation, Stream, runtime_of
from ragkv.runtime.decoding import Detokenizer
from ragkv.store import Codec, KVIdentity, MemoryTier, codec_from_config
from ragkv.store.record import round_trip
from ragkv.types import Chunk, Document, Encoding

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel
    from ragkv.pipeline import RagKV

GIVEN = "given"
"""Chunks in the order of the task and all equally relevant, without a retriever."""

RAW = "raw"
_PROMPT = "prompt."
CONTEXT = "context"
"""The option of a spec that overrides `[encoding] context` of an index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way of answering: everything that an answer depends on besides the question and its chunks.

    `retrieval` is a mode of `ragkv.index.search`, or `given`; the best `top_k` chunks are read (None: all). `dtype`
    None means float32 for the mini model on a CPU, and the checkpoint's own otherwise. `name` is a label for tables, if
    engine and options are not enough. The codec of an engine without stored KV is always raw.

    Where logits are compared, `turns` earlier questions with their answers are in the prompt, and `change` is applied
    to all KV before its codec.
    """

    engine: str
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = MINI
    dtype: str | None = None
    codec: str = RAW
    retrieval: str = GIVEN
    rerank: bool = False
    top_k: int | None = None
    prompt: PromptConfig = field(default_factory=PromptConfig)
    name: str = ""
    turns: int = 0
    change: KVChange | None = None
    context: int = 0
    """`[encoding] context`: how many tokens of its document a chunk of an index sees."""
    steps: int = 1
    """The most searches: for the question, then for queries that it writes as `writing` says."""
    writing: StepsConfig = field(default_factory=StepsConfig)

    def __post_init__(self) -> None:
        made = self.make()
        codec_from_config({"id": self.codec})
        if made.encoding is None:
            object.__setattr__(self, "codec", RAW)
        if self.retrieval not in (GIVEN, *MODES):
            raise UsageError(f"--retrieval must be of {GIVEN}, {', '.join(MODES)}, not {self.retrieval!r}.")
        if self.retrieval == GIVEN and (self.rerank or self.top_k is not None):
            raise UsageError(
                f"--rerank and --top-k choose among chunks that were scored; give --retrieval {'|'.join(MODES)}."
            )
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k must be at least 1, not {self.top_k}.")
        if self.steps > 1 and self.top_k is None:
            raise UsageError("--steps needs --retrieval and --top-k: if all chunks are read, nothing is searched.")

    @property
    def label(self) -> str:
        """The name in tables: `name`, or the engine with its options."""
        return self.name or str(Spec(self.engine, self.options))

    @property
    def scoring(self) -> str:
        """The way its chunks are ranked, in a word."""
        return f"{self.retrieval}+rerank" if self.rerank else self.retrieval

    def make(self) -> Engine:
        """A new engine. Raises UsageError if it is unknown, and ConfigError for options that it does not have."""
        kind = engine_class(self.engine)
        try:
            engine = kind(build_config(kind.Config, dict(self.options), f"engine {self.engine}"))
        except TypeError as error:
            raise ConfigError(f"engine {self.engine}: the options do not fit: {error}.") from error
        engine.context = self.context > 0
        return engine


def all_candidates(
    engines: Iterable[Spec],
    *,
    models: Sequence[str] = (MINI,),
    codecs: Sequence[str] = (RAW,),
    retrievals: Sequence[str] = (GIVEN,),
    rerank: bool | Sequence[bool] = False,
    steps: Sequence[int] = (1,),
    prompt: PromptConfig | None = None,
    tuning: Mapping[str, Mapping[str, Any]] | None = None,
    context: int = 0,
    **settings: Any,
) -> list[Candidate]:
    """Every combination of engines, models, codecs, retrievals, reranking and steps, once each; they share the other
    `settings`.

    An option of a spec overrides one of `tuning`. Without `prompt`, a checkpoint that was tuned without a BOS is asked
    without one. Options that begin with `prompt.` set fields of `PromptConfig`: `ape(prompt.prefix_newlines=20)`.
    `ape(context=256)` overrides `context`.
    """
    result: list[Candidate] = []
    both = [rerank] if isinstance(rerank, bool) else rerank
    for model, spec, codec, retrieval, reranked, most in product(models, engines, codecs, retrievals, both, steps):
        words = {key.removeprefix(_PROMPT): value for key, value in spec.options.items() if key.startswith(_PROMPT)}
        options = {key: value for key, value in spec.options.items() if not key.startswith(_PROMPT)}
        changed = words or CONTEXT in options
        seen = EncodingConfig(context=options.pop(CONTEXT, context)).context
        texts = asdict(prompt or resolve(model).tuned_words(PromptConfig())) | words
        candidate = Candidate(
            engine=spec.name,
            options={**(tuning or {}).get(spec.name, {}), **options},
            model=model,
            codec=codec,
            retrieval=retrieval,
            rerank=reranked,
            prompt=build_config(PromptConfig, texts, f"{spec}: {_PROMPT[:-1]}"),
            name=str(spec) if changed else "",
            context=seen,
            steps=most,
            **settings,
        )
        if candidate not in result:
            result.append(candidate)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleResult:
    """One answer and its score.

    If the prompt was too long for the model, `score` is None and `text` is empty; without gold answers `score` is None
    too. `chunks` is the number of chunks that were read, and `charge` what was recomputed of them. `trace` has the text
    of every token and the position of the chunk whose expert proposed it, for an engine with experts (PCED Figure 2).
    Where logits are compared, `first_token` is the seconds from the request, its KV in memory, to the first token's
    scores, and `kv_bytes` that KV's size. `evidence`: whether all chunks with the evidence were read, if the task knows
    them.
    """

    task: str
    example: Example
    candidate: Candidate
    text: str
    score: float | None
    chunks: int
    charge: float | None = None
    trace: tuple[tuple[str, int | None], ...] = ()
    comparison: Comparison | None = None
    first_token: float | None = None
    kv_bytes: int = 0
    evidence: bool | None = None


HOLD_BYTES = 1 << 30  # KV kept for the next questions, which often retrieve the same chunks

KVChange: TypeAlias = Callable[[ChunkKV, KVIdentity], ChunkKV]


@dataclass(slots=True, kw_only=True)
class RoundTrip:
    """Encodes and decodes KV with a codec, as a store would do, after `change` if there is one.

    It counts the bytes of payloads and tensors, and `exact` says whether every bit survived.
    """

    codec: Codec
    change: KVChange | None = None
    exact: bool = True
    stored_bytes: int = 0
    raw_bytes: int = 0

    def __call__(self, kv: ChunkKV, identity: KVIdentity) -> ChunkKV:
        record, back = round_trip(kv if self.change is None else self.change(kv, identity), identity, self.codec)
        self.exact = self.exact and bit_equal(kv, back)
        self.stored_bytes += record.stored_bytes
        self.raw_bytes += kv.shape.nbytes(kv.tokens)
        return back


def bit_equal(one: ChunkKV, other: ChunkKV) -> bool:
    """Whether all bits are equal, including those of NaNs."""
    pairs = zip(one.wide().tensors, other.wide().tensors, strict=True)
    return all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().flatten().view(torch.uint8)


class Reader:
    """Makes the request of a question for any engine and codec, without writing anything.

    `lookup` finds KV that exists already (the store's `get_kv`). Other KV is encoded. Both are kept in `memory`, which
    several readers may share.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompt: Prompt,
        *,
        fingerprint: str,
        lookup: Callable[[KVIdentity], ChunkKV | None] | None = None,
        memory: MemoryTier | None = None,
    ) -> None:
        self.model = model
        self.prompt = prompt
        self._prefix_ids = prompt.prefix_ids(model.tokens)
        self._fingerprint = fingerprint
        self._lookup = lookup
        self._memory = memory or MemoryTier(HOLD_BYTES)

    def request(
        self,
        engine: Engine,
        question: str,
        chunks: Sequence[ContextChunk],
        *,
        whole: bool = False,
        through: RoundTrip | None = None,
    ) -> Request:
        """The request that `engine` starts from. `chunks` are in ascending relevance; all KV goes `through`.

        If the chunks are `whole` texts, an engine that reads whole documents gets them in blocks encoded for the
        question, as from `ragkv query --context`.
        """
        chunks = chunks if engine.most_chunks is None else chunks[-engine.most_chunks :]
        request = Request(
            prefix_ids=self._prefix_ids,
            chunks=tuple(chunks),
            suffix_ids=self.prompt.suffix_ids(self.model.tokens, question),
            question=question,
            prompt=self.prompt,
        )
        if engine.reads is None:
            return request
        encoding = engine.reads

        def coded(kv: ChunkKV, identity: KVIdentity) -> ChunkKV:
            return kv if through is None else through(kv, identity).to(self.model.place)

        def alone(texts: Sequence[ContextChunk]) -> list[ContextChunk]:
            identities = [self._identity(encoding, text.token_ids, text.seen) for text in texts]
            found = self._kv(identities)
            made = {identity: coded(kv, identity) for identity, kv in found.items()}  # equal ones share
            return [replace(text, kv=made[identity]) for text, identity in zip(texts, identities, strict=True)]

        def blocks(text: ContextChunk) -> list[ContextChunk]:
            """The blocks of a text, or the text if it is no longer than one. They are of this question only."""
            asked = self.prompt.chunk_ids(self.model.tokens, question)
            document = document_for_question(self.model, engine.config, text.token_ids, asked, prefix)
            if document is None:
                return alone([text])
            encoded_blocks = []
            for number, block in enumerate(SequentialExecutor().run(document)):
                span = document.layout.span(number)
                ids = text.token_ids[span.start : span.stop]
                encoded_blocks.append(
                    ContextChunk(token_ids=ids, score=text.score, kv=coded(block.kv, self._identity(encoding, ids)))
                )
            return encoded_blocks

        prefix = self._prefix()
        if prefix is not None:
            prefix = coded(prefix, self._identity(Encoding.STANDALONE, self._prefix_ids))
        long = whole and engine.whole_documents
        filled = [block for text in chunks for block in blocks(text)] if long else alone(chunks)
        return replace(request, prefix=prefix, chunks=tuple(filled))

    def _prefix(self) -> ChunkKV | None:
        """The KV of the prefix, or None for an empty prefix."""
        if not self._prefix_ids:
            return None
        identity = self._identity(Encoding.STANDALONE, self._prefix_ids)
        return self._kv([identity])[identity]

    def _kv(self, identities: Sequence[KVIdentity]) -> dict[KVIdentity, ChunkKV]:
        """The KV of each chunk on the model's device, whether it is in memory, found or encoded now."""
        by_key = {identity.key(): identity for identity in identities}

        def load(keys: Sequence[bytes]) -> dict[bytes, ChunkKV]:
            known = {} if self._lookup is None else {key: self._lookup(by_key[key]) for key in keys}
            found = {key: kv.to(self.model.place) for key, kv in known.items() if kv is not None}
            lost = [by_key[key] for key in keys if key not in found]
            made = encode_identities(self.model, lost, self._prefix)
            return found | {identity.key(): kv for identity, kv in made.items()}

        found, _ = self._memory.get_many(by_key, load)
        return {identity: found[key] for key, identity in by_key.items()}

    def _identity(self, encoding: Encoding, ids: tuple[int, ...], seen: tuple[int, ...] = ()) -> KVIdentity:
        return chunk_identity(self._fingerprint, encoding, self._prefix_ids, ids, seen)


class LoadedModel:
    """One model. Reusing a kept answer needs only the `fingerprint`, for which no local checkpoint is loaded.

    With `rag` it reads that index. `own`: the index is configured with it. `current`: it also cut the index's chunks. A
    model that did not cut the chunks reads their texts in its own tokens, so it can be tried before an ingest. With
    `stored`, KV of the index is used where it has some.
    """

    def __init__(
        self,
        name: str,
        dtype: str | None = None,
        *,
        device: str | None = None,
        rag: RagKV | None = None,
        stored: bool = False,
    ) -> None:
        self.name = name
        self._rag = rag
        self._device = device
        self._dtype = dtype if rag is None or dtype is not None else rag.config.dtype
        self._lookup = rag.store.get_kv if rag is not None and stored else None
        self._memory = MemoryTier(HOLD_BYTES)
        self._readers: dict[PromptConfig, Reader] = {}
        self._ids: dict[tuple[Prompt, str], tuple[int, ...]] = {}

    @property
    def own(self) -> bool:
        config = None if self._rag is None else self._rag.config
        return config is not None and (self.name, self._dtype) == (config.model, config.dtype)

    @cached_property
    def current(self) -> bool:
        if self._rag is None or not self.own:
            return False
        try:
            self._rag.index.require_same_model()
        except KVMismatchError:
            return False
        return True

    @cached_property
    def model(self) -> LanguageModel:
        """Raises ModelLoadError or UnsupportedModelError."""
        from ragkv.model.self_check import load_model

        if self._rag is not None and self.own:
            return self._rag.model
        return load_model(self.name, dtype=self.dtype, device=self._device)

    @cached_property
    def dtype(self) -> str:
        """The dtype that the model computes in. On a CPU mini uses float32, which is several times faster on CPUs
        without bfloat16 units."""
        if self._dtype is not None:
            return self._dtype
        return "float32" if self.name == MINI and pick_device(self._device).type == "cpu" else "auto"

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of this model and dtype, like `Index.fingerprint`."""
        if self._rag is not None and self.own:
            return self._rag.index.fingerprint
        checkpoint = resolve(self.name)
        revision = None if checkpoint.local else self.model.revision
        return checkpoint.fingerprint(self.dtype, revision, device=self._device)

    def reader(self, words: PromptConfig) -> Reader:
        """The reader for a prompt. Readers share what they keep in memory."""
        if words not in self._readers:
            self._readers[words] = Reader(
                self.model,
                self._prompt(words),
                fingerprint=self.fingerprint,
                lookup=self._lookup,
                memory=self._memory,
            )
        return self._readers[words]

    def _prompt(self, words: PromptConfig) -> Prompt:
        """The prompt as the index keeps it, if it is the index's own but for its newlines."""
        newlines = words.prefix_newlines
        if self._rag is not None and self.own and words == replace(self._rag.config.prompt, prefix_newlines=newlines):
            return replace(self._rag.index.prompt, prefix_newlines=newlines)
        return render(words, self.model.tokens)

    @cached_property
    def heads(self) -> str:
        """A digest of the retaining heads beside the model, which are no part of its fingerprint; "" without any."""
        checkpoint = resolve(self.name)
        path = Path(checkpoint.location) / HEADS
        return digest_files(path.parent, [path]) if checkpoint.local and path.exists() else ""

    def chunk_ids(self, prompt: Prompt, text: str) -> tuple[int, ...]:
        """The token ids of a chunk in `prompt`; each text is tokenised once."""
        if (prompt, text) not in self._ids:
            self._ids[prompt, text] = prompt.chunk_ids(self.model.tokens, text)
        return self._ids[prompt, text]


Placed: TypeAlias = list[tuple[int, ContextChunk]]
"""Pairs of (position, chunk) in ascending relevance. The position is an index of `Example.chunks`, or a rank."""


class ChunkSource(ABC):
    """Provides models, of which it keeps the last, and the chunks that each candidate reads.

    `whole` says that chunks are whole texts, which engines for long documents read in blocks.
    """

    whole = False

    def __init__(self, *, device: str | None = None, rag: RagKV | None = None, stored: bool = False) -> None:
        self._load = partial(LoadedModel, device=device, rag=rag, stored=stored)
        self._last: tuple[str, str | None, LoadedModel] | None = None

    def model(self, name: str, dtype: str | None = None) -> LoadedModel:
        """The model; it is loaded when it is first needed."""
        if self._last is None or self._last[:2] != (name, dtype):
            self._last = (name, dtype, self._load(name, dtype))
        return self._last[2]

    @abstractmethod
    def check(self, candidate: Candidate) -> None:
        """Raise UsageError, before any work is done, if the candidate cannot get chunks."""

    @abstractmethod
    def facts(self, loaded: LoadedModel, example: Example, candidate: Candidate) -> Any:
        """Plain data that identifies the chunks and their scores."""

    @abstractmethod
    def chunks(self, loaded: LoadedModel, example: Example, candidate: Candidate) -> Placed:
        """The chunks in the tokens of the loaded model."""


class IndexSource(ChunkSource):
    """The user's index is searched as by `ragkv query`; nothing is written."""

    def __init__(self, rag: RagKV, *, device: str | None = None, stored: bool = False) -> None:
        super().__init__(device=device, rag=rag, stored=stored)
        self._rag = rag
        self._known: dict[tuple[str, str, str, bool, int | None, int], list[ContextChunk]] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """How the index is configured to answer, as fields of a `Candidate`."""
        config = self._rag.config
        return {
            "model": config.model,
            "retrieval": config.retrieval,
            "rerank": config.rerank and config.reranker != NONE,
            "top_k": config.top_k,
            "prompt": config.prompt,
            "context": config.encoding.context,
            "writing": config.steps,
        }

    def candidate(self, engine: str, **settings: Any) -> Candidate:
        """A candidate that answers as the index is configured, but for `settings`."""
        options = self._rag.config.tuning.get(engine, {})
        return Candidate(engine=engine, **({"options": options} | self.settings | settings))

    def check(self, candidate: Candidate) -> None:
        if candidate.retrieval == GIVEN:
            raise UsageError(f"An index has no chunks in a given order; --retrieval is one of {', '.join(MODES)}.")

    def facts(self, loaded: LoadedModel, example: Example, candidate: Candidate) -> Any:
        found = [chunk for _, chunk in self.chunks(loaded, example, candidate)]
        return [(chunk.token_ids, chunk.score, *([chunk.seen] if chunk.seen else [])) for chunk in found]

    def chunks(self, loaded: LoadedModel, example: Example, candidate: Candidate) -> Placed:
        window = candidate.context if candidate.make().reads is Encoding.CONTEXT else 0
        key = (loaded.name, example.question, candidate.retrieval, candidate.rerank, candidate.top_k, window)
        if key not in self._known:
            prompt = loaded.reader(self._rag.config.prompt).prompt
            hits = self._rag.retrieve(
                example.question,
                top_k=candidate.top_k,
                retrieval=cast("Mode", candidate.retrieval),
                rerank=candidate.rerank,
            )

            def cut(chunk: Chunk) -> Chunk:
                return chunk if loaded.current else replace(chunk, token_ids=loaded.chunk_ids(prompt, chunk.text))

            def look(document: Document, chunk: Chunk, before: Iterator[Chunk]) -> tuple[str, tuple[int, ...]]:
                tokens = loaded.model.tokens
                return chunk.chunk_id, seen_before(chunk, map(cut, before), document.title, window, prompt, tokens)

            names = [hit.chunk.chunk_id for hit in hits] if window else []
            seen = dict(self._rag.store.with_preceding(names, look))
            self._known[key] = [
                ContextChunk(token_ids=cut(hit.chunk).token_ids, score=hit.score, seen=seen.get(hit.chunk.chunk_id, ()))
                for hit in reversed(hits)
            ]
        chunks = self._known[key]
        return [(len(chunks) - 1 - at, chunk) for at, chunk in enumerate(chunks)]


_LEAST = -100.0
"""Lower bound for log-probabilities, so that one impossible token leaves the mean finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTrace:
    """A greedy answer: its tokens (with the end token), its text, and the distribution that each token came from.

    `log_probs[i]` is `(vocab,)` in fp32 and belongs to the token `ids[i]`.
    """

    ids: tuple[int, ...]
    text: str
    log_probs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run along a reference's tokens: for each, KL(reference ‖ run) in nats and whether the first choice agrees.

    `same`: its own answer equals the reference's exactly. `through` is the round trip of its KV.
    """

    kl: tuple[float, ...]
    agreed: tuple[bool, ...]
    same: bool = True
    through: RoundTrip | None = None


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


def follow(model: LanguageModel, stream: Stream, reference: LogitTrace) -> tuple[Comparison, LogitTrace]:
    """Run the stream along the reference's tokens (teacher forcing), so that every step has the same past.

    The trace has the reference's tokens with the stream's distributions.
    """
    kl, agreed, log_probs = [], [], []
    for step, token_id in enumerate(reference.ids):
        if step:
            stream.advance(reference.ids[step - 1])
        log_probs.append(_log_probs(model, stream.scores))
        kl.append(next_token_kl(reference.log_probs[step], log_probs[-1]))
        agreed.append(stream.best() == token_id)
    return Comparison(kl=tuple(kl), agreed=tuple(agreed)), replace(reference, log_probs=tuple(log_probs))


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


SCHEME = 1
"""Increase it when an engine, a codec or the prompt answers differently with the same settings; kept answers expire."""


def run_candidates(
    tasks: Sequence[Task],
    candidates: Sequence[Candidate],
    *,
    source: ChunkSource,
    compare_logits: bool = False,
    stop_when_right: bool = False,
    max_new_tokens: int | None = None,
    decoding: Decoding = GREEDY,
    work: Path | None = None,
    on_progress: Progress | None = None,
) -> list[ExampleResult]:
    """Greedy answers of all candidates to all tasks.

    `max_new_tokens` None means the task's own, and `decoding` adds stops. Answers are kept in the folder `work`, under
    a digest of everything that they depend on, and are not computed again; None keeps nothing. Raises UsageError for
    two tasks of the same name, or if a candidate lacks something.

    With `compare_logits`, the candidates after the first one are run along the answer of another, step by step
    (`ExampleResult.comparison`): a changed KV or a conversation along that of the same candidate without it, the others
    along the first. Questions without chunks are left out, and so is a conversation without enough earlier turns.

    The candidates that share a model answer a question in one batch; those whose logits are compared are asked in turn,
    and all their models are in memory. With `stop_when_right`, an answer ends as soon as
    it has the full score.

    In both cases, a prompt that is too long is an error.
    """
    if len({task.name for task in tasks}) != len(tasks):
        raise UsageError(f"Two tasks have one name: {', '.join(sorted(task.name for task in tasks))}; give each once.")
    for candidate in candidates:
        source.check(candidate)
    total = len(candidates) * sum(len(task.examples) for task in tasks)
    done = 0
    results: list[ExampleResult] = []

    def notify(ahead: int, task: Task, candidate: Candidate) -> None:
        if on_progress is not None:
            on_progress(done + ahead, total, ", ".join(filter(None, (task.name, candidate.label))))

    models = list(dict.fromkeys((entry.model, entry.dtype) for entry in candidates))
    for named in [models] if compare_logits else [[entry] for entry in models]:  # each model is loaded once
        loaded = {run: source.model(*run) for run in named}
        runs = [
            _CandidateRun(entry, loaded[entry.model, entry.dtype], source, decoding, work)
            for entry in candidates
            if (entry.model, entry.dtype) in loaded
        ]
        comparing = _LogitComparison(runs) if compare_logits else None
        for task in tasks:
            limit = max_new_tokens or task.max_new_tokens
            for example in task.examples:
                if comparing is not None:
                    results += comparing.results(task, example, limit, notify)
                else:
                    notify(0, task, runs[0].candidate)
                    asked = [run.ask(task, example, limit, stop_when_right=stop_when_right) for run in runs]
                    begun = [next(run) for run in asked]
                    for at, (run, first, rest) in enumerate(zip(runs, begun, asked, strict=True)):
                        if at:
                            notify(at, task, run.candidate)
                        results += filter(None, (first, *rest))
                done += len(runs)
    if on_progress is not None:
        on_progress(done, total, "")
    return results


class _CandidateRun:
    """A candidate with its engine, its model, and its saved answers."""

    def __init__(
        self, candidate: Candidate, loaded: LoadedModel, source: ChunkSource, decoding: Decoding, work: Path | None
    ) -> None:
        self.candidate = candidate
        self._engine: Engine = candidate.make()
        self._codec = codec_from_config({"id": candidate.codec})
        self._loaded = loaded
        self._source = source
        self._decoding = decoding
        self._work = work
        self._ledgers: dict[str, ResultCache] = {}

    def ask(
        self, task: Task, example: Example, max_new_tokens: int, *, stop_when_right: bool
    ) -> Iterator[ExampleResult | None]:
        """Yields None once the question is submitted, then the result; only the result if that is known at once.

        Several submitted questions share passes.
        """
        ledger = self._ledger(task)
        key = "" if ledger is None else self._key(example, max_new_tokens)
        facts = None if ledger is None else ledger.get(key)
        if facts is None:
            facts = yield from self._answer(task, example, max_new_tokens, stop_when_right=stop_when_right)
            if ledger is not None:
                ledger.put(key, task=task.name, example=example.example_id, **facts)
        text = facts["answer"]
        yield ExampleResult(
            task=task.name,
            example=example,
            candidate=self.candidate,
            text=text or "",
            score=None if text is None else score(task.metric, text, example),
            chunks=facts["chunks"],
            charge=facts.get("charge"),
            evidence=facts.get("evidence"),
            trace=tuple((text, winner) for text, winner in facts.get("trace", ())),
        )

    def _answer(
        self, task: Task, example: Example, max_new_tokens: int, *, stop_when_right: bool
    ) -> Generator[None, None, dict[str, Any]]:
        """Submit the question, yield, and return the answer as plain data; `answer` None: the prompt was too long."""
        placed = self._searched(example)
        read = self._positions(placed)
        facts: dict[str, Any] = {"chunks": len(read)}
        if example.needed:
            facts["evidence"] = set(example.needed) <= set(read)
        text, trace = "", []
        generation = Generation(max_new_tokens=max_new_tokens, decoding=self._decoding)
        try:
            request, _ = self._request(example, placed=placed)
            with closing(runtime_of(self._loaded.model).decode(self._engine, request, generation)) as tokens:
                yield
                for token in tokens:
                    text += token.text
                    trace.append((token.text, None if token.winner is None else read[token.winner]))
                    if stop_when_right and token.text and score(task.metric, text, example) == 1.0:
                        break
        except PromptTooLongError:
            if stop_when_right:
                raise
            return {"answer": None, **facts}
        facts = {"answer": text.strip(), **facts}
        if (charge := self._engine.charge(request, self._loaded.model)) is not None:
            facts["charge"] = charge
        return {**facts, "trace": trace} if self._engine.counts_winners else facts

    def _searched(self, example: Example) -> Placed:
        """The chunks found in the candidate's steps, as by `AnswerStream`."""
        candidate, question = self.candidate, example.question
        written = WrittenQueries(candidate.writing, question, question, candidate.steps)
        query: str | None = question
        while query is not None:
            found = self._source.chunks(self._loaded, replace(example, question=query), candidate)
            more = written.found(found[::-1], _tokens_of)
            placed = written.best(candidate.top_k or len(found), _tokens_of)[::-1]
            if not more:
                break
            request, _ = self._request(replace(example, question=written.prompt), placed=placed)
            generation = Generation(max_new_tokens=candidate.writing.max_new_tokens)
            try:
                with closing(runtime_of(self._loaded.model).decode(self._engine, request, generation)) as tokens:
                    query = written.next("".join(token.text for token in tokens))
            except PromptTooLongError:  # the answer's own prompt will raise it
                break
        return placed

    def chunks(self, example: Example) -> int:
        """How many chunks the engine reads for a question."""
        return len(self._positions(self._source.chunks(self._loaded, example, self.candidate)))

    def _positions(self, placed: Placed) -> list[int]:
        """The positions of the chunks that the engine reads of these."""
        return [position for position, _ in placed][-(self._engine.most_chunks or len(placed)) :]

    def compare(
        self,
        example: Example,
        reference: LogitTrace | None,
        turns: Sequence[Turn],
        max_new_tokens: int,
        *,
        only_kv: bool,
    ) -> tuple[LogitTrace, dict[str, Any]]:
        """Its own answer after the earlier `turns`, and the fields of a comparison for an `ExampleResult`.

        `only_kv`: it differs from the reference only in its KV, so with the same KV it gives the same answer.
        """
        model = self._loaded.model
        request, through = self._request(example, turns, coded=only_kv)

        def answer(stream: Stream) -> LogitTrace:
            return greedy(model, stream, max_new_tokens=max_new_tokens, decoding=self._decoding)

        if reference is not None and only_kv and through is not None and through.exact:
            steps = len(reference.ids)
            return reference, {"comparison": Comparison(kl=(0.0,) * steps, agreed=(True,) * steps, through=through)}
        started = time.perf_counter()
        stream = Stream(runtime_of(model), self._engine, request)
        facts: dict[str, Any] = {"first_token": time.perf_counter() - started}
        # equal chunks share their KV
        facts["charge"] = self._engine.charge(request, model)
        facts["kv_bytes"] = sum({id(kv): kv.nbytes for each in request.chunks if (kv := each.kv) is not None}.values())
        if reference is None:
            return answer(stream), facts
        compared, trace = follow(model, stream, reference)
        if not all(compared.agreed):
            trace = answer(Stream(runtime_of(model), self._engine, request))
        return trace, facts | {"comparison": replace(compared, same=trace.text == reference.text, through=through)}

    def _request(
        self, example: Example, turns: Sequence[Turn] = (), *, coded: bool = False, placed: Placed | None = None
    ) -> tuple[Request, RoundTrip | None]:
        """The request, and the round trip of its KV; raw KV is unchanged unless it has to be `coded`."""
        candidate, tokens = self.candidate, self._loaded.model.tokens
        conversation = Conversation(candidate.prompt, lambda text: len(tokens.encode(text)))
        conversation.turns += turns
        coded = coded or candidate.codec != RAW or candidate.change is not None
        through = RoundTrip(codec=self._codec, change=candidate.change) if coded else None
        request = self._loaded.reader(candidate.prompt).request(
            self._engine,
            conversation.prompt_text(example.question),
            [chunk for _, chunk in placed or self._source.chunks(self._loaded, example, candidate)],
            whole=self._source.whole,
            through=through,
        )
        return request, through

    def _key(self, example: Example, max_new_tokens: int) -> str:
        candidate = self.candidate
        trained = {"heads": self._loaded.heads} if self._engine.whole_documents else {}
        several = {"steps": [candidate.steps, asdict(candidate.writing)]} if candidate.steps > 1 else {}
        return digest_of(
            {
                **trained,
                **several,
                "scheme": SCHEME,
                "model": self._loaded.fingerprint,
                "engine": candidate.engine,
                "config": asdict(self._engine.config),
                "codec": candidate.codec,
                "prompt": candidate.prompt.facts(),
                "question": example.question,
                "chunks": self._source.facts(self._loaded, example, candidate),
                "max_new_tokens": max_new_tokens,
            }
        )

    def _ledger(self, task: Task) -> ResultCache | None:
        """A file per task and candidate with a readable name. Names may collide, since keys are unique."""
        if self._work is None:
            return None
        if task.name not in self._ledgers:
            words = (task.name, self.candidate.label, self.candidate.codec, self.candidate.scoring)
            name = "-".join("".join(c if c.isalnum() else "_" for c in word) for word in words)
            self._ledgers[task.name] = ResultCache(self._work / "answers" / f"{name[:120]}.jsonl")
        return self._ledgers[task.name]


def _tokens_of(placed: tuple[int, ContextChunk]) -> tuple[int, ...]:
    return placed[1].token_ids


class _LogitComparison:
    """Candidates that are run along each other's answers, one question at a time."""

    def __init__(self, runs: Sequence[_CandidateRun]) -> None:
        self._runs = runs
        self._references = [_reference(at, [each.candidate for each in runs]) for at in range(len(runs))]
        self._followed = {followed for followed, _ in self._references}
        self._turns: list[list[Turn]] = [[] for _ in runs]

    def results(
        self, task: Task, example: Example, max_new_tokens: int, notify: Callable[[int, Task, Candidate], None]
    ) -> Iterator[ExampleResult]:
        traces: dict[int, LogitTrace] = {}
        for number, (run, (followed, only_kv)) in enumerate(zip(self._runs, self._references, strict=True)):
            earlier, wanted = self._turns[followed][:-1], run.candidate.turns  # the last one is this question
            if number and (followed not in traces or len(earlier) < wanted):
                continue
            notify(number, task, run.candidate)
            if not (read := run.chunks(example)):
                continue
            turns = earlier[len(earlier) - wanted :]
            trace, measured = run.compare(example, traces.get(followed), turns, max_new_tokens, only_kv=only_kv)
            if number in self._followed:
                traces[number] = trace
                self._turns[number].append(Turn(question=example.question, answer=trace.text))
            yield ExampleResult(
                task=task.name,
                example=example,
                candidate=run.candidate,
                text=trace.text,
                score=score(task.metric, trace.text, example) if example.answers else None,
                chunks=read,
                **measured,
            )


def _reference(position: int, among: Sequence[Candidate]) -> tuple[int, bool]:
    """The position of the candidate with which the one at `position` is compared, and whether they differ in KV only.

    The first candidate is its own.
    """
    one = among[position]
    plain = replace(one, turns=0, name="") if one.turns else replace(one, codec=RAW, change=None, name="")
    same = [number for number in range(position) if replace(among[number], name="") == plain]
    return (same[0], not one.turns) if same else (0, False)
