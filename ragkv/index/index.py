"""`Index`: an open index folder with its configuration, its store and the models that it was built with.

Search, answers and maintenance take an `Index`, so that they do not depend on each other. The store records which
model, embedder, prompt and doctor reports belong to the index. That metadata has no checksums and an index may come
from anyone, so malformed metadata counts as damage: `repair` drops it, and it is made again.

`WriteBehind` stores newly encoded KV after the answer, so that no first token waits for a write. Its thread ends when
nothing is left; `close` waits for it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ragkv.config import (
    LLAMA_CPP,
    MODES,
    NEEDED,
    NONE,
    TRANSFORMERS,
    VECTORS,
    VLLM,
    IndexConfig,
    Mode,
    RuntimeConfig,
    byte_count,
    load_config,
)
from ragkv.errors import (
    AnswerInterruptedError,
    ConfigError,
    CorruptStoreError,
    KVMismatchError,
    RetrievalError,
    StoreError,
    UsageError,
)
from ragkv.index.quality import QUALITY, are_reports
from ragkv.ingest import IngestFingerprint
from ragkv.ingest.encoding import LINE_TOKENS
from ragkv.mini import embedder_path
from ragkv.model.checkpoint import MINI, MINILM, Checkpoint, pick_device, pick_devices, resolve
from ragkv.model.prompt import Prompt, render
from ragkv.retrievers import (
    Embedder,
    Reranker,
    ScoreKind,
    embedder_fingerprint,
    embedder_modes,
    embedder_stamp,
    load_embedder,
    load_reranker,
)
from ragkv.retrievers.embedders import find
from ragkv.retrievers.qdrant import QdrantCollection
from ragkv.retrievers.rerankers import RERANKERS
from ragkv.retrievers.vectors import FLAT, make
from ragkv.store import Problem, Store, Use, codec_from_config
from ragkv.store.record import KVIdentity
from ragkv.store.tier import Fetched, SharedTiers
from ragkv.types import Encoding, ScoredChunk
from ragkv.util.plugins import ENGINES, require_engine
from ragkv.util.telemetry import Span

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV, Place
    from ragkv.engines.apb import APBConfig
    from ragkv.model.language_model import LanguageModel
    from ragkv.runtime import Runtime, RuntimeLimits
    from ragkv.types import KVShape

logger = logging.getLogger(__name__)

_MAX_NEWLINES = 1000  # as in `PromptConfig`
_PARTS = {"prefix", "before_question", "after_question", "separator"}


def read_metadata(store: Store, name: str) -> Any:
    """A metadata value, or None if absent; `CorruptStoreError` if it is malformed."""
    found = store.get_meta(name)
    if found is not None and not METADATA_CHECKS[name](found):
        raise CorruptStoreError(f"the fact {name!r} in {store.directory} is damaged: run `ragkv repair`")
    return found


def damaged_metadata(store: Store) -> list[Problem]:
    """A problem for every malformed metadata value; the store itself reports values that are not JSON."""
    problems = []
    for name in METADATA_CHECKS:
        try:
            found = store.get_meta(name)
        except CorruptStoreError:
            continue
        if found is not None and not METADATA_CHECKS[name](found):
            what = "it does not have the form of this fact"
            key = b"fact/" + name.encode()
            problems.append(Problem(kind="damaged", table="meta", key=key, where=f"fact {name!r}", what=what))
    return problems


def _texts(found: Any, *names: str) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name), str) for name in names)


def _is_embedder(found: Any) -> bool:
    return _texts(found, "fingerprint") and isinstance(found.get("stamp", ""), str)


def _is_prompt(value: Any) -> bool:
    if not _texts(value, "model") or not _texts(value.get("parts"), *_PARTS):
        return False
    try:
        date.fromisoformat(value.get("date", "2000-01-01"))
    except (TypeError, ValueError):
        return False
    parts, ids = value["parts"], value.get("prefix_ids")
    newlines = parts.get("prefix_newlines")
    return (
        parts.keys() == _PARTS | {"prefix_newlines", "bos"}
        and parts["bos"] in ("auto", "none")
        and type(newlines) is int
        and 0 <= newlines <= _MAX_NEWLINES
        and isinstance(ids, list)
        and all(type(token) is int and 0 <= token < 1 << 32 for token in ids)
    )


METADATA_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "model": lambda found: _texts(found, "fingerprint"),
    "embedder": _is_embedder,
    "prompt": _is_prompt,
    QUALITY: are_reports,
}
"""The metadata that ragkv records, each with the check of its form."""


def kinds_of(mode: Mode) -> frozenset[ScoreKind]:
    """The kinds of vectors that a mode requires."""
    return cast("frozenset[ScoreKind]", frozenset(NEEDED[mode]))


def useful_kinds(mode: Mode) -> frozenset[ScoreKind]:
    """The kinds of vectors that a mode uses if available."""
    return kinds_of(mode) | ({"sparse"} if mode == "hybrid" else set())


def indexes_of(mode: Mode, kinds: Collection[str]) -> tuple[str, ...]:
    """The retrieval indexes that a mode searches, given the stored kinds of vectors.

    ColBERT scores the candidates of the dense index with vectors from the store. Hybrid uses BM25 if there are no
    sparse vectors.
    """
    if mode == "bm25":
        return ("bm25",)
    if mode == "hybrid":
        return ("dense", "sparse") if "sparse" in kinds else ("bm25", "dense")
    return tuple(sorted(kinds_of(mode) - {"colbert"}))


def served(kinds: Collection[str]) -> tuple[Mode, ...]:
    """The modes that these kinds of vectors (or none) can serve."""
    return tuple(mode for mode in MODES if kinds_of(mode) <= set(kinds))


def why_not_served(mode: Mode, kinds: Collection[str], what: str) -> str | None:
    """Why these kinds of vectors cannot serve a mode, and which modes they can; None if they can."""
    if not (missing := sorted(kinds_of(mode) - set(kinds))):
        return None
    *others, last = served(kinds)
    can = f"{', '.join(others)} and {last}" if others else last
    return f'{what} has no {" and no ".join(missing)} vectors, which retrieval "{mode}" needs; it can serve {can}.'


USUAL_WIDTH = 1024  # of bge-m3's vectors
EMBEDDER = "embedder"
"""The key in `meta` of the embedder that made all vectors: name, fingerprint, stamp."""


def retrieval_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a new index: mini's embedder and reranker with the mini model; with any other, minilm if it is
    installed. The variable RAGKV_DEFAULT_EMBEDDER names another.

    An index with an embedder is searched by words and by meaning. Only mini's encoders know the words of generated
    worlds alone and lower what BM25 finds on other text (docs/retrieval.md), so with them BM25 is the default mode.
    """
    mini = MINI if settings.get("model", MINI) == MINI else NONE
    embedder = settings.get("embedder") or mini
    if "embedder" not in settings and mini == NONE:
        installed = MINILM if resolve(MINILM, bundled=embedder_path, marks=("modules.json",)).local else NONE
        embedder = os.environ.get("RAGKV_DEFAULT_EMBEDDER") or installed
    return {
        "embedder": embedder,
        "reranker": mini if embedder == MINI else NONE,
        "rerank": embedder != MINI or "reranker" in settings,
        "retrieval": "bm25" if embedder in (NONE, MINI) else "hybrid",
    }


