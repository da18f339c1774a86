"""llama.cpp as the executor: a GGUF file's own weights, chunk KV as opaque states, and one batch for all sequences.

Chunk KV is the state that llama.cpp wrote (`OpaqueKV`), which the store keeps, checks, evicts and shares as any other.
Its shape describes it as runs of equally many bytes per token, and the rest as a state of the last layer. A question
needs no torch, unless its engine or its sampling computes with logits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ragkv.attention.kv import ChunkKV, OpaqueKV, PlacedChunk, Processor, StateGoneError
from ragkv.attention.sequence import TokenSequence
from ragkv.config import LLAMA_CPP
from ragkv.errors import ConfigError, PromptTooLongError, UnsupportedModelError
from ragkv.model.gguf_merge import REGIME, merged_file
from ragkv.model.gguf_tokenizer import GgufTokenizer
from ragkv.model.llama_cpp import LlamaContext, LlamaFile, LlamaSettings, Slot, StateForm, checked, device_of
from ragkv.model.prompt import Tokens
from ragkv.runtime.executor import ExecutorTraits
from ragkv.types import Capability, KVShape, LayerShape, StateShape
from ragkv.util import batches
from ragkv.util.lazy import torch_if_loaded
from ragkv.util.processors import thread_count

if TYPE_CHECKING:
    from torch import Tensor

    from ragkv.model.checkpoint import Checkpoint

T = TypeVar("T")

_ENCODE_TOKENS = 512
_RUN = 1 << 15
"""Bytes per token of a run."""
_REST = "llama.cpp"
_TYPES: Mapping[str, str] = {"half": "f16", "raw": "f16", "zstd": "f16", "q8": "q8_0"}
"""`codec` of an index -> llama.cpp's type of KV."""


def settings_for(checkpoint: Checkpoint, *, dtype: str, device: str | None, codec: str) -> LlamaSettings:
    """How an index's settings load a GGUF file. ConfigError for those that llama.cpp has not."""
    if checkpoint.file is None:
        raise ConfigError(
            f"The runtime llama-cpp runs GGUF files, and model {checkpoint.name!r} is none; give a .gguf file, or use "
            "--runtime transformers."
        )
    if dtype != "auto":
        raise ConfigError(
            f"The runtime llama-cpp computes with the weights of the file as they are, not in {dtype}; leave --dtype "
            "out, or use --runtime transformers."
        )
    if codec not in _TYPES:
        raise ConfigError(
            f"The runtime llama-cpp stores KV of 16 or 8 bits (--codec half, zstd or q8), not as {codec}; choose one "
            "of these, or use --runtime transformers."
        )
    return LlamaSettings(kv_type=_TYPES[codec], device=device_of(device))


def fingerprint(checkpoint: Checkpoint, *, dtype: str, device: str | None, codec: str) -> str:
    """The identity of a model in KV keys: its file, llama.cpp's build, and what changes the states."""
    regime = settings_for(checkpoint, dtype=dtype, device=device, codec=codec).regime
    return checkpoint.fingerprint_of(regime if checkpoint.adapter is None else f"{regime}:{REGIME}")


def load(checkpoint: Checkpoint, *, dtype: str, device: str | None, codec: str) -> LlamaCppModel:
    """The model in a GGUF file, once a process of its own has tried it. Raises as `load_model`."""
    settings = settings_for(checkpoint, dtype=dtype, device=device, codec=codec)
    path = Path(checkpoint.location, str(checkpoint.file))
    if checkpoint.adapter is not None:
        path = merged_file(checkpoint)
    verdict = checked(path, settings, checkpoint.name)
    missing = {Capability(need): why for need, why in verdict.missing.items()}
    missing[Capability.TENSORS] = "llama.cpp keeps a chunk's KV as a state that only it reads"
    return LlamaCppModel(checkpoint, LlamaFile(path, settings), verdict.form, missing)


