"""llama.cpp by its public C API (llama-cpp-python): the model in a GGUF file, and the KV cells of its context.

A chunk's KV is a state of llama.cpp (`llama_state_seq_get_data`): opaque bytes, whose form belongs to this build of
llama.cpp (`build`). Sequences of one context share cells: a state is loaded into a sequence of its own, moved there
(`seq_add`) and joined to those that read it (`seq_cp`).

llama.cpp ends the process when it meets some broken files, and what a model can do is only known once it runs. So a
process of its own (`python -m ragkv.model.llama_cpp FILE`) loads a file first, tries it (`_tried`) and says what it is
good for; its verdict is kept in the user's cache until the file or the library changes. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import MissingExtraError, ModelLoadError, RagkvError, UnsupportedModelError, install_hint
from ragkv.util.files import make_folder, parse_json, read_plain, user_folder, write_plain
from ragkv.util.processors import thread_count

logger = logging.getLogger(__name__)

PACKAGE = "llama_cpp"
KV_TYPES: Mapping[str, tuple[str, str]] = {
    "f16": ("GGML_TYPE_F16", "GGML_TYPE_F16"),
    "q8_0": ("GGML_TYPE_F16", "GGML_TYPE_Q8_0"),
}
"""Types of keys and values. 0.3.36 crashes when it moves keys of 8 bits, so these keep 16."""
_MOST_SEQUENCES, _LOGITS_BYTES = 256, 64 << 20
"""The most sequences of a context, whose logits have at most so many bytes."""
_BATCH_TOKENS = 2048
_SCORES_BYTES = 64 << 20
"""The most memory for the attention scores of a layer, which without flash attention are written out."""
_CELLS = 256
"""llama.cpp pads contexts to a multiple of this."""
_COMMAND = (sys.executable, "-P", "-m", __name__)
"""Tries a file."""
_CHECK_SECONDS = 600
_CHECK_BYTES = 16 << 30


def installed() -> bool:
    return find_spec(PACKAGE) is not None


@cache
def library() -> Any:
    """The package `llama_cpp`, quiet; MissingExtraError if it is not installed or too old."""
    if not installed():
        raise MissingExtraError(
            "The runtime llama-cpp needs llama-cpp-python, which is not installed (it is built from C++, for about 12 "
            f"minutes); {install_hint('llama-cpp')}, or use --runtime transformers."
        )
    import llama_cpp

    if not hasattr(llama_cpp, "llama_version"):
        raise MissingExtraError(
            f"llama-cpp-python {llama_cpp.__version__} is too old for the runtime llama-cpp; "
            f"{install_hint('llama-cpp')}."
        )
    llama_cpp.llama_log_set(_logger, None)
    llama_cpp.llama_backend_init()
    return llama_cpp


_complaints: deque[str] = deque(maxlen=20)


def _log(level: int, text: bytes | None, _: object) -> None:
    line = (text or b"").decode(errors="replace").strip()
    logger.debug("llama.cpp: %s", line)
    if level in (3, 4) and line:  # a warning or an error
        _complaints.append(line)


_logger = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_log)


def _reason() -> str:
    """llama.cpp's own words for the last failure."""
    lines = [
        re.sub(r"^\w+: ", "", line) for line in _complaints if "error" in line or "failed" in line or "unk" in line
    ]
    return (lines or [*_complaints] or ["llama.cpp does not say why"])[-1 if not lines else 0].rstrip(".")


@cache
def build() -> str:
    """A digest of the library: states of another build are not read."""
    folder = Path(library().llama_cpp._lib._name).parent
    total = hashlib.sha256(library().__version__.encode())
    for path in sorted(folder.glob("lib*")):
        if "llama" in path.name or "ggml" in path.name:
            total.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSettings:
    """What a file is loaded with, as far as it changes numbers or what may go wrong. `device` "cpu" is the processor;
    "gpu" and "gpu:N" take all layers, on whatever the library was built for (CUDA, Metal, Vulkan).
    """

    kv_type: str = "f16"
    device: str = "cpu"

    @property
    def flash(self) -> bool:
        """Flash attention: slower on processors by up to five times, but values of 8 bits need it."""
        return self.device != "cpu" or self.kv_type != "f16"

    @property
    def regime(self) -> str:
        """The part of an identity that they make."""
        return f"llama-cpp:{build()}:{self.kv_type}:{'flash' if self.flash else 'plain'}:{self.device[:3]}"


