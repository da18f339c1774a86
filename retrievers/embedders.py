"""Embedding models: any sentence-transformers model, and bge-m3 with its dense, sparse and ColBERT vectors.

A checkpoint's layout and fingerprint are read without loading the model, because an ingest that changes nothing only
needs the fingerprint.

A name is "mini", "minilm", a folder, a hub id, or a plug-in's. Your own package adds some under the entry-point groups
`ragkv.embedders` and `ragkv.rerankers`: a name, and a callable that takes `device` and `max_tokens` and returns an
`Embedder` or a `Reranker`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import ConfigError, MissingExtraError, ModelLoadError, RetrievalError, extra
from ragkv.mini import embedder_path, reranker_path
from ragkv.model.checkpoint import DESCRIPTIONS, WEIGHTS, digest_files, pick_device, require_on_hub, resolve
from ragkv.model.prompt import harden, readable
from ragkv.retrievers.base import Embedder, Embedding, ScoreKind
from ragkv.util.display import first_sentence
from ragkv.util.lazy import torch_if_loaded
from ragkv.util.plugins import PluginRegistry

if TYPE_CHECKING:
    import torch

    from ragkv.model.encoder import EncodedText, SentenceEncoder

logger = logging.getLogger(__name__)

Layout = Literal["bge-m3", "sentence-transformers", "cross-encoder"]

HEADS = ("colbert_linear.pt", "sparse_linear.pt")
_ATTENTION = "attn_implementation"
_ATTENTIONS = frozenset({"eager", "sdpa", "flex_attention", *(f"flash_attention_{version}" for version in range(2, 5))})
_MODULES = "modules.json"
_PACKAGE = "sentence_transformers."
_VERSION = 1  # raised when ragkv's own code changes a vector
_UNUSED = ("onnx/*", "openvino/*", "imgs/*", "*.onnx", "*.onnx_data", "*.msgpack", "*.ot", "*.h5", "*.gguf")
_CONFIGS = {
    *("config.json", "config_sentence_transformers.json", "tokenizer_config.json", "adapter_config.json"),
    *("generation_config.json", "processor_config.json", "preprocessor_config.json", "router_config.json"),
}
"""What transformers and sentence-transformers read in a model's folders, besides `sentence_*_config.json`."""
_IRRELEVANT = {"trainer_state.json", "data_config.json"}
_OFFSET = {"camembert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"}  # positions count from pad_token_id + 1
BATCH = 32
"""The most texts, or pairs of question and text, in one forward pass."""
UNLIMITED = 1 << 20
"""The limit of a model without one; tokenizers without a limit have 1e30."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """An encoder's local checkpoint. `name` is what the user gave; `commit` is set if it is from the hub."""

    name: str
    path: Path
    layout: Layout
    commit: str | None = None

    def max_tokens(self, wanted: int | None) -> int:
        """The length limit including special tokens: `wanted`, or the checkpoint's own.

        ConfigError if the checkpoint supports fewer, because the rest of a chunk could never be found.
        """
        positions = self._positions()
        if wanted is None:
            stated = [limit for limit in (positions, *self._stated()) if limit is not None]
            if not stated and self.layout == "sentence-transformers":
                return UNLIMITED  # static vectors, relative positions
            if not stated:
                raise ConfigError(f"Model {self.name!r} states no length limit; give max_tokens.")
            return min(stated)
        if wanted < 8:
            raise ConfigError(f"max_tokens of {self.name!r} must be at least 8, not {wanted}.")
        if positions is not None and wanted > positions:
            raise ConfigError(
                f"Model {self.name!r} reads at most {positions} tokens, not {wanted}; make chunks shorter, lower "
                "max_tokens or choose a model with more positions."
            )
        return wanted

    def fingerprint(self, max_tokens: int) -> str:
        """A digest that identifies the model's vectors. A local folder is read in full (about 1.7 GB/s), once per
        process."""
        if self.commit is not None:
            content = f"hub:{self.name}@{self.commit}"
        else:
            content = _digest(self.path, self.files(), self.stamp(max_tokens))
        facts = f"{content}:{self.layout}:{max_tokens}:{_VERSION}"
        return hashlib.sha256(facts.encode()).hexdigest()

    def stamp(self, max_tokens: int) -> str:
        """A digest of the files' sizes, inodes and times, which changes whenever `fingerprint` may have changed.

        The caller stores it with a fingerprint and skips reading the files while the stamp is unchanged.
        """
        facts = [self.layout, self.commit or "", str(max_tokens), str(_VERSION)]
        for file in self.files() if self.commit is None else ():
            stat = file.stat()
            name = file.relative_to(self.path).as_posix()
            facts.append(f"{name}:{stat.st_size}:{stat.st_ino}:{stat.st_mtime_ns}:{stat.st_ctime_ns}")
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()

    def files(self) -> tuple[Path, ...]:
        """The files that vectors depend on, in a fixed order: weights, heads, configuration, tokenizer."""
        folders = [self.path]
        if self.layout == "sentence-transformers":
            folders += [self.path / m["path"] for m in _module_list(self.path) if m.get("path")]
        paths: set[Path] = {self.path / head for head in HEADS if self.layout == "bge-m3"}
        for folder in folders:
            paths.update(file for pattern in WEIGHTS for file in folder.glob(pattern))
            if folder.is_dir():
                paths.update(f for f in folder.iterdir() if f.suffix in DESCRIPTIONS and f.name not in _IRRELEVANT)
        return tuple(sorted(paths))

    def _encoder(self) -> Path:
        """The transformer's folder, which is a subfolder in older sentence-transformers checkpoints."""
        if self.layout == "sentence-transformers" and (modules := _module_list(self.path)):
            return self.path / str(modules[0].get("path", ""))
        return self.path

    def _positions(self) -> int | None:
        """The size of the position table; None if positions are relative, or rotary without a limit."""
        path = self._encoder() / "config.json"
        if self.layout == "sentence-transformers" and not path.exists():
            return None  # static vectors have no transformer
        config = _read(path)
        positions = config.get("max_position_embeddings")
        if not isinstance(positions, int):
            return None
        pad = config.get("pad_token_id")
        return positions - (pad + 1 if config.get("model_type") in _OFFSET and isinstance(pad, int) else 0)

    def _stated(self) -> list[int]:
        """The limits recommended by the checkpoint's authors."""
        folder = self._encoder()
        own = [(file, "max_seq_length") for file in sorted(folder.glob("sentence_*_config.json"))]
        places = [*own, (folder / "tokenizer_config.json", "model_max_length")]
        found = [_read(file).get(key) for file, key in places if file.exists()]
        return [limit for limit in found if isinstance(limit, int) and 0 < limit < UNLIMITED]