def check_names(config: IndexConfig, source: Path | None = None) -> None:
    """UsageError for an engine or a codec that is not installed, or a FAISS factory string that is not supported.
    `source` is the file to name.

    No engine is loaded, because that takes torch; so the values under `[tuning.ENGINE]` are left to `make_engine`.
    """
    try:
        for name in config.tuning:
            if name not in ENGINES:
                raise ConfigError(f"[tuning.{name}] is for none of the engines {', '.join(ENGINES.names())}.")
        for name in (*config.engines, config.default_engine):
            require_engine(name)
        codec_from_config({"id": config.codec})
        if config.index_factory != FLAT:
            make(config.index_factory, USUAL_WIDTH)
    except UsageError as error:
        if source is None:
            raise
        raise ConfigError(f"{source}: {error}") from error


def check_encoders(config: IndexConfig) -> None:
    """ModelLoadError or ConfigError for an embedder or a reranker that is not here and cannot be on the hub."""
    validate_vectors(config, fetch=False)
    if config.reranker not in (NONE, *RERANKERS.names()):
        find(config.reranker, "reranker")


def validate_vectors(config: IndexConfig, *, fetch: bool) -> IndexConfig:
    """The configuration with all kinds of vectors of its embedder, unless it names some.

    ConfigError for a retrieval mode that these vectors cannot serve. Without `fetch`, an embedder that would have to be
    downloaded is not checked.
    """
    offered = None if config.embedder == NONE else embedder_modes(config.embedder, fetch=fetch)
    if offered is None:
        return config
    if absent := set(config.vectors) - offered if config.vectors != VECTORS else set():
        raise ConfigError(
            f"Embedder {config.embedder!r} gives {', '.join(sorted(offered))} vectors, not {', '.join(sorted(absent))}"
            "; choose an embedder in bge-m3's layout, or other vectors."
        )
    kept = tuple(kind for kind in config.vectors if kind in offered)
    if why := why_not_served(config.retrieval, kept, f"Embedder {config.embedder!r}"):
        raise ConfigError(why)
    return replace(config, vectors=kept)