_GPU = re.compile(r"(?:gpu|cuda|metal|mps|rocm|sycl|vulkan)(?::(\d+))?(?:,.*)?")


def device_of(name: str | None) -> str:
    """The device that an option means; ModelLoadError if the library was built without devices."""
    has_devices = library().llama_supports_gpu_offload()
    name = "auto" if name is None else name.strip().lower()
    if name in ("auto", "cpu"):
        return "gpu" if has_devices and name == "auto" else "cpu"
    match = _GPU.fullmatch(name)
    if match is None:
        raise ModelLoadError(
            f"Device {name!r} is not known to the runtime llama-cpp; give cpu, gpu, cuda, metal or vulkan, or one by "
            "its number as cuda:1."
        )
    if not has_devices:
        raise ModelLoadError(
            f"Device {name!r} is not available: this llama-cpp-python was built for the processor alone; install one "
            "that was built for it, or give --device cpu."
        )
    return f"gpu:{match[1]}" if match[1] and "," not in name else "gpu"


class LlamaFile:
    """A GGUF file as llama.cpp maps it. ModelLoadError if llama.cpp does not load it."""

    def __init__(self, path: Path, settings: LlamaSettings) -> None:
        self.api = api = library()
        self.path, self.settings = path, settings
        options = api.llama_model_default_params()
        options.n_gpu_layers = 0 if settings.device == "cpu" else 999
        if number := settings.device[4:]:
            options.split_mode, options.main_gpu = api.LLAMA_SPLIT_MODE_NONE, int(number)
        options.use_extra_bufts = False  # packed weights are a copy, and with AMX 0.3.36 crashes on them
        _complaints.clear()
        self.handle = api.llama_model_load_from_file(os.fsencode(path), options)
        if not self.handle:
            raise ModelLoadError(f"{path} cannot be loaded by llama.cpp: {_reason()}.")
        weakref.finalize(self, api.llama_model_free, self.handle)
        self.vocab = api.llama_model_get_vocab(self.handle)
        self.vocab_size: int = api.llama_vocab_n_tokens(self.vocab)
        self.heads: int = api.llama_model_n_head(self.handle)
        self.hidden: int = api.llama_model_n_embd(self.handle)
        self.layers: int = api.llama_model_n_layer(self.handle)
        self.parameters: int = api.llama_model_n_params(self.handle)
        self.weight_bytes: int = api.llama_model_size(self.handle)
        self.window: int = api.llama_model_n_swa(self.handle)
        self.family = self.fact("general.architecture") or "unknown"

    def fact(self, key: str) -> str | None:
        """A value of the file's metadata as text."""
        buffer = ctypes.create_string_buffer(1 << 20)
        length = self.api.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return None if length < 0 else buffer.value.decode(errors="replace")

    @cached_property
    def quantisation(self) -> str:
        """As llama.cpp names it ("Q4_K - Medium"), without the family and size that it guesses before it."""
        buffer = ctypes.create_string_buffer(256)
        self.api.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode(errors="replace").split(" ", 2)[-1]

    @cached_property
    def max_positions(self) -> int:
        """The positions that it was trained for; those before its RoPE changes, where that depends on the length."""
        most = int(self.api.llama_model_n_ctx_train(self.handle))
        trained = self.fact(f"{self.family}.rope.scaling.original_context_length")
        depends = self.fact(f"{self.family}.rope.scaling.type") == "longrope" or self.family.startswith("phi3")
        return min(most, int(trained)) if depends and trained and trained.isdecimal() else most

    @property
    def recurrent(self) -> bool:
        return bool(self.api.llama_model_is_recurrent(self.handle) or self.api.llama_model_is_hybrid(self.handle))