class LlamaCppModel:
    """A model that llama.cpp runs: what engines, index and runtime read of it, as of a `LanguageModel`."""

    joins = True
    int8 = False
    moves_within = None
    revision = None
    shared: Mapping[int, int] = {}
    device = place = Processor("cpu")

    def __init__(
        self, checkpoint: Checkpoint, file: LlamaFile, form: StateForm, missing: Mapping[Capability, str]
    ) -> None:
        self.checkpoint, self.file, self.form, self.missing_capabilities = checkpoint, file, form, missing
        tokenizer = GgufTokenizer(file)
        self.tokens = Tokens(tokenizer)
        self.eos_ids = tokenizer.end_ids
        self.max_positions: int | None = file.max_positions
        self.parameters, self.weight_bytes = file.parameters, file.weight_bytes
        self.windows = [file.window] if file.window else []
        self.config = SimpleNamespace(vocab_size=file.vocab_size, hidden_size=file.hidden, model_type=file.family)
        self.dtype = file.settings.kv_type
        self.precision = file.quantisation
        widths = [_RUN] * (form.per_token // _RUN) + [form.per_token % _RUN] * bool(form.per_token % _RUN)
        self.kv_shape = KVShape(
            "uint8",
            tuple(LayerShape(1, width, 0) for width in widths),
            (StateShape(len(widths) - 1, _REST, "uint8", (form.fixed,)),),
        )
        self.context = LlamaContext(file, threads=thread_count(), bytes_of=lambda kv: kv.data)
        self._companions: dict[Any, Any] = {}
        self._lock = threading.Lock()

    def executor(self) -> LlamaCppExecutor:
        """What the runtime runs it by."""
        return LlamaCppExecutor(self)

    def companion(self, kind: Callable[[Any], T], make: Callable[[Any], T] | None = None) -> T:
        """As of a `LanguageModel`."""
        with self._lock:
            if kind not in self._companions:
                self._companions[kind] = (make or kind)(self)
            result: T = self._companions[kind]
            return result

    def require_positions(self, last: int) -> None:
        """PromptTooLongError for a prompt that is longer than the model's positions."""
        if self.max_positions is not None and last > self.max_positions:
            raise PromptTooLongError(
                f"The prompt needs {last} positions but model {self.checkpoint.name!r} has {self.max_positions}; lower "
                "--top-k or ask a shorter question."
            )

    def encode(self, chunks: Sequence[Sequence[int]], *, prefix: ChunkKV | None = None) -> list[ChunkKV]:
        """Chunk KV of token ids, each alone or after `prefix`."""
        return list(self.encode_each(chunks, prefix=prefix))

    def encode_each(self, chunks: Sequence[Sequence[int]], *, prefix: ChunkKV | None = None) -> Iterator[ChunkKV]:
        """As `encode`, one at a time and in the order given."""
        start = 0 if prefix is None else prefix.tokens
        seen = () if prefix is None else (PlacedChunk(kv=prefix, start=0),)
        executor = self.executor()
        for batch in batches(chunks, len, _ENCODE_TOKENS):
            self.require_positions(start + max(map(len, batch)))
            sequences = [TokenSequence.for_kv(seen, position=start) for _ in batch]
            try:
                executor.forward(sequences, batch)
                for sequence in sequences:
                    yield executor.chunk_kv(sequence, encoded_at=start)
            finally:
                executor.release(sequences)

    def kv_of(self, state: NDArray[np.uint8], tokens: int, encoded_at: int) -> ChunkKV:
        """A state as chunk KV."""
        if (left := self.form.nbytes(tokens) - state.nbytes) < 0:
            raise UnsupportedModelError(f"llama.cpp's state of {tokens} tokens has {-left} bytes more than expected.")
        data = np.pad(state, (0, left)) if left else state
        return cast("ChunkKV", OpaqueKV(source=data, shape=self.kv_shape, tokens=tokens, encoded_at=encoded_at))


class LlamaCppExecutor:
    """`Executor` over a `LlamaCppModel`, which it does not keep alive."""

    def __init__(self, model: LlamaCppModel) -> None:
        self._model = weakref.ref(model)
        self._context = model.context
        self.traits = ExecutorTraits(
            name=LLAMA_CPP,
            device="cpu",
            serves=frozenset({Capability.MERGE, Capability.MOVE}),
            weighs=False,
            max_sequences=model.context.sequences * 3 // 4,
        )

    @property
    def model(self) -> LlamaCppModel:
        model = self._model()
        if model is None:
            raise ReferenceError("the runtime's model has been freed: keep a reference to it while it is in use")
        return model

    def generation(self) -> int:
        return 0

    def reserve(
        self, sequences: Sequence[TokenSequence], ids: Sequence[Sequence[int]], *, answer: int, running: int
    ) -> None:
        last = max(max(sequence.places(len(some))) for sequence, some in zip(sequences, ids, strict=True))
        self.model.require_positions(last + 1)
        for sequence in sequences:
            self._slot(sequence, answer if sequence.cache.reserve else 0)

    def lay_out(
        self, sequences: Sequence[TokenSequence], ids: Sequence[Sequence[int]], active: Sequence[TokenSequence]
    ) -> None:
        """llama.cpp reads joined chunks in place."""

    def forward(self, sequences: Sequence[TokenSequence], ids: Sequence[Sequence[int]]) -> Tensor:
        work = [
            (self._slot(sequence), some, sequence.kept(len(some)), sequence.segments)
            for sequence, some in zip(sequences, ids, strict=True)
        ]
        rows = self._read(work)
        for sequence, some in zip(sequences, ids, strict=True):
            sequence.position += len(some)
        logits = np.stack(rows) if rows else np.empty((0, 0), np.float32)
        torch = torch_if_loaded()
        return cast("Tensor", logits if torch is None else torch.from_numpy(logits))

    def _read(self, work: Any) -> list[NDArray[np.float32]]:
        """Read by the context; a chunk whose record has been deleted meanwhile is encoded again."""
        while True:
            try:
                return self._context.read(work)
            except StateGoneError as error:
                kv, identity = error.kv, error.kv.identity
                prefix = self.model.encode([identity.prefix_ids])[0] if kv.encoded_at else None
                [again] = self.model.encode([identity.chunk_ids], prefix=prefix)
                kv.source = cast("OpaqueKV", again).data

    def copied(self, chunks: Sequence[PlacedChunk], *, reserve: int) -> Any:
        raise AssertionError("the runtime has read `serves`")

    def chunk_kv(self, sequence: TokenSequence, *, encoded_at: int) -> ChunkKV:
        slot = self._slot(sequence)
        return self.model.kv_of(self._context.state(slot), slot.length, encoded_at)

    def release(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            self._context.release(self._slot(sequence))

    def _slot(self, sequence: TokenSequence, reserve: int = 0) -> Slot:
        """A sequence's place in the context, which is its own KV here; made at its first use."""
        held: Any = sequence.cache
        slot = held if isinstance(held, Slot) else Slot(self._context, start=sequence.position, reserve=reserve)
        sequence.cache = cast("Any", slot)
        return slot

    def request_ended(self) -> None:
        """The cells of dropped sequences are taken back before the next pass."""