Role = Literal["embedder", "reranker"]


def find(name: str, role: Role) -> Folder | None:
    """Like `locate`, but None if the checkpoint would have to be downloaded."""
    checkpoint = resolve(name, bundled=_bundled(role), marks=("config.json", _MODULES))
    return locate(name, role) if checkpoint.local or _snapshot(checkpoint.location, offline=True) is not None else None


def locate(name: str, role: Role) -> Folder:
    """The checkpoint called `name`: "mini", "minilm", a folder, or a hub id, which is downloaded.

    ModelLoadError if there is none, or if a file is missing without which its vectors or scores would be noise.
    """
    checkpoint = resolve(name, bundled=_bundled(role), marks=("config.json", _MODULES))
    if checkpoint.local:
        return _judged(name, Path(checkpoint.location), role, commit=None)
    # Prefer the cached version, so that a newer one on the hub does not change the embedder of an index.
    hub = checkpoint.location
    cached = _snapshot(hub, offline=True)
    if cached is not None:
        try:
            return _judged(name, cached, role, commit=cached.name)
        except ModelLoadError as error:
            logger.info("fetching %s again: %s", name, error)  # perhaps an earlier download was interrupted
    else:
        require_on_hub(hub)
    fetched = _snapshot(hub, offline=False)
    assert fetched is not None
    return _judged(name, fetched, role, commit=fetched.name)


def _bundled(role: Role) -> Callable[[], Path]:
    return embedder_path if role == "embedder" else reranker_path


