"""An encoder's checkpoint: where its files are, what their layout is, and the fingerprint of its vectors.

Nothing here loads a model, because an ingest that changes nothing only needs the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from ragkv.boundary.visible import first_sentence
from ragkv.errors import ConfigError, ModelLoadError
from ragkv.mini import embedder_path, reranker_path
from ragkv.model.checkpoint import DESCRIPTIONS, WEIGHTS, digest_files, require_on_hub, resolve

__all__ = ["HEADS", "UNLIMITED", "Folder", "Layout", "find_embedder", "locate_embedder", "locate_reranker"]

logger = logging.getLogger(__name__)

Layout = Literal["bge-m3", "sentence-transformers", "cross-encoder"]

HEADS = ("colbert_linear.pt", "sparse_linear.pt")
_ATTENTION = "attn_implementation"
_ATTENTIONS = frozenset({"eager", "sdpa", "flex_attention", *(f"flash_attention_{version}" for version in range(2, 5))})
_MODULES = "modules.json"
_PACKAGE = "sentence_transformers."
_VERSION = 1  # raised when ragkv's own code changes a vector
_UNUSED = ("onnx/*", "openvino/*", "imgs/*", "*.onnx", "*.onnx_data", "*.msgpack", "*.ot", "*.h5", "*.gguf")
_IRRELEVANT = {"trainer_state.json"}
_OFFSET = {"camembert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"}  # positions count from pad_token_id + 1
UNLIMITED = 1 << 20
"""The length limit of a model that reads texts of any length; tokenizers without a limit say 1e30."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """An encoder's checkpoint on this machine. `name` is as the user gave it; `commit` is set if it is from the hub."""

    name: str
    path: Path
    layout: Layout
    commit: str | None = None

    def max_tokens(self, wanted: int | None) -> int:
        """The length limit to run with, including special tokens: `wanted`, or all that the checkpoint supports.

        ConfigError when that is less than `wanted`, because nothing would find what is cut off a chunk.
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
        """What identifies the model's vectors. A local folder is read in full (about 1.7 GB/s), once per process."""
        if self.commit is not None:
            content = f"hub:{self.name}@{self.commit}"
        else:
            content = _digest(self.path, self.files(), self.stamp(max_tokens))
        facts = f"{content}:{self.layout}:{max_tokens}:{_VERSION}"
        return hashlib.sha256(facts.encode()).hexdigest()

    def stamp(self, max_tokens: int) -> str:
        """A digest of the files' sizes, inodes and times, which changes whenever `fingerprint` may have changed.

        The caller stores it beside a fingerprint, and need not read the files while the stamp is the same.
        """
        facts = [self.layout, self.commit or "", str(max_tokens), str(_VERSION)]
        for file in self.files() if self.commit is None else ():
            stat = file.stat()
            name = file.relative_to(self.path).as_posix()
            facts.append(f"{name}:{stat.st_size}:{stat.st_ino}:{stat.st_mtime_ns}:{stat.st_ctime_ns}")
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()

    def files(self) -> tuple[Path, ...]:
        """The files that a vector can depend on, in a fixed order: weights, heads, configuration, tokenizer."""
        folders = [self.path]
        if self.layout == "sentence-transformers":
            folders += [self.path / m["path"] for m in _module_list(self.path) if m.get("path")]
        found: set[Path] = {self.path / head for head in HEADS if self.layout == "bge-m3"}
        for folder in folders:
            found.update(file for pattern in WEIGHTS for file in folder.glob(pattern))
            if folder.is_dir():
                found.update(f for f in folder.iterdir() if f.suffix in DESCRIPTIONS and f.name not in _IRRELEVANT)
        return tuple(sorted(found))

    def _encoder(self) -> Path:
        """The folder of the transformer itself, which in older sentence-transformers folders is not the top one."""
        if self.layout == "sentence-transformers" and (modules := _module_list(self.path)):
            return self.path / str(modules[0].get("path", ""))
        return self.path

    def _positions(self) -> int | None:
        """How many tokens the position table has; None if positions are relative, or rotary without a limit."""
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
        """The limits that the checkpoint's authors recommend."""
        folder = self._encoder()
        own = [(file, "max_seq_length") for file in sorted(folder.glob("sentence_*_config.json"))]
        places = [*own, (folder / "tokenizer_config.json", "model_max_length")]
        found = [_read(file).get(key) for file, key in places if file.exists()]
        return [limit for limit in found if isinstance(limit, int) and 0 < limit < UNLIMITED]


def locate_embedder(name: str) -> Folder:
    """The checkpoint of the embedder `name`: "mini", a folder, or a hub id, which is downloaded.

    ModelLoadError when there is none, or when it lacks a file without which its vectors would be noise.
    """
    return _locate(name, embedder_path, _embedder_layout)


def find_embedder(name: str) -> Folder | None:
    """As `locate_embedder`; None if it is not on this machine, and would be downloaded."""
    checkpoint = resolve(name, bundled=embedder_path, marks=("config.json", _MODULES))
    return locate_embedder(name) if checkpoint.local or _snapshot(name, offline=True) is not None else None