def load_embedder_of(config: IndexConfig, device: str | None) -> Embedder | None:
    """Load the embedder of an index; None for an index without vectors."""
    if config.embedder == NONE:
        return None
    modes = cast("tuple[ScoreKind, ...]", config.vectors)
    return load_embedder(
        config.embedder,
        device=_encoders_device(config, device),
        modes=None if modes == VECTORS else modes,  # by default all of the embedder's
    )


def load_reranker_of(config: IndexConfig, device: str | None) -> Reranker | None:
    """Load the cross-encoder of an index; None for an index without one."""
    return None if config.reranker == NONE else load_reranker(config.reranker, device=_encoders_device(config, device))


def _encoders_device(config: IndexConfig, device: str | None) -> str:
    """Where embedder and reranker run. Devices of llama.cpp are not torch's: they run on torch's own choice then, which
    is made when one of them needs torch.
    """
    if config.executor == LLAMA_CPP:
        return "cpu" if device == "cpu" else "auto"
    return str(pick_device(device))


def check_device(config: IndexConfig, device: str | None) -> None:
    """ModelLoadError for a device that the runtime of an index does not have."""
    if config.executor == LLAMA_CPP:
        from ragkv.model.llama_cpp import device_of

        device_of(device)
    else:
        pick_devices(device, lambda: 0)