def _embedder_layout(folder: Path, name: str) -> Layout:
    absent = [head for head in HEADS if not (folder / head).exists()]
    if len(absent) == len(HEADS) and (folder / _MODULES).exists():
        _require_known_modules(folder, name)
        return "sentence-transformers"
    if absent:
        # FlagEmbedding would initialise both heads at random, without a warning.
        raise ModelLoadError(
            f"Embedder {name!r} lacks {' and '.join(absent)}, without which its sparse and ColBERT vectors are noise; "
            "put the file beside config.json (bge-m3's layout), or give a sentence-transformers model (modules.json)."
        )
    return "bge-m3"


def _reranker_layout(folder: Path, name: str) -> Layout:
    kinds = [str(kind) for kind in _read(folder / "config.json").get("architectures") or []]
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise ModelLoadError(
            f"Reranker {name!r} has no classification head (architectures: {', '.join(kinds) or 'none'}); "
            "give a cross-encoder such as BAAI/bge-reranker-v2-m3."
        )
    return "cross-encoder"


def _judged(name: str, path: Path, role: Role, *, commit: str | None) -> Folder:
    layout = _embedder_layout(path, name) if role == "embedder" else _reranker_layout(path, name)
    candidate = Folder(name=name, path=path, layout=layout, commit=commit)
    if not any(file.match(pattern) for file in candidate.files() for pattern in WEIGHTS):
        raise ModelLoadError(f"No weights (*.safetensors) in model folder {path}.")
    for config in {*candidate.files(), *_configs(path)}:
        if config in _configs(config.parent):
            _require_known_attention(_json(config), name)
    return candidate


def _require_known_attention(config: Any, name: str) -> None:
    """Refuse an attention implementation that transformers would download and run, anywhere in `config`."""
    waiting: list[dict[Any, Any]] = [{"": config}]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, str) and str(key).endswith(_ATTENTION) and value not in _ATTENTIONS:
                raise ModelLoadError(
                    f"Model {name!r} wants to run code from the hub as its attention ({value}), which ragkv never "
                    f"does; remove {key} from its configuration."
                )
            if isinstance(value, dict | list):
                # The value may be a dictionary with one implementation for each part of the model.
                named = isinstance(value, dict) and str(key).endswith(_ATTENTION)
                parts: list[tuple[Any, Any]] = list(value.items() if isinstance(value, dict) else enumerate(value))
                waiting.append({f"{part}.{key}" if named else part: each for part, each in parts})