def locate_reranker(name: str) -> Folder:
    """As `locate_embedder`, for a cross-encoder."""
    return _locate(name, reranker_path, _reranker_layout)


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
    made = _read(folder / "config.json").get("architectures") or []
    if not any(str(kind).endswith("ForSequenceClassification") for kind in made):
        raise ModelLoadError(
            f"Reranker {name!r} has no classification head (architectures: {', '.join(map(str, made)) or 'none'}); "
            "give a cross-encoder such as BAAI/bge-reranker-v2-m3."
        )
    return "cross-encoder"


def _locate(name: str, bundled: Callable[[], Path], layout: Callable[[Path, str], Layout]) -> Folder:
    checkpoint = resolve(name, bundled=bundled, marks=("config.json", _MODULES))
    if checkpoint.local:
        return _judged(name, Path(checkpoint.location), layout, commit=None)
    # Use what was fetched before, so that an index does not change its embedder because the hub has a newer one.
    cached = _snapshot(name, offline=True)
    if cached is not None:
        try:
            return _judged(name, cached, layout, commit=cached.name)
        except ModelLoadError as error:
            logger.info("fetching %s again: %s", name, error)  # perhaps an earlier download was interrupted
    if cached is None:
        require_on_hub(name)
    fetched = _snapshot(name, offline=False)
    assert fetched is not None
    return _judged(name, fetched, layout, commit=fetched.name)


def _judged(name: str, path: Path, layout: Callable[[Path, str], Layout], *, commit: str | None) -> Folder:
    found = Folder(name=name, path=path, layout=layout(path, name), commit=commit)
    if not any(file.match(pattern) for file in found.files() for pattern in WEIGHTS):
        raise ModelLoadError(f"No weights (*.safetensors) in model folder {path}.")
    for config in {*found.files(), *path.glob("*config.json")}:
        if config.name.endswith("config.json"):
            _require_known_attention(_json(config), name)
    return found


def _require_known_attention(config: Any, name: str) -> None:
    """Refuse an attention that transformers would fetch from the hub and run, wherever in `config` it is named."""
    waiting: list[dict[Any, Any]] = [{"": config}]
    while waiting:
        for key, value in waiting.pop().items():
            if isinstance(value, str) and str(key).endswith(_ATTENTION) and value not in _ATTENTIONS:
                raise ModelLoadError(
                    f"Model {name!r} wants to run code from the hub as its attention ({value}), which ragkv never "
                    f"does; remove {key} from its configuration."
                )
            if isinstance(value, dict | list):
                # An attention may be a dictionary, with one for each part of the model.
                named = isinstance(value, dict) and str(key).endswith(_ATTENTION)
                parts: list[tuple[Any, Any]] = list(value.items() if isinstance(value, dict) else enumerate(value))
                waiting.append({f"{part}.{key}" if named else part: each for part, each in parts})


def _snapshot(name: str, *, offline: bool) -> Path | None:
    """The model's folder in the hub's local cache, without files for other frameworks; None if absent and offline."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=offline, ignore_patterns=list(_UNUSED)))
    except Exception as error:  # the client's errors have no common base, and differ between its versions
        if offline:
            return None
        raise ModelLoadError(
            f"Model {name!r} is not a folder here and cannot be fetched from the hub: {first_sentence(error)}. "
            "Check the name, or download it where there is a network and give the folder."
        ) from error


@lru_cache(maxsize=32)
def _digest(folder: Path, files: tuple[Path, ...], stamp: str) -> str:
    """The files' digest; they are read again when `stamp` differs."""
    return digest_files(folder, files)


def _module_list(folder: Path) -> list[dict[str, Any]]:
    found = _json(folder / _MODULES)
    if not (isinstance(found, list) and all(isinstance(module, dict) for module in found)):
        raise ModelLoadError(f"{folder / _MODULES} must hold a list of modules; fetch the model again.")
    for module in found:
        where = Path(str(module.get("path", "")))
        if where.is_absolute() or ".." in where.parts:
            raise ModelLoadError(f"{folder / _MODULES} names a module outside its own folder ({where}).")
    return found


def _require_known_modules(folder: Path, name: str) -> None:
    """Refuse modules that are not sentence-transformers' own, because it would import them and run their code.

    Versions before 6 do so for every local folder, even with `trust_remote_code=False`.
    """
    modules = _module_list(folder)
    kinds = [module.get("type") for module in modules]
    for place in {folder, *(folder / str(module.get("path", "")) for module in modules)}:
        if (router := place / "router_config.json").exists():
            kinds += list((_read(router).get("types") or {}).values())
        for config in place.glob("*config.json"):
            tokenizer = _read(config).get("tokenizer_class")
            kinds += [tokenizer] if isinstance(tokenizer, str) and "." in tokenizer else []
    for kind in kinds:
        if not (isinstance(kind, str) and kind.startswith(_PACKAGE)):
            raise ModelLoadError(
                f"Embedder {name!r} wants to run Python code of its own ({kind}), which ragkv never does; give a model "
                "whose modules are sentence-transformers' own."
            )


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