class Encoders:
    """The embedder and the reranker of one index; threads may share one. `device` None is CUDA if there is one.

    Pass `embedder` and `reranker` if they are already loaded.
    """

    def __init__(
        self,
        folder: Path,
        config: IndexConfig,
        store: Store,
        device: str | None,
        *,
        embedder: Embedder | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        self._folder = folder
        self._config = config
        self._store = store
        self._device = device
        self._lock = threading.Lock()
        self._embedder = embedder
        self._reranker = reranker

    @property
    def embedder(self) -> Embedder | None:
        """The model that turns texts into vectors; None for an index without vectors."""
        with self._lock:
            if self._embedder is None:
                self._embedder = load_embedder_of(self._config, self._device)
            return self._embedder

    @property
    def reranker(self) -> Reranker | None:
        """The cross-encoder that scores candidates; None for an index without one."""
        with self._lock:
            if self._reranker is None:
                self._reranker = load_reranker_of(self._config, self._device)
            return self._reranker

    @property
    def kinds(self) -> frozenset[ScoreKind]:
        """The kinds of vectors that the index stores; loads the embedder."""
        embedder = self.embedder
        return frozenset() if embedder is None else embedder.modes & frozenset(self._config.vectors)

    @cached_property
    def fingerprint(self) -> str | None:
        """The embedder's current fingerprint, without loading it; None for an index without vectors."""
        return None if self._config.embedder == NONE else embedder_fingerprint(self._config.embedder)

    def require_same_embedder(self) -> str:
        """The fingerprint of the embedder that made the vectors; RetrievalError if the embedder has changed.

        The embedder's files, often gigabytes, are only hashed if their sizes or times have changed.
        """
        name = self._config.embedder
        if name == NONE:
            raise RetrievalError(
                "This index was made without an embedder, so that it can only be searched with --retrieval bm25; "
                "to have vectors, ingest into another --index with --embedder.",
                param="retrieval",
            )
        recorded = read_metadata(self._store, EMBEDDER)
        if recorded is None and self._store.empty:
            return str(self.fingerprint)  # nothing to compare with
        if isinstance(recorded, dict) and (
            recorded.get("stamp") == embedder_stamp(name) or recorded["fingerprint"] == self.fingerprint
        ):
            return str(recorded["fingerprint"])
        raise RetrievalError(
            f"The vectors of the index at {self._folder} were made by "
            + ("another version of the" if recorded else "no")
            + f" embedder {name!r}; run ragkv ingest on all of its documents again, or search with --retrieval bm25.",
            param="retrieval",
        )


_LLAMA_CPP_ENGINES = frozenset({"full", "single", "block", "pced", "ape", "ippd"})


def runs_by_llama_cpp(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> bool:
    """Whether llama.cpp is the default of a model: it is there, and has all that the settings ask for."""
    packages = ("llama_cpp",) if checkpoint.adapter is None else ("llama_cpp", "gguf")
    if checkpoint.file is None or not all(map(find_spec, packages)):
        return False
    engines = {*settings.get("engines", ()), settings.get("default_engine", "full")}
    return (
        settings.get("dtype", "auto") == "auto"
        and settings.get("codec", "half") in ("half", "raw", "zstd", "q8")
        and engines <= _LLAMA_CPP_ENGINES
        and not settings.get("encoding")
    )


def load_models(config: IndexConfig, device: str | None) -> tuple[LanguageModel, Embedder | None, Reranker | None]:
    """A language model, and the embedder and reranker if the index has them, which are loaded first.

    Raises the ModelLoadError or UnsupportedModelError of the first that cannot be loaded.
    """
    embedder, reranker = load_embedder_of(config, device), load_reranker_of(config, device)
    return load_language_model(config, device), embedder, reranker


def load_language_model(config: IndexConfig, device: str | None) -> LanguageModel:
    """The model of an index, by its runtime. ModelLoadError or UnsupportedModelError if it cannot be loaded."""
    if config.executor == LLAMA_CPP:
        from ragkv.runtime import llama_cpp_executor

        model = llama_cpp_executor.load(resolve(config.model), dtype=config.dtype, device=device, codec=config.codec)
        return cast("LanguageModel", model)
    from ragkv.model.self_check import load_model

    return load_model(config.model, dtype=config.dtype, device=device)


def fingerprint_of(config: IndexConfig, device: str | None, revision: Callable[[], str | None]) -> str:
    """The model's fingerprint; a local checkpoint is hashed without loading it. `revision` loads one from the hub."""
    checkpoint = resolve(config.model)
    if config.executor == LLAMA_CPP:
        from ragkv.runtime import llama_cpp_executor

        return llama_cpp_executor.fingerprint(checkpoint, dtype=config.dtype, device=device, codec=config.codec)
    return checkpoint.fingerprint(config.dtype, None if checkpoint.local else revision(), device=device)


VLLM_VARIABLE = "RAGKV_VLLM"
"""The URL of the vLLM server for indexes that vLLM encodes."""


def require_vllm(url: str | None) -> str:
    """UsageError without a URL."""
    if url is None:
        raise UsageError(
            f"vLLM encodes this index: name its server with --runtime vllm URL, or in the variable {VLLM_VARIABLE}."
        )
    return url


MEMORY_VARIABLE = "RAGKV_MEMORY_BUDGET"
_CAP = 8 << 30


def memory_budget(setting: int | str, place: Place) -> int:
    """The bytes that `memory_budget` of the index means, or the environment variable that overrides it.

    "auto" is a quarter of the memory, at most 8 GiB: of the GPU if the model is on one (of a split model, of what its
    layers' KV may take of each), else of the machine, or of the container if that has less. Raises `ConfigError` if the
    variable is not a number of bytes.
    """
    forced = os.environ.get(MEMORY_VARIABLE)
    name, value = (MEMORY_VARIABLE, forced) if forced else ("memory_budget", setting)
    return min(memory_of(place) // 4, _CAP) if value == "auto" else byte_count(name, value)


def memory_of(place: Place) -> int:
    """Bytes of memory of the model's device; for a CPU, of the machine or of the container if that has less.

    For a split model, the bytes of equally large layers at which the first device is full.
    """
    from ragkv.model.checkpoint import device_memory

    if not isinstance(place, tuple):
        return device_memory(place)
    return min(device_memory(device) * len(place) // layers for device, layers in Counter(place).items())


def runtime_limits(model: LanguageModel, config: IndexConfig, limits: RuntimeConfig | None = None) -> RuntimeLimits:
    """The runtime's limits from `limits` and the configuration, the rest from this machine's memory."""
    from ragkv.runtime import limits_for

    budget = memory_budget(config.memory_budget, model.place)
    given = (config.runtime if limits is None else config.runtime.overridden(limits)).given
    return limits_for(model, memory=memory_of(model.place), budget=budget, **given)


USES = 256
"""Uses of chunks to count before they are recorded."""
WAITING_BYTES = 256 << 20
"""The most KV that may wait to be stored; then finished answers wait, so that a slow disk does not fill the memory."""

_all: weakref.WeakSet[WriteBehind] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class DeferredWrite:
    """A pending write, with the keys and bytes of the KV that it stores."""

    write: Callable[[], object]
    keys: Sequence[bytes]
    nbytes: int


class WriteBehind:
    """Runs the writes of questions in a thread after their answers; on a read-only index, logs once and skips them.

    `open_budget` sets the store's budget to the configured one before the first write.

    Uses are counted in memory and recorded some hundred chunks at a time, so a killed process loses the last ones.
    """

    def __init__(self, store: Store, open_budget: Callable[[], object] = lambda: None) -> None:
        self._store = store
        self._open_budget = open_budget
        self._warned = False
        self._start()
        _all.add(self)

    def _start(self) -> None:
        self._lock = threading.Condition(threading.Lock())
        self._waiting: deque[DeferredWrite] = deque()
        self.unstored: dict[bytes, None] = {}
        """Keys of KV that is encoded but not stored yet."""
        self._bytes = 0  # of pending KV
        self._thread: threading.Thread | None = None
        self._closed = False
        self._uses: dict[bytes, Use] = {}
        self._encoded = (0.0, 0)  # unrecorded seconds and tokens

    def keep(self, write: Callable[[], object]) -> None:
        """Run `write` now unless the store is read-only; log a failure, because the answer does not depend on it."""
        if self._store.readonly:
            if not self._warned:
                logger.warning(
                    "%s is open read-only: what a question has to compute is not kept", self._store.directory.parent
                )
            self._warned = True
            return
        try:
            write()
        except (ConfigError, StoreError, RetrievalError) as error:  # its folder may be gone
            logger.warning("what a question computed is not kept: %s", error)

    def defer(self, write: Callable[[], object], keys: Sequence[bytes], nbytes: int) -> DeferredWrite:
        """A write for `submit`; its KV counts as unstored from now on."""
        self.unstored.update(dict.fromkeys(keys))
        return DeferredWrite(write, keys, nbytes)

    def submit(self, write: DeferredWrite) -> None:
        """Run a write in the background; `settle` and `close` wait for it."""
        with self._lock:
            if self._closed:
                return
            self._waiting.append(write)
            self._bytes += write.nbytes
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="ragkv-write-behind")
                with suppress(RuntimeError):  # no more threads can be started: the next one writes it, or `settle`
                    thread.start()
                    self._thread = thread

    def settle(self, *, whole: bool = False) -> None:
        """Wait until the pending KV is within its limit; with `whole`, until everything is stored."""
        with self._lock:
            alone = whole and self._thread is None and bool(self._waiting)
        if alone:  # no thread could be started for it
            self._work()
        with self._lock:
            self._lock.wait_for(lambda: self._bytes <= (0 if whole else WAITING_BYTES) or self._thread is None)
            self._lock.wait_for(lambda: not whole or self._thread is None)
        if whole:
            self._record()
        elif len(self._uses) >= USES:
            self.submit(DeferredWrite(lambda: None, (), 0))

    def close(self) -> None:
        """Run the pending writes, record the uses, and accept no more."""
        with self._lock:
            self._closed = True
        self.settle(whole=True)

    def note_encoded(self, tokens: int, seconds: float) -> None:
        """Count chunk tokens encoded for a question, and the seconds that it took until now."""
        Span("ragkv.kv.encode", {"ragkv.kv.encode.tokens": tokens}, started=time.perf_counter() - seconds).end()
        with self._lock:
            self._encoded = (self._encoded[0] + seconds, self._encoded[1] + tokens)

    def note_uses(self, uses: Sequence[tuple[bytes, Use]]) -> None:
        """Count a question's uses of these records, by KV key."""
        if self._store.readonly:
            return
        with self._lock:
            for key, use in uses:
                hits, misses, wanted = use.hits, use.misses, use.wanted
                if (before := self._uses.get(key)) is not None:
                    hits, misses, wanted = hits + before.hits, misses + before.misses, wanted + before.wanted
                self._uses[key] = replace(use, hits=hits, misses=misses, wanted=wanted)

    def _work(self) -> None:
        """The thread: run pending writes until there are none."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    self._lock.notify_all()
                    return
                later = self._waiting.popleft()
            try:
                self._record()  # first, because admission depends on the uses
                self.keep(later.write)
            except Exception:
                logger.exception("what a question computed is not kept")
            finally:
                with self._lock:
                    for key in later.keys:
                        self.unstored.pop(key, None)
                    self._bytes -= later.nbytes
                    self._lock.notify_all()
                del later

    def _record(self) -> None:
        with self._lock:
            uses, self._uses = self._uses, {}
            (seconds, tokens), self._encoded = self._encoded, (0.0, 0)
        if uses and not self._store.readonly:
            rate = seconds / tokens if tokens else None

            def write() -> None:
                self._open_budget()
                self._store.record_uses(uses, seconds_per_token=rate)

            self.keep(write)


def _forget_all() -> None:
    """Reset in a forked child, where the thread and the owner of its lock do not exist, and which shares the parent's
    store."""
    for write_behind in list(_all):
        write_behind._start()


os.register_at_fork(after_in_child=_forget_all)


class Index:
    """An open index. Models load when they are first needed; threads may share an index.

    `device` None is CUDA if available, else the CPU. `loaded` are models that the caller has loaded (`load_models`).
    `limits` override those of `[runtime]`. `vllm` is the URL of a vLLM server that answers (`ragkv.runtime.vllm`).
    """

    def __init__(
        self,
        folder: Path,
        config: IndexConfig,
        store: Store,
        *,
        device: str | None = None,
        loaded: tuple[LanguageModel, Embedder | None, Reranker | None] | None = None,
        limits: RuntimeConfig | None = None,
        vllm: str | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.store = store
        self.write_behind = WriteBehind(store, self.open_budget)
        self._model: LanguageModel | None
        self._model, embedder, reranker = loaded or (None, None, None)
        self.encoders = Encoders(folder, config, store, device, embedder=embedder, reranker=reranker)
        """The embedder and reranker, and the check of which embedder made the vectors."""
        self.device = device
        self._lock = threading.RLock()
        self.closed = False
        """Whether `close` was called."""
        self._budgeted = False
        self._threads: set[threading.Thread] = set()
        self.limits = config.runtime if limits is None else config.runtime.overridden(limits)
        """How many questions are answered at a time."""
        self.vllm = vllm or (os.environ.get(VLLM_VARIABLE) if config.executor == VLLM else None)
        self._runtime: Runtime | None = None
        self._tiers: SharedTiers | None = None
        self._collection: QdrantCollection | None = None

    @property
    def tiers(self) -> SharedTiers | None:
        """The tiers that the index shares with others, connected at the first use; None if it has none."""
        with self._lock:
            if self._tiers is None and self.config.tiers and not self.closed:
                self._tiers = SharedTiers(self.config.tiers, self.store.codec)
                if not self.store.readonly and self.store.get_meta("tiers") is None:
                    self.write_behind.keep(lambda: self.store.put_meta("tiers", True))
            return self._tiers

    @property
    def collection(self) -> QdrantCollection:
        """The vectors in Qdrant of an index whose `ragkv.toml` names one, connected at the first use."""
        with self._lock:
            if self._collection is None:
                self.require_open()
                name = self.store.get_meta("qdrant")
                if not isinstance(name, str):
                    if self.store.readonly:
                        raise RetrievalError("Nothing of this index is in Qdrant yet: run ragkv repair on it.")
                    name = secrets.token_hex(16)
                    self.store.put_meta("qdrant", name)
                self._collection = QdrantCollection(self.config.qdrant, name)
            return self._collection

    @property
    def dropped_proposals(self) -> int:
        """How many chunks that Qdrant proposed were dropped, because the index does not hold or show them."""
        return 0 if self._collection is None else self._collection.dropped

    def fetch(self, identities: Sequence[KVIdentity]) -> Fetched:
        """The KV among these that a shared tier delivers within the time that encoding it would take."""
        if not identities or (tiers := self.tiers) is None:
            return {}
        return tiers.fetch(identities, shape=self.shape, seconds_per_token=self.store.ledger().seconds_per_token)

    def offer(self, made: Sequence[tuple[KVIdentity, ChunkKV]], *, patient: bool = True) -> None:
        """Write new KV to the shared tiers, in a thread of theirs (`SharedTiers.offer`)."""
        if made and (tiers := self.tiers) is not None:
            tiers.offer(made, patient=patient)

    @property
    def derived(self) -> Path:
        """The folder of the retrieval indexes, which are derived from the store and may be deleted at any time."""
        return self.folder / "derived"

    @property
    def model(self) -> LanguageModel:
        """The generation model, loaded once and self-checked."""

        def load() -> LanguageModel:
            started = time.perf_counter()
            model = load_language_model(self.config, self.device)
            logger.info("loaded %s in %.1f s", self.config.model, time.perf_counter() - started)
            return model

        with self._lock:
            if self._model is None and (self.vllm is not None or self.config.executor == VLLM):
                from ragkv.runtime.vllm import EncodingServer, ServedModel, VLLMServer

                checkpoint, model = resolve(self.config.model), None
                if self.config.executor == VLLM:
                    model = EncodingServer(checkpoint, VLLMServer(require_vllm(self.vllm)), self.derived)
                self._model = cast("LanguageModel", model or ServedModel(checkpoint, load))
            self._model = self._model or load()
            return self._model

    def share_model(self, other: Index) -> None:
        """Use the model loaded by another index if this index has the same one."""
        asked = [
            (each.model, each.dtype, each.executor, each.codec if each.executor == LLAMA_CPP else "", index.device)
            for index in (self, other)
            for each in (index.config,)
        ]
        if asked[0] != asked[1] or self.vllm != other.vllm or other.loaded_model is None:
            return
        if not resolve(self.config.model).local or self.fingerprint == other.fingerprint:
            self._model = other.loaded_model

    @property
    def runtime(self) -> Runtime:
        """The runtime that answers the questions of all threads."""
        from ragkv.runtime import runtime_of

        with self._lock:
            if self._runtime is None and self.vllm is not None:
                from ragkv.runtime.vllm import VLLMRuntime

                name = str(self.folder.resolve())
                self._runtime = VLLMRuntime(self.model, self.vllm, fingerprint=self.fingerprint, index=name)
            if self._runtime is None:
                self._runtime = runtime_of(self.model, runtime_limits(self.model, self.config, self.limits))
                self.store.spare(self._runtime.pool.holds)
                if self.closed:  # meanwhile
                    self._runtime.close(self, self._interrupted)
            return self._runtime

    def close(self) -> None:
        """End the running answers (AnswerInterruptedError), then close the store."""
        self.closed = True
        if self._runtime is not None:
            self._runtime.close(self, self._interrupted)
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join()
        self.write_behind.close()
        if self._tiers is not None:
            self._tiers.close()
        if self._collection is not None:
            self._collection.close()
        self.store.close()

    def require_open(self) -> None:
        """AnswerInterruptedError if the index has been closed; for work that began before."""
        if self.closed:
            raise AnswerInterruptedError(self._interrupted)

    @property
    def _interrupted(self) -> str:
        return f"The index at {self.folder} was closed before the answer was finished."

    def start_thread(self, work: Callable[[], object], *, name: str) -> threading.Thread:
        """Start a thread that `close` joins, so that none outlives the index."""

        def run() -> None:
            try:
                work()
            finally:
                self._threads.discard(thread)

        thread = threading.Thread(target=run, name=name)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.discard(thread)
            raise
        return thread

    def open_budget(self) -> None:
        """Set the store's budget from `ragkv.toml`, which may have been edited since the index was opened."""
        if not self._budgeted:
            self._budgeted = True
            self.store.set_budget(load_config(self.folder).budget)

    @property
    def loaded_model(self) -> LanguageModel | None:
        """The model if it is loaded, else None; never loads it."""
        return self._model

    @cached_property
    def fingerprint(self) -> str:
        """The model's current fingerprint; a local checkpoint is hashed without loading it."""
        if self.config.executor == VLLM:
            return cast("str", self.model.fingerprint)  # type: ignore[attr-defined]
        return fingerprint_of(self.config, self.device, lambda: self.model.revision)

    @cached_property
    def cut_by(self) -> str:
        """The fingerprint of what cuts texts into tokens; another build of llama.cpp or vLLM cuts in the same way."""
        if self.config.executor != TRANSFORMERS:
            revision = self.model.revision if self.config.executor == VLLM else None
            return resolve(self.config.model).fingerprint_of(self.config.executor, revision)
        return self.fingerprint

    @cached_property
    def prompt(self) -> Prompt:
        """The parts of the prompt, stored in the index and made again when the model or `[prompt]` changes."""
        wanted = {"model": self.fingerprint, "config": self.config.prompt.facts()}
        stored = self._kept_prompt()
        if stored is not None and {k: stored.get(k) for k in wanted} == wanted:
            return Prompt(**stored["parts"])
        dated: dict[str, str] = {}
        if self.model.tokens.dated:
            # a changed [prompt] keeps the date: the prefix prints it, and with another one all stored KV is a miss
            same = stored is not None and stored["model"] == self.fingerprint
            dated["date"] = (same and stored.get("date")) or date.today().isoformat()
        today = datetime.fromisoformat(dated["date"]) if dated else None
        prompt = render(self.config.prompt, self.model.tokens, today=today)
        # `gc` has no model; these ids identify the prefix in use
        ids = prompt.prefix_ids(self.model.tokens)
        self.write_behind.keep(
            lambda: self.store.put_meta("prompt", {**wanted, **dated, "parts": prompt.facts(), "prefix_ids": ids})
        )
        return prompt

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """The token ids of the prompt's prefix, stored with the prompt, so that they do not need the model."""
        prompt, kept = self.prompt, self._kept_prompt()
        if kept is not None and kept["model"] == self.fingerprint and kept["parts"] == prompt.facts():
            return tuple(kept["prefix_ids"])
        return prompt.prefix_ids(self.model.tokens)

    def _kept_prompt(self) -> Any:
        """The stored prompt; None if it is damaged, so that it is made again."""
        try:
            return read_metadata(self.store, "prompt")
        except CorruptStoreError as error:
            logger.warning("the prompt is made again: %s", error)
            return None

    @cached_property
    def shape(self) -> KVShape:
        """The shape of the model's KV, found by encoding one token, because an index cannot be trusted.

        It is recorded in the store for `verify`, which has no model.
        """
        shape = self.model.kv_shape
        if not self.store.keeps_shape(self.fingerprint, shape):
            self.write_behind.keep(lambda: self.store.keep_shape(self.fingerprint, shape))
        return shape

    def stored_bytes(self, tokens: int) -> int:
        """An upper estimate of the bytes on disk of the KV of `tokens` tokens."""
        return self.store.codec.most_bytes(self.shape, tokens)

    def has_tokens(self, ids: Sequence[int]) -> bool:
        """Whether there are token ids, and all are in the model's embedding table."""
        return bool(ids) and max(ids) < self.model.config.vocab_size

    def require_known_tokens(self, scored: Sequence[ScoredChunk]) -> None:
        """CorruptStoreError for token ids outside the embedding table; the index may be untrusted."""
        named = [(f"chunk {each.chunk.chunk_id!r}", each.chunk.token_ids) for each in scored]
        for what, ids in (*named, ("the prompt", (*self.prefix_ids, 0))):
            if not self.has_tokens(ids):
                raise CorruptStoreError(
                    f"{what} of the index at {self.folder} holds no tokens, or tokens that its model does not have: "
                    "delete its document, or ingest into a new index"
                )

    def require_room_for_context(self) -> None:
        """ConfigError if a chunk and what it sees of its document could need more positions than the model has."""
        model, config = self.model, self.config
        if Encoding.CONTEXT not in self.encodings:
            return
        needed = len(self.prefix_ids) + LINE_TOKENS + config.encoding.context + config.chunk_tokens
        most = min((most for most in (model.max_positions, model.moves_within) if most is not None), default=needed)
        if needed > most:
            raise ConfigError(
                f"[encoding] context = {config.encoding.context} makes chunks of the index at {self.folder} need "
                f"{needed} positions, but model {model.checkpoint.name!r} has {most}; lower it by {needed - most}."
            )

    @property
    def encodings(self) -> Sequence[Encoding]:
        """The encodings to store so that the configured engines never miss."""
        from ragkv.engines import make_engine

        config = self.config
        engines = [make_engine(name, config.tuning, context=config.encoding.context) for name in config.engines]
        found = {engine.reads for engine in engines if not engine.whole_documents}
        return sorted(encoding for encoding in found if encoding is not None)

    @property
    def blocks(self) -> APBConfig | None:
        """How an ingest cuts long documents into blocks; None if it stores no blocks."""
        from ragkv.engines import engine_class, make_engine

        found = [name for name in self.config.engines if engine_class(name).whole_documents]
        config: APBConfig | None = make_engine(found[0], self.config.tuning).config if found else None
        return config

    @property
    def recipe(self) -> IngestFingerprint:
        """The fingerprint of an ingest with the current model and settings."""
        embedder = self.encoders.fingerprint
        return IngestFingerprint(
            model=self.fingerprint,
            prompt=self.prompt,
            chunk_tokens=self.config.chunk_tokens,
            codec=self.config.codec,
            encodings=tuple(sorted(self.encodings)),
            embedder=embedder,
            vectors=() if embedder is None else tuple(sorted(self.config.vectors)),
            blocks=None if self.blocks is None else asdict(self.blocks),
            context=self.config.encoding.context if Encoding.CONTEXT in self.encodings else 0,
        )

    def record_provenance(self) -> None:
        """Record in the store which model and embedder made its content.

        While documents of another model or embedder remain, the old names stay.
        """
        makers: dict[str, dict[str, str]] = {"model": {"name": self.config.model, "fingerprint": self.cut_by}}
        if (embedder := self.encoders.fingerprint) is not None:
            name = self.config.embedder
            makers[EMBEDDER] = {"name": name, "fingerprint": embedder, "stamp": embedder_stamp(name)}
        recorded = {kind: read_metadata(self.store, kind) for kind in makers}
        if any(
            recorded[kind] and recorded[kind]["fingerprint"] != maker["fingerprint"] for kind, maker in makers.items()
        ):
            digest = self.recipe.digest()
            if any(stored.recipe != digest for stored in self.store.documents()):
                return
        for kind, maker in makers.items():
            if recorded[kind] != maker:
                self.store.put_meta(kind, maker)

    def require_same_model(self) -> None:
        """KVMismatchError if another version of the model cut and encoded the chunks.

        The new model is recorded only after the last document was ingested again: it cannot read another model's
        tokens.
        """
        made = read_metadata(self.store, "model")
        if made is not None and made["fingerprint"] != self.cut_by:
            raise KVMismatchError(
                f"The index at {self.folder} was made by another version of model {self.config.model!r} than the one "
                "there now; run ragkv ingest on all of its documents again, or put the model back."
            )