class Slot:
    """One sequence's place in a context: its number there, how many cells it owns, and the chunks that it reads.

    It is a `TokenSequence`'s own KV. When it is dropped, the context takes the number back before its next work.
    """

    __slots__ = ("__weakref__", "context", "length", "number", "reads", "reserve", "start")

    def __init__(self, context: LlamaContext, *, start: int, reserve: int = 0) -> None:
        self.context, self.start, self.reserve = context, start, reserve
        self.length = 0
        self.number: int | None = None
        self.reads: list[_Loaded] = []

    def __del__(self) -> None:
        if self.number is not None:
            self.context.returned.append((self.number, self.length, self.reads))


@dataclass(slots=True, eq=False)
class _Loaded:
    """A chunk's state in the context, at one place, and how many slots read it. `number` None: it has no sequence of
    its own any more, so nobody else can join it."""

    chunk: Any
    start: int
    number: int | None
    readers: int = 0
    state: NDArray[np.uint8] | None = None
    """Its bytes, if it has no sequence from which they can be read."""


@dataclass(frozen=True, slots=True)
class StateForm:
    """The bytes of a state: `fixed`, and `per_token` for every token. One of a model with windows may have less,
    because llama.cpp leaves out what no later token sees in these layers.
    """

    fixed: int
    per_token: int

    def nbytes(self, tokens: int) -> int:
        return self.fixed + tokens * self.per_token