def _snapshot(name: str, *, offline: bool) -> Path | None:
    """The model's folder in the local hub cache, without files for other frameworks; None if absent and offline."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=offline, ignore_patterns=list(_UNUSED)))
    except Exception as error:  # the client's errors have no common base and differ between versions
        if offline:
            return None
        raise ModelLoadError(
            f"Model {name!r} is not a folder here and cannot be fetched from the hub: {first_sentence(error)}. "
            "Check the name, or download it where there is a network and give the folder."
        ) from error


@lru_cache(maxsize=32)
def _digest(folder: Path, files: tuple[Path, ...], stamp: str) -> str:
    """The digest of the files, cached until `stamp` differs."""
    return digest_files(folder, files)


def _module_list(folder: Path) -> list[dict[str, Any]]:
    modules = _json(folder / _MODULES)
    if not (isinstance(modules, list) and all(isinstance(module, dict) for module in modules)):
        raise ModelLoadError(f"{folder / _MODULES} must hold a list of modules; fetch the model again.")
    for module in modules:
        where = Path(str(module.get("path", "")))
        if where.is_absolute() or ".." in where.parts:
            raise ModelLoadError(f"{folder / _MODULES} names a module outside its own folder ({where}).")
    return modules


def _require_known_modules(folder: Path, name: str) -> None:
    """Refuse foreign modules, because sentence-transformers would import and run them.

    Versions before 6 do so for any local folder, even with `trust_remote_code=False`.
    """
    modules = _module_list(folder)
    kinds = [module.get("type") for module in modules]
    for place in {folder, *(folder / str(module.get("path", "")) for module in modules)}:
        if (router := place / "router_config.json").exists():
            kinds += list((_read(router).get("types") or {}).values())
        for config in _configs(place):
            tokenizer = _read(config).get("tokenizer_class")
            kinds += [tokenizer] if isinstance(tokenizer, str) and "." in tokenizer else []
    for kind in kinds:
        if not (isinstance(kind, str) and kind.startswith(_PACKAGE)):
            raise ModelLoadError(
                f"Embedder {name!r} wants to run Python code of its own ({kind}), which ragkv never does; give a model "
                "whose modules are sentence-transformers' own."
            )


def _configs(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*config.json"))
    return [file for file in files if file.name in _CONFIGS or file.match("sentence_*_config.json")]


def _read(path: Path) -> dict[str, Any]:
    found = _json(path)
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} must hold one JSON object; fetch the model again.")
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not readable JSON ({error}); fetch the model again.") from error


T = TypeVar("T")


class CheckpointModel:
    """A model from a checkpoint folder with its limits, a lock and its fingerprint. Subclasses load and run it."""

    def __init__(self, folder: Folder, *, max_tokens: int | None) -> None:
        """`max_tokens` as `Folder.max_tokens`."""
        self._folder = folder
        self.name = folder.name
        self.max_tokens = folder.max_tokens(max_tokens)
        self._lock = threading.Lock()  # one forward pass at a time

    @cached_property
    def fingerprint(self) -> str:
        """`Embedder.fingerprint`, computed from the files at the first use."""
        return self._folder.fingerprint(self.max_tokens)


def blank(text: str) -> bool:
    """Whether the text has nothing to embed."""
    return not text.strip()


@contextmanager
def loading(what: str, name: str) -> Iterator[None]:
    """Load a checkpoint, and turn any error of the libraries into a ModelLoadError."""
    from ragkv.model.loading import note_load, wants_code

    note_load()
    try:
        yield
    except (ConfigError, MissingExtraError, ModelLoadError):
        raise
    except RetrievalError as error:  # from the trial run
        raise ModelLoadError(str(error)) from error
    except Exception as error:  # each library raises its own errors for a broken file
        if wants_code(error):
            raise ModelLoadError(
                f"{what} {name!r} wants to run Python code of its own, which ragkv never does; give a model that "
                "transformers or sentence-transformers itself can run."
            ) from error
        raise ModelLoadError(
            f"{what} {name!r} cannot be loaded: {first_sentence(error)}. Fetch the model again."
        ) from error


def in_batches(rows: Sequence[Sequence[Any]], run: Callable[[list[int]], list[T]]) -> list[T]:
    """Call `run` with batches of at most `BATCH` row indices and return the results in row order.

    The longest rows come first, to minimise padding. Batches are halved when memory runs out. RetrievalError if a
    single row does not fit or the model fails otherwise.
    """
    done: dict[int, T] = {}
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), i))
    waiting = [order[start : start + BATCH] for start in range(0, len(order), BATCH)][::-1]
    while waiting:
        batch = waiting.pop()
        try:
            done.update(zip(batch, run(batch), strict=True))
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            short = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
            if short and len(batch) > 1:
                half = len(batch) // 2
                logger.warning("no memory for %d texts at once; continuing with %d", len(batch), half)
                waiting += [batch[half:], batch[:half]]
                continue
            remedy = "lower max_tokens" if short else "check the model with a shorter text"
            raise RetrievalError(
                f"A text of {len(rows[batch[0]])} tokens failed: {first_sentence(error)}; {remedy}."
            ) from error
    return [done[i] for i in range(len(rows))]


def require_numbers(name: str, *arrays: NDArray[np.float32] | None) -> None:
    """RetrievalError for NaN and infinity, so that a fault never becomes a stored vector or a rank."""
    if not all(array is None or np.isfinite(array).all() for array in arrays):
        raise RetrievalError(f"Model {name!r} gave infinite or undefined numbers; run it on the CPU or fetch it again.")


ALL_KINDS: frozenset[ScoreKind] = frozenset(("dense", "sparse", "colbert"))


class BGEM3(CheckpointModel):
    """The `Embedder` with dense, sparse and ColBERT vectors; `modes` limits it to some of them.

    Sparse tokens are FlagEmbedding's: the token id as a string. Every token but the first (`<s>`) has a ColBERT vector,
    including `</s>`. The model runs in fp16 on CUDA and in fp32 elsewhere; vectors are always float32 of unit length.
    """

    def __init__(
        self,
        name: str | Folder,
        *,
        device: str,
        max_tokens: int | None = None,
        modes: Collection[ScoreKind] | None = None,
    ) -> None:
        """`max_tokens` includes special tokens; None is the checkpoint's limit.

        Raises ModelLoadError, or ConfigError for more tokens than the checkpoint has positions for.
        """
        folder = locate(name, "embedder") if isinstance(name, str) else name
        self.modes: frozenset[ScoreKind] = ALL_KINDS if modes is None else frozenset(modes)
        if folder.layout != "bge-m3":
            raise ModelLoadError(
                f"Embedder {folder.name!r} has no {' and '.join(HEADS)}: it is not in bge-m3's layout."
            )
        if not self.modes or self.modes - ALL_KINDS:
            raise ConfigError(
                f"Modes of {folder.name!r} are any of {', '.join(sorted(ALL_KINDS))}, not {sorted(self.modes)}."
            )
        super().__init__(folder, max_tokens=max_tokens)
        self._load(device)

    def embed_documents(self, texts: Sequence[str]) -> Embedding:
        """The vectors of `texts`, in order. Texts are truncated to `max_tokens` with a logged warning."""
        texts = list(texts)
        rows: list[Any] = [None] * len(texts)
        filled = [i for i, text in enumerate(texts) if not blank(text)]
        with self._lock:
            tokens = self._tokenise([texts[i] for i in filled])
            kept = [(i, row) for i, row in zip(filled, tokens, strict=True) if len(row.ids) > self._tokenizer.specials]
            batches = [row for _, row in kept]
            found = in_batches([row.ids for row in batches], lambda batch: self._forward([batches[i] for i in batch]))
        for (index, _), vectors in zip(kept, found, strict=True):
            rows[index] = vectors
        nothing = self._nothing()
        rows = [nothing if row is None else row for row in rows]
        dense = None
        if "dense" in self.modes:
            dense = np.stack([row[0] for row in rows]) if rows else np.zeros((0, self._width), np.float32)
        return Embedding(
            dense=dense,
            sparse=[row[1] for row in rows] if "sparse" in self.modes else None,
            colbert=[row[2] for row in rows] if "colbert" in self.modes else None,
        )

    def embed_query(self, text: str) -> Embedding:
        """Like `embed_documents`: bge-m3 has no instruction for questions."""
        return self.embed_documents([text])

    def _load(self, device: str) -> None:
        self._device = pick_device(device)
        folder = self._folder.path
        with loading("Embedder", self.name):
            import torch

            from ragkv.model.encoder import Body, EncoderTokenizer

            dtype = torch.float16 if self._device.type == "cuda" else torch.float32
            self._body = Body(folder, f"Embedder {self.name!r}", self._device, dtype)
            self._width: int = self._body.config["hidden_size"]
            self._heads = [torch.nn.Linear(self._width, width).to(self._device, dtype) for width in (self._width, 1)]
            for head, file in zip(self._heads, HEADS, strict=True):
                head.load_state_dict(torch.load(folder / file, map_location="cpu", weights_only=True))
            self._tokenizer = EncoderTokenizer(folder, self.max_tokens)
            self._forward(self._tokenise(["What is the capital of France?"]))  # a broken model fails now

    def _tokenise(self, texts: list[str]) -> list[EncodedText]:
        rows = self._tokenizer([readable(text) for text in texts])
        if cut := sum(row.cut for row in rows):
            logger.warning("%d of %d texts cut off after %d tokens for embedding", cut, len(texts), self.max_tokens)
        return rows

    def _forward(self, rows: list[EncodedText]) -> list[tuple[Any, dict[str, float] | None, Any]]:
        """(dense, sparse, colbert) for each row; None for kinds outside `modes`."""
        import torch
        from torch.nn.functional import normalize

        with torch.inference_mode():
            hidden = self._body(self._body.batch(rows))
            colbert_head, sparse_head = self._heads
            # normalised in float32: in fp16 the rows are only approximately of unit length
            dense = normalize(hidden[:, 0].float(), dim=-1).cpu().numpy() if "dense" in self.modes else None
            weights = colbert = None
            if "sparse" in self.modes:
                weights = sparse_head(hidden).squeeze(-1).relu().float().cpu().numpy()
            if "colbert" in self.modes:
                colbert = normalize(colbert_head(hidden[:, 1:]).float(), dim=-1).cpu().numpy()
        require_numbers(self.name, dense, colbert, weights)
        return [
            (
                None if dense is None else dense[place],
                None if weights is None else self._lexical(row.ids, weights[place]),
                None if colbert is None else colbert[place, : len(row.ids) - 1].copy(),  # a view would keep the batch
            )
            for place, row in enumerate(rows)
        ]

    def _lexical(self, tokens: list[int], weights: NDArray[np.float32]) -> dict[str, float]:
        """The maximum weight of each ordinary token (bge-m3 §3.1: repeated terms count once)."""
        best: dict[str, float] = {}
        for token, weight in zip(tokens, weights.tolist(), strict=False):  # without the padding
            if weight > 0 and token not in self._tokenizer.special_ids and weight > best.get(key := str(token), 0.0):
                best[key] = weight
        return best

    def _nothing(self) -> tuple[Any, dict[str, float], Any]:
        """The vectors of an empty text, which is never the best match."""
        return np.zeros(self._width, np.float32), {}, np.zeros((0, self._width), np.float32)


class SentenceEmbedder(CheckpointModel):
    """The `Embedder` for folders with `modules.json`, with the prompts before questions and documents that it names.

    A transformer with pooling, dense layers and normalisation is computed as sentence-transformers does, BERT and
    RoBERTa in bfloat16 on a processor that has units for it; other models by that library itself. In a process that has
    not loaded torch, questions to BERT and RoBERTa are computed with numpy.
    """

    modes: frozenset[ScoreKind] = frozenset(("dense",))

    def __init__(self, name: str | Folder, *, device: str, max_tokens: int | None = None) -> None:
        """`max_tokens` includes special tokens and the prompt; None is the authors' recommendation.

        Raises ModelLoadError, or ConfigError for more tokens than the model has positions for.
        """
        folder = locate(name, "embedder") if isinstance(name, str) else name
        if folder.layout != "sentence-transformers":
            raise ModelLoadError(
                f"Embedder {folder.name!r} has no modules.json: it is not a sentence-transformers model."
            )
        super().__init__(folder, max_tokens=max_tokens)
        self._load(device)

    def embed_documents(self, texts: Sequence[str]) -> Embedding:
        """Unit vectors of `texts`, in order."""
        return self._embed(texts, question=False)

    def embed_query(self, text: str) -> Embedding:
        """The unit vector of a question."""
        return self._embed([text], question=True)

    def _load(self, device: str) -> None:
        self._device = device
        with loading("Embedder", self.name):
            probe = self._encode(["What is the capital of France?"], question=True)  # a broken model fails now
            self._width: int = probe.shape[1]
            require_numbers(self.name, probe)

    @cached_property
    def _encoder(self) -> SentenceEncoder | LibraryEncoder:
        from ragkv.model.encoder import NotComputedHereError

        place = pick_device(self._device)
        with loading("Embedder", self.name):
            try:
                return self._own(place)
            except NotComputedHereError:
                return LibraryEncoder(self._folder, self.max_tokens, place)

    @cached_property
    def _numpy_encoder(self) -> SentenceEncoder | None:
        """It needs no torch, and computes a question in float32; None for a model or a device that needs torch."""
        from ragkv.model.encoder import NotComputedHereError

        with suppress(NotComputedHereError):
            return self._own(None) if self._device in ("auto", "cpu") else None
        return None

    def _own(self, device: torch.device | None) -> SentenceEncoder:
        """NotComputedHereError for a module or a setting that only sentence-transformers knows."""
        from ragkv.model.encoder import NotComputedHereError, SentenceEncoder

        modules = _module_list(self._folder.path)
        if str(modules[-1]["type"]).endswith(".Normalize"):  # vectors always get unit length
            modules.pop()
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        folders = [self._folder.path / str(module.get("path", "")) for module in modules]
        own: dict[str, Any] = {}
        for file in sorted(folders[0].glob("sentence_*_config.json")):
            own |= _read(file)
        if (
            kinds != ["Transformer", "Pooling", *["Dense"] * (len(kinds) - 2)]
            or own.get("transformer_task", "feature-extraction") != "feature-extraction"
            or (folders[0] / "adapter_config.json").exists()
        ):
            raise NotComputedHereError
        file = self._folder.path / "config_sentence_transformers.json"
        settings = _read(file) if file.exists() else {}
        prompts = settings.get("prompts") or {}
        usual = prompts.get(settings.get("default_prompt_name") or "", "")
        names = ("query",), ("document", "passage", "corpus")
        return SentenceEncoder(
            self.name,
            folders,
            [_read(folder / "config.json") for folder in folders],
            max_tokens=self.max_tokens,
            device=device,
            prompts=cast("Any", tuple(next((prompts[n] for n in some if n in prompts), usual) for some in names)),
            lower=bool(own.get("do_lower_case")),
        )

    def _embed(self, texts: Sequence[str], *, question: bool) -> Embedding:
        texts = list(texts)
        filled = [i for i, text in enumerate(texts) if not blank(text)]
        dense = np.zeros((len(texts), self._width), np.float32)
        if filled:
            with self._lock:
                dense[filled] = self._encode([readable(texts[i]) for i in filled], question=question)
        require_numbers(self.name, dense)
        return Embedding(dense=dense)

    def _encode(self, texts: list[str], *, question: bool) -> NDArray[np.float32]:
        if question and torch_if_loaded() is None and self._numpy_encoder is not None:
            return np.stack(self._numpy_encoder.vectors(self._numpy_encoder.tokenise(texts, question=True)))
        rows: list[Any] = self._encoder.tokenise(texts, question=question)
        vectors: list[NDArray[np.float32]] = in_batches(
            [row.ids for row in rows], lambda batch: self._encoder.vectors([rows[i] for i in batch])
        )
        return np.stack(vectors)


class LibraryEncoder:
    """A model of other modules, such as static vectors, by sentence-transformers itself, in float32 on a processor."""

    def __init__(self, folder: Folder, max_tokens: int, device: torch.device) -> None:
        from ragkv.model.loading import quiet_loading

        with extra(
            f"Embedder {folder.name!r} has modules that sentence-transformers computes", "sentence-transformers"
        ):
            from sentence_transformers import SentenceTransformer
        with quiet_loading():
            model = SentenceTransformer(
                str(folder.path), device=str(device), local_files_only=True, trust_remote_code=False
            )
        if device.type == "cpu":
            model.float()  # half precision is slow and inexact on CPUs
        own = getattr(type(model[0]), "max_seq_length", None)
        if isinstance(own, property) and own.fset is None:
            if max_tokens < UNLIMITED:
                raise ConfigError(f"Embedder {folder.name!r} reads texts of any length; leave max_tokens out.")
        elif max_tokens < UNLIMITED:
            model.max_seq_length = max_tokens
        prompts = (model.prompts or {}).values()
        tokenizer: Any = getattr(model, "tokenizer", None)
        if hasattr(tokenizer, "split_special_tokens") and not any(
            name in prompt for name in tokenizer.all_special_tokens for prompt in prompts
        ):
            harden(tokenizer)
        self._model = model.eval()

    def tokenise(self, texts: list[str], *, question: bool) -> list[_LibraryText]:
        return [_LibraryText(text, question) for text in texts]

    def vectors(self, rows: list[_LibraryText]) -> list[NDArray[np.float32]]:
        encode = self._model.encode_query if rows[0].question else self._model.encode_document
        encoded: NDArray[np.float32] = encode(
            [row.ids for row in rows], batch_size=BATCH, show_progress_bar=False, normalize_embeddings=True
        )
        return list(encoded.astype("float32", copy=False))


class _LibraryText(NamedTuple):
    ids: str
    """The text itself, whose length orders the batches."""
    question: bool


EMBEDDERS = PluginRegistry("ragkv.embedders")


def load_embedder(
    name: str, *, device: str, max_tokens: int | None = None, modes: Collection[ScoreKind] | None = None
) -> Embedder:
    """Load the embedder `name` on `device`; `modes` None means all kinds that it supports.

    `max_tokens` None is the checkpoint's limit. Raises ModelLoadError if there is no such model or it does not work,
    ConfigError if it does not support `max_tokens` or `modes`.
    """
    if name in EMBEDDERS:
        embedder: Embedder = load_plugin(EMBEDDERS, name, Embedder, device=device, max_tokens=max_tokens)
    else:
        folder = locate(name, "embedder")
        if folder.layout == "bge-m3":
            embedder = BGEM3(folder, device=device, max_tokens=max_tokens, modes=modes)
        else:
            _require_modes(name, modes, SentenceEmbedder.modes)
            embedder = SentenceEmbedder(folder, device=device, max_tokens=max_tokens)
    _require_modes(name, modes, embedder.modes)
    return embedder


def embedder_fingerprint(name: str, max_tokens: int | None = None) -> str:
    """`Embedder.fingerprint` without loading the model. A local checkpoint is read in full, once per process.

    A hub model that is not in the local cache is fetched. A plug-in's factory may have `fingerprint_for(max_tokens)`;
    otherwise the plug-in is loaded on the CPU.
    """
    if name in EMBEDDERS:
        known = getattr(_factory(EMBEDDERS, name), "fingerprint_for", None)
        if known is None:
            return load_embedder(name, device="cpu", max_tokens=max_tokens).fingerprint
        result: str = known(max_tokens)
        return result
    folder = locate(name, "embedder")
    return folder.fingerprint(folder.max_tokens(max_tokens))


def embedder_modes(name: str, *, fetch: bool = True) -> frozenset[ScoreKind] | None:
    """`Embedder.modes` without loading the model; None without `fetch` if the model has to be fetched first.

    If a plug-in's factory has no `modes`, the plug-in is loaded on the CPU.
    """
    if name in EMBEDDERS:
        known = getattr(_factory(EMBEDDERS, name), "modes", None)
        if isinstance(known, frozenset):
            return known
        return load_embedder(name, device="cpu").modes
    folder = locate(name, "embedder") if fetch else find(name, "embedder")
    if folder is None:
        return None
    return ALL_KINDS if folder.layout == "bge-m3" else SentenceEmbedder.modes


def embedder_stamp(name: str, max_tokens: int | None = None) -> str:
    """A cheap digest of the sizes and times of the embedder's files.

    Store it with a fingerprint: while the stamp is unchanged, no query has to hash the checkpoint. A plug-in's stamp
    is its fingerprint.
    """
    if name in EMBEDDERS:
        return embedder_fingerprint(name, max_tokens)
    folder = locate(name, "embedder")
    return folder.stamp(folder.max_tokens(max_tokens))


def _factory(plugins: PluginRegistry, name: str) -> Any:
    try:
        return plugins.load(name)
    except ImportError as error:
        raise ModelLoadError(f"The plug-in for {name!r} cannot be imported: {error}; install it again.") from error


def load_plugin(plugins: PluginRegistry, name: str, protocol: Any, *, device: str, **arguments: Any) -> Any:
    plugin = _factory(plugins, name)(device=str(pick_device(device)), **arguments)
    if not isinstance(plugin, protocol):
        raise ModelLoadError(
            f"The plug-in for {name!r} returned {type(plugin).__name__}, which does not implement {protocol.__name__} "
            "(ragkv.retrievers.base); correct it or choose another model."
        )
    return plugin


def _require_modes(name: str, wanted: Collection[ScoreKind] | None, given: frozenset[ScoreKind]) -> None:
    if wanted is not None and (absent := set(wanted) - given):
        raise ConfigError(
            f"Embedder {name!r} gives {', '.join(sorted(given))} vectors, not {', '.join(sorted(absent))}; choose "
            "another retrieval mode or an embedder in bge-m3's layout."
        )