class LlamaContext:
    """The KV cells of a model, and the sequences in them. Any thread may call it; one at a time computes.

    `bytes_of` gives the state of a chunk, which is any object with `tokens` and `encoded_at`. Contexts grow as
    sequences need it: a new one is made, and what is alive moves there. The cells are few, because moving a chunk
    takes time for all of them.
    """

    def __init__(self, file: LlamaFile, *, threads: int, bytes_of: Callable[[Any], NDArray[np.uint8]]) -> None:
        self.file, self.api, self.threads, self._bytes_of = file, file.api, threads, bytes_of
        self.lock = threading.RLock()
        self.returned: deque[tuple[int, int, list[_Loaded]]] = deque()
        """Slots that were dropped; any thread appends."""
        self.cells = 0
        self._handle: Any = None
        self._memory: Any = None
        self.used = 0
        self.sequences = max(32, min(_MOST_SEQUENCES, _LOGITS_BYTES // (4 * file.vocab_size)))
        self._free: list[int] = []
        self._loaded: dict[tuple[int, int], _Loaded] = {}
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._release: Callable[[], object] = lambda: None

    def _open(self, cells: int) -> None:
        """A context of this many cells, in place of the one before."""
        self._release()
        api, settings = self.api, self.file.settings
        options = api.llama_context_default_params()
        options.n_ctx = self.cells = -(-cells // _CELLS) * _CELLS
        options.n_batch = min(_BATCH_TOKENS, options.n_ctx)
        most = _SCORES_BYTES // (4 * max(self.file.heads, 1) * options.n_ctx)
        options.n_ubatch = min(512 if settings.flash else max(32, most // 32 * 32), 512, options.n_batch)
        options.n_seq_max = options.n_outputs_max = self.sequences
        options.n_threads = options.n_threads_batch = self.threads
        options.type_k, options.type_v = (getattr(api, kind) for kind in KV_TYPES[settings.kv_type])
        options.flash_attn_type = int(settings.flash)
        options.kv_unified = True  # sequences share cells
        options.swa_full = True  # chunks keep all of their tokens in layers with windows too
        options.no_perf = True
        _complaints.clear()
        self._handle = api.llama_init_from_model(self.file.handle, options)
        if not self._handle:
            self.cells = 0
            raise RagkvError(
                f"llama.cpp makes no context for {cells} tokens with KV of {settings.kv_type} ({_reason()}); lower "
                "--top-k, or use another --codec."
            )
        self._release = weakref.finalize(self, api.llama_free, self._handle)
        self._memory = api.llama_get_memory(self._handle)
        self._batch_tokens = int(options.n_batch)
        self._free = list(range(self.sequences))[::-1]
        self.used = 0

    def read(
        self, work: Sequence[tuple[Slot, Sequence[int], Sequence[int], Sequence[Any]]]
    ) -> list[NDArray[np.float32]]:
        """Append tokens to slots: (slot, ids, which of them want logits, the placed chunks that the slot reads).

        Returns the logits `(vocab,)` of each wanted token. If it raises, no slot has any of the tokens.
        """
        with self.lock:
            self._take_back()
            new = [(slot, chunks) for slot, _, _, chunks in work if slot.number is None]
            more = sum(len(ids) for _, ids, _, _ in work) + sum(slot.reserve for slot, _ in new)
            more += sum(
                chunk.kv.tokens for _, chunks in new for chunk in chunks if self._key(chunk) not in self._loaded
            )
            self._make_room(more)
            try:
                for slot, chunks in new:
                    self._enter(slot, chunks)
                rows = self._decode(work)
            except BaseException:
                for slot, _ in new:
                    self.release(slot)
                for slot in (slot for slot, _, _, _ in work if slot.number is not None):
                    self.api.llama_memory_seq_rm(self._memory, slot.number, slot.start + slot.length, -1)
                raise
            for slot, ids, _, _ in work:
                slot.length += len(ids)
                self.used += len(ids)
            return rows

    def state(self, slot: Slot) -> NDArray[np.uint8]:
        """The bytes of a slot's own cells."""
        with self.lock:
            self._take_back()
            if not slot.reads:
                return self._state_of(slot.number)
            number = self._number()
            self.api.llama_memory_seq_cp(self._memory, slot.number, number, slot.start, slot.start + slot.length)
            try:
                return self._state_of(number)
            finally:
                self._drop(number)

    def release(self, slot: Slot) -> None:
        """Free a slot's cells; it is not used again."""
        with self.lock:
            if slot.number is not None:
                self._forget(slot.number, slot.length, slot.reads)
                slot.number, slot.length, slot.reads = None, 0, []

    @staticmethod
    def _key(chunk: Any) -> tuple[int, int]:
        return id(chunk.kv), chunk.start

    def _take_back(self) -> None:
        while self.returned:
            self._forget(*self.returned.popleft())

    def _forget(self, number: int, length: int, reads: Iterable[_Loaded]) -> None:
        self.used -= length
        self._drop(number)
        for loaded in reads:
            loaded.readers -= 1
            if not loaded.readers:
                self.used -= loaded.chunk.tokens
                if loaded.number is not None:
                    del self._loaded[id(loaded.chunk), loaded.start]
                    self._drop(loaded.number)

    def _number(self) -> int:
        """A free sequence; chunks give theirs up for it."""
        if not self._free:
            for key, loaded in list(self._loaded.items())[: self.sequences // 4]:
                assert loaded.number is not None
                loaded.state = self._bytes_of(loaded.chunk)
                del self._loaded[key]
                self._drop(loaded.number)
                loaded.number = None
        if not self._free:
            raise RagkvError(
                f"llama.cpp has {self.sequences} sequences at a time, and all are in use; ask fewer questions."
            )
        return self._free.pop()

    def _drop(self, number: int) -> None:
        self.api.llama_memory_seq_rm(self._memory, number, -1, -1)
        self._free.append(number)

    def _make_room(self, more: int) -> None:
        """Let the context have room for `more` tokens; what is alive moves to a larger one."""
        needed = self.used + more
        if needed <= self.cells:
            return
        if self.cells:
            needed = max(needed, min(2 * self.cells, self.cells + 8192))
        alive = [slot for slot in self._slots if slot.number is not None]
        self._take_back()  # those that were dropped meanwhile; from here on, none is
        own = [self.state(slot) if slot.length else None for slot in alive]
        reads = [slot.reads for slot in alive]
        states = {}
        for loaded in {id(loaded): loaded for each in reads for loaded in each}.values():
            states[id(loaded.chunk), loaded.start] = (
                (self._state_of(loaded.number), loaded.start)
                if loaded.state is None
                else (loaded.state, loaded.chunk.encoded_at)
            )
        self._open(needed)
        self._loaded = {}
        for slot, state, before in zip(alive, own, reads, strict=True):
            length, slot.length, slot.number, slot.reads = slot.length, 0, None, []
            self._enter(slot, [SimpleNamespace(kv=loaded.chunk, start=loaded.start) for loaded in before], states)
            if state is not None:
                number = self._restored(state, slot.start, length)
                self.api.llama_memory_seq_cp(self._memory, number, slot.number, -1, -1)
                self._drop(number)
                slot.length = length
                self.used += length

    def _enter(
        self,
        slot: Slot,
        chunks: Sequence[Any],
        states: Mapping[tuple[int, int], tuple[NDArray[np.uint8], int]] = MappingProxyType({}),
    ) -> None:
        """Give a slot a sequence, and join the chunks to it. `states` are those of loaded chunks at their positions."""
        slot.number = self._number()
        self._slots.add(slot)
        for chunk in chunks:
            if not chunk.kv.tokens:
                continue
            loaded = self._loaded.get(self._key(chunk))
            if loaded is None or loaded.number is None:
                state, start = states.get(self._key(chunk)) or (self._bytes_of(chunk.kv), chunk.kv.encoded_at)
                number = self._restored(state, start, chunk.kv.tokens)
                del state  # its memory holds the next one
                if chunk.start != start:
                    self.api.llama_memory_seq_add(self._memory, number, -1, -1, chunk.start - start)
                loaded = self._loaded[self._key(chunk)] = _Loaded(chunk.kv, chunk.start, number)
                self.used += chunk.kv.tokens
            assert loaded.number is not None
            self.api.llama_memory_seq_cp(self._memory, loaded.number, slot.number, -1, -1)
            loaded.readers += 1
            slot.reads.append(loaded)
        last = self.api.llama_memory_seq_pos_max(self._memory, slot.number)
        if slot.reads and last + 1 != slot.start:
            raise UnsupportedModelError(
                f"llama.cpp reads a question right after its last chunk, at {last + 1} and not at {slot.start}; use "
                "another preset of engine 'block'."
            )

    def _restored(self, state: NDArray[np.uint8], start: int, tokens: int) -> int:
        """A sequence with a state at its own positions. RagkvError for bytes that llama.cpp does not take."""
        number = self._number()
        buffer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        size = self.api.llama_state_seq_set_data(self._handle, buffer, state.nbytes, number)
        api, memory = self.api, self._memory
        first, last = (of(memory, number) for of in (api.llama_memory_seq_pos_min, api.llama_memory_seq_pos_max))
        if not 0 < size <= state.nbytes or first < start or last != start + tokens - 1:
            self._drop(number)
            raise RagkvError(
                f"llama.cpp does not take a stored state of {tokens} tokens ({_reason()}); run ragkv repair."
            )
        return number

    def _state_of(self, number: int | None) -> NDArray[np.uint8]:
        size = self.api.llama_state_seq_get_size(self._handle, number)
        state = np.empty(size, np.uint8)
        wrote = self.api.llama_state_seq_get_data(
            self._handle, state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), size, number
        )
        if wrote != size:
            raise RagkvError("llama.cpp could not write the state of a sequence; there may be no memory.")
        return state

    def _decode(
        self, work: Sequence[tuple[Slot, Sequence[int], Sequence[int], Sequence[Any]]]
    ) -> list[NDArray[np.float32]]:
        tokens = np.array([i for _, ids, _, _ in work for i in ids], np.int32)
        starts = [slot.start + slot.length for slot, _, _, _ in work]
        places = np.array(
            [first + i for first, (_, ids, _, _) in zip(starts, work, strict=True) for i in range(len(ids))], np.int32
        )
        numbers = np.array([slot.number for slot, ids, _, _ in work for _ in ids], np.int32)
        wanted = np.zeros(len(tokens), np.int8)
        offset = 0
        for _, ids, kept, _ in work:
            wanted[[offset + i for i in kept]] = 1
            offset += len(ids)
        rows: list[NDArray[np.float32]] = []
        begin = 0
        while begin < len(tokens):
            end = min(begin + self._batch_tokens, len(tokens))
            if (outputs := np.flatnonzero(wanted[begin:end])).size > self.sequences:
                end = begin + int(outputs[self.sequences])
            rows += self._one_batch(tokens[begin:end], places[begin:end], numbers[begin:end], wanted[begin:end])
            begin = end
        return rows

    def _one_batch(
        self, tokens: NDArray[np.int32], places: NDArray[np.int32], numbers: NDArray[np.int32], wanted: NDArray[np.int8]
    ) -> list[NDArray[np.float32]]:
        count = len(tokens)
        ones = np.ones(count, np.int32)
        addresses = numbers.ctypes.data + 4 * np.arange(count, dtype=np.uintp)
        batch = self.api.llama_batch()
        batch.n_tokens = count
        batch.token = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.pos = places.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.n_seq_id = ones.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        batch.seq_id = addresses.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))
        batch.logits = wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        _complaints.clear()
        code = self.api.llama_decode(self._handle, batch)
        if code:
            raise RagkvError(f"llama.cpp could not compute a batch of {count} tokens (code {code}: {_reason()}).")
        rows = []
        for i in np.flatnonzero(wanted):
            row = self.api.llama_get_logits_ith(self._handle, int(i))
            rows.append(np.ctypeslib.as_array(row, (self.file.vocab_size,)))
        return [row.copy() for row in rows]

    @property
    def moves(self) -> bool:
        """Whether llama.cpp itself says that it can move chunks; only a context that is open knows."""
        return bool(self.api.llama_memory_can_shift(self._memory))


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """A state in the trial of a file."""

    data: NDArray[np.uint8]
    tokens: int
    encoded_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialVerdict:
    """What a trial showed of a file: the form of its states, and the capabilities of engines that it lacks, with the
    reason.
    """

    form: StateForm
    missing: Mapping[str, str]

    @classmethod
    def parse(cls, text: str | bytes) -> TrialVerdict:
        """ValueError, TypeError or KeyError for what is none."""
        facts = parse_json(text)
        form = StateForm(int(facts["form"]["fixed"]), int(facts["form"]["per_token"]))
        return cls(form=form, missing={str(need): str(why) for need, why in facts["missing"].items()})


_TOLERANCE = 0.1
"""The largest error of a joined or moved chunk, as a share of what the chunk changes in the logits."""


def _tried(file: LlamaFile) -> TrialVerdict:
    """Compare chunks that were stored, moved and joined with llama.cpp's own passes over the same tokens and positions.

    UnsupportedModelError for a model that writes no text.
    """
    if not file.api.llama_model_has_decoder(file.handle) or file.api.llama_model_has_encoder(file.handle):
        raise UnsupportedModelError(f"{file.path} holds no model that writes text from left to right.")
    if file.recurrent:
        raise UnsupportedModelError(
            f"{file.path} has recurrent layers, and llama.cpp cannot join what they keep of chunks; use --runtime "
            "transformers."
        )
    if file.max_positions < 1:
        raise UnsupportedModelError(f"{file.path} does not say for how many positions its model was made.")
    if (parts := file.fact("split.count")) not in (None, "0", "1"):  # the digest is of this file alone
        raise UnsupportedModelError(
            f"{file.path} is one of {parts} files of a model; join them with llama.cpp's llama-gguf-split --merge."
        )
    random = np.random.default_rng(7)
    context = LlamaContext(file, threads=thread_count(), bytes_of=lambda chunk: chunk.data)

    def some(count: int) -> list[int]:
        return [int(i) for i in random.integers(0, file.vocab_size, count)]

    def logits(ids: Sequence[int], start: int, *chunks: tuple[_Chunk, int]) -> NDArray[np.float32]:
        slot = Slot(context, start=start)
        placed = [SimpleNamespace(kv=kv, start=at) for kv, at in chunks]
        [row] = context.read([(slot, ids, [len(ids) - 1], placed)])
        context.release(slot)
        return row

    def encoded(ids: Sequence[int], *before: tuple[_Chunk, int]) -> _Chunk:
        slot = Slot(context, start=sum(kv.tokens for kv, _ in before))
        context.read([(slot, ids, [], [SimpleNamespace(kv=kv, start=at) for kv, at in before])])
        chunk = _Chunk(context.state(slot), len(ids), slot.start)
        context.release(slot)
        return chunk

    def wrong(result: NDArray[np.float32], own: NDArray[np.float32], without: NDArray[np.float32]) -> bool:
        return not float(np.linalg.norm(result - own)) <= _TOLERANCE * float(np.linalg.norm(own - without))

    prefix, chunk, question, far = some(9), some(48), some(7), 211
    if not np.isfinite(logits(question, 0)).all():
        raise UnsupportedModelError(f"{file.path} is damaged: its model computes logits that are no numbers.")
    one, two, three = (encoded(prefix[:count]).data.nbytes for count in (1, 2, 9))
    form = StateForm(2 * one - two, two - one)
    if form.nbytes(9) < three or form.fixed < 0 or form.per_token < 1:
        raise UnsupportedModelError(f"llama.cpp's states of {file.path} do not grow evenly with their tokens.")
    missing = {}
    before = encoded(prefix)
    behind = encoded(chunk, (before, 0))
    own = logits([*prefix, *chunk, *question], 0)
    joined = logits(question, 57, (before, 0), (behind, 9))
    if wrong(joined, own, logits([*prefix, *question], 0)):
        missing["merge"] = missing["move"] = "llama.cpp computes something else from its stored chunks"
    elif not context.moves:
        missing["move"] = "llama.cpp cannot move its chunks"
    else:
        alone = encoded(chunk)
        moved = logits(question, far + 48, (alone, far))
        if wrong(moved, logits([*chunk, *question], far), logits(question, far + 48)):
            missing["move"] = "llama.cpp computes something else from its moved chunks"
    return TrialVerdict(form=form, missing=missing)


def checked(path: Path, settings: LlamaSettings, name: str) -> TrialVerdict:
    """The verdict on a file, from the cache or from a process of its own.

    ModelLoadError for a file that llama.cpp refuses, or that ends the process; UnsupportedModelError for one that
    ragkv cannot run.
    """
    facts = path.stat()
    stamp = facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
    key = hashlib.sha256(repr((str(path.resolve()), stamp, asdict(settings), build())).encode()).hexdigest()[:40]
    place = None
    with suppress(RuntimeError):  # a user without a home
        place = user_folder("XDG_CACHE_HOME", ".cache") / "ragkv" / "llama-cpp" / f"{key}.json"
    if place is not None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            return TrialVerdict.parse(read_plain(place))
    command = [*_COMMAND, str(path), json.dumps(asdict(settings))]
    try:
        child = subprocess.run(
            command,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelLoadError(f"Model {name!r} was tried by llama.cpp for {_CHECK_SECONDS} s without an end.") from error
    line = child.stdout.decode(errors="replace").strip().rpartition("\n")[2]
    if child.returncode < 0 or not line:
        raise ModelLoadError(
            f"Model {name!r} is damaged or of a kind that llama.cpp does not know: it ends llama.cpp's process; "
            "download it again, or use --runtime transformers."
        )
    if line.startswith(("ModelLoadError ", "UnsupportedModelError ")):
        kind, _, why = line.partition(" ")
        raise (ModelLoadError if kind == "ModelLoadError" else UnsupportedModelError)(why)
    try:
        verdict = TrialVerdict.parse(line)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelLoadError(f"Model {name!r} could not be tried by llama.cpp: {line[:200]}") from error
    if place is not None:
        with suppress(OSError):
            make_folder(place.parent)
            write_plain(place, line.encode())
    return verdict


def _limit(nbytes: int) -> None:
    """Bound this process, which reads a file that may be hostile."""
    with suppress(ImportError):  # not on Windows
        import resource

        for what, most in (
            (resource.RLIMIT_AS, nbytes),
            (resource.RLIMIT_CPU, _CHECK_SECONDS),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(what)[1]
            resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def main(path: str, settings: str) -> None:
    """Print the verdict on a file as a line of JSON, or the name of an error and its sentence."""
    chosen = LlamaSettings(**json.loads(settings))
    if chosen.device == "cpu":  # the drivers of devices reserve more addresses than there is memory
        _limit(Path(path).stat().st_size + _CHECK_BYTES)
    try:
        verdict = asdict(_tried(LlamaFile(Path(path), chosen)))
    except RagkvError as error:
        kind = "UnsupportedModelError" if isinstance(error, UnsupportedModelError) else "ModelLoadError"
        sys.stdout.write(f"{kind} {' '.join(str(error).split())}\n")
    else:
        sys.stdout.write(json.dumps(verdict) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
