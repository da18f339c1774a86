"""Which model this is: where its files are, what it says of itself, and the fingerprint that its KV is keyed by."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.config import NONE, PromptConfig, one_of
from ragkv.errors import ModelLoadError
from ragkv.mini import lm_path

if TYPE_CHECKING:
    import torch

    from ragkv.model.quantised import Quantised

__all__ = [
    "DESCRIPTIONS",
    "HEADS",
    "MINI",
    "WEIGHTS",
    "Checkpoint",
    "digest_files",
    "lasting",
    "require_on_hub",
    "resolve",
]

MINI = "mini"
_ADAPTER_VERSION = 1  # raised when ragkv's own code changes what a chunk KV holds
_ADAPTER_VERSIONS = {"phimoe": 2, "qwen2_moe": 2}
"""Of single families (`model_type`): these two were once encoded without the windows that only their masks have."""
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
DESCRIPTIONS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_HUB_ID = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]*/)?\w([\w.-]{0,94}\w)?", re.ASCII)
_WEIGHT_FILES = (".bin", ".ckpt", ".ggml", ".gguf", ".onnx", ".pt", ".pth", ".safetensors", ".tar", ".zip")
_MARKS = ("config.json", "modules.json")
_PATIENCE = 10
"""Seconds that the hub gets to say whether it has a model; its own client tries for minutes."""
HEADS = "retaining_heads.safetensors"
"""What chooses the tokens that blocks pass on, beside the model that it was trained for (`ragkv.model.apb.heads`)."""
# read after the KV, or by nobody, or with an identity of its own
_IRRELEVANT = {"generation_config.json", "ragkv.json", "trainer_state.json", HEADS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model as the user named it (`name`) and as transformers loads it (`location`).

    `recommended` holds what the checkpoint's own `ragkv.json` says: `block_tuned`, `sink`, `chunk_tokens`,
    `bos`.
    """

    name: str
    location: str
    local: bool
    recommended: Mapping[str, Any] = field(default_factory=dict)
    file: str | None = None
    """The file of a GGUF checkpoint in the folder `location`; such a file holds everything."""

    def tuned_words(self, words: PromptConfig) -> PromptConfig:
        """`words` with the BOS policy that the checkpoint was tuned with, where they leave it open ("auto").

        ConfigError for an unknown policy in `ragkv.json`.
        """
        bos = self.recommended.get("bos", "auto")
        one_of(f"bos in ragkv.json of model {self.name!r}", bos, ("auto", "none"))
        return words if bos == "auto" else replace(words, bos=bos)

    def fingerprint(self, dtype: str, revision: str | None = None, *, device: str | None = None) -> str:
        """What KV is keyed by: weights, config, tokenizer, dtype, how packed weights are run, and the adapter's
        version, as one hex digest.

        `dtype` and `device` are the options as given, `revision` a hub model's commit. "auto" stays "auto" where it is
        the checkpoint's own dtype. A local folder is read whole (about 1.7 GB/s): a changed byte anywhere is another
        model, also in a file that ragkv does not know, unless it is known not to matter.
        """
        from ragkv.model.device import pick_device

        told, version = self.described(revision), _ADAPTER_VERSION
        version = _ADAPTER_VERSIONS.get(str(told.get("model_type", "")), version)
        place = pick_device(device)
        packed = self.quantised(place, revision)
        regime = "" if packed is None else f":{packed.regime}"
        facts = f"{self.digest(revision)}:{self.picked(dtype, place, revision)}:{version}{regime}"
        return hashlib.sha256(facts.encode()).hexdigest()

    def picked(self, dtype: str, device: torch.device, revision: str | None = None) -> str:
        """The dtype that an option means on a device.

        "auto" is the checkpoint's own, said as "auto", but float32 where that is a half type and the processor has no
        units for it. A GGUF file, whose weights are unpacked, has none of its own: float32 on a processor, else
        bfloat16.
        """
        import torch

        from ragkv.model.device import computes_in

        if dtype != "auto":
            return dtype
        if self.file is not None:
            return "float32" if device.type == "cpu" else "bfloat16"
        told = self.described(revision)
        own = next(
            (d for each in (told, _text(told)) for key in ("dtype", "torch_dtype") if (d := each.get(key))), None
        )
        known = getattr(torch, own, None) if isinstance(own, str) else None
        return dtype if not isinstance(known, torch.dtype) or computes_in(device, known) else "float32"

    def quantised(self, device: torch.device, revision: str | None = None) -> Quantised | None:
        """How packed weights are run on a device; None for ordinary ones."""
        from ragkv.model.quantised import Quantised

        if self.file is not None:
            return Quantised(method="gguf", unpacked=True)
        return Quantised.of(self.described(revision), device)

    def weight_bytes(self) -> int:
        """Bytes of the weights on the disk; 0 of a hub model that is not here yet."""
        if self.file is not None:
            return Path(self.location, self.file).stat().st_size
        return sum(f.stat().st_size for f in self._weights()) if self.local else 0

    def _weights(self) -> list[Path]:
        return sorted(f for pattern in WEIGHTS for f in Path(self.location).glob(pattern) if f.name != HEADS)

    def described(self, revision: str | None = None) -> Mapping[str, Any]:
        """What config.json says; nothing where there is none to read."""
        if self.file is not None:
            return {}
        if self.local:
            path: Any = Path(self.location, "config.json")
        else:
            from huggingface_hub import try_to_load_from_cache

            path = try_to_load_from_cache(self.location, "config.json", revision=revision)
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, TypeError, ValueError, RecursionError):  # not there, or for the loader to complain of
            return {}
        return found if isinstance(found, dict) else {}

    def digest(self, revision: str | None) -> str:
        """What the weights and descriptions of the checkpoint are, whatever it is loaded as."""
        if not self.local:
            if revision is None:
                raise ModelLoadError(
                    f"Model {self.name!r} came from the hub without a revision to know it by; "
                    "download it to a folder and give that path."
                )
            return f"hub:{self.location}@{revision}"
        folder = Path(self.location)
        if self.file is not None:
            return digest_files(folder, [folder / self.file])
        files = self._weights()
        if not files:
            raise ModelLoadError(f"No weights (*.safetensors) in model folder {folder}.")
        files += sorted(f for f in folder.iterdir() if f.suffix in DESCRIPTIONS and f.name not in _IRRELEVANT)
        return digest_files(folder, files)


def digest_files(folder: Path, files: Iterable[Path]) -> str:
    """One hex digest over the names (from `folder` down), sizes and bytes of `files`, in the order given."""
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as stream:
            total.update(f"{path.relative_to(folder).as_posix()}:{path.stat().st_size}:".encode())
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def resolve(name: str, *, bundled: Callable[[], Path] = lm_path, marks: tuple[str, ...] = _MARKS[:1]) -> Checkpoint:
    """The checkpoint that `name` means: "mini" (the folder that `bundled` tells), a folder, or a hub id.

    A folder is a checkpoint when it holds one of `marks`.
    """
    if not name.strip():
        raise ModelLoadError("The model's name is empty; give a folder in Hugging Face layout or a hub id.")
    folder = bundled() if name == MINI else _path(name)
    try:
        if folder.is_dir():
            if not any((folder / mark).exists() for mark in marks):
                raise ModelLoadError(f"Folder {folder} holds no model: {' or '.join(marks)} is missing.")
            return Checkpoint(name=name, location=str(folder), local=True, recommended=_recommended(folder))
        a_file = folder.exists()
    except OSError as error:  # no permission on the way, or a name that is too long
        raise ModelLoadError(f"The model folder {name!r} cannot be looked at: {error.strerror or error}.") from error
    if a_file and marks == _MARKS[:1] and folder.suffix.lower() == ".gguf" and folder.is_file():
        return Checkpoint(name=name, location=str(folder.parent), local=True, file=folder.name)
    if a_file:
        raise ModelLoadError(f"{name!r} is a file; give the model's folder, the one that holds config.json.")
    if name == MINI or _is_path(name):
        raise ModelLoadError(f"No model folder at {name!r}; give a folder in Hugging Face layout or a hub id.")
    return Checkpoint(name=name, location=name, local=False)


def lasting(name: str) -> str:
    """A folder or file of this machine by its whole path, which means the same everywhere; other names as given."""
    if not name.strip() or name in (MINI, NONE):
        return name
    try:
        # not resolved: a link is a name that its owner may point elsewhere
        return os.path.abspath(_path(name)) if _path(name).exists() else name  # noqa: PTH100
    except (OSError, ValueError):  # no permission on the way, or no path at all
        return name


def require_on_hub(name: str, *, revision: str | None = None) -> None:
    """Refuse a hub id that is neither in the local cache nor on a hub that answers: ModelLoadError, within seconds.

    One question that is not repeated, so that a typo, or a machine without a network, is told at once; a hub that
    answers is then asked for the files with the patience that its client has.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if any(isinstance(try_to_load_from_cache(name, mark, revision=revision), str) for mark in _MARKS):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=_PATIENCE)
    except EntryNotFoundError:  # a model all the same, of another layout
        return
    except OfflineModeIsEnabled:
        hub = "HF_HUB_OFFLINE forbids to ask the hub for it"
    except GatedRepoError:
        hub = "the hub gives it only to those who accepted its terms and are logged in"
    except RepositoryNotFoundError:
        hub = "the hub has no such model, or none that you may read"
    except Exception as error:  # the client's errors have no common base, and other ones in each of its versions
        said = str(error).strip().splitlines()
        hub = f"the hub was not reachable ({said[0].rstrip('.') if said else type(error).__name__})"
    parent = name.partition("/")[0]
    here = f" (there is a folder {parent}, without it)" if "/" in name and Path(parent).is_dir() else ""
    raise ModelLoadError(
        f"There is no model folder {name!r} here{here}, and {hub}; correct the name, or download the model where there "
        "is a network and give its folder."
    )


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~nobody/model
        return Path(name)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that is the language model's, of a model that sees or hears too."""
    found = config.get("text_config")
    return found if isinstance(found, Mapping) else {}


def _is_path(name: str) -> bool:
    """Whether a name can only be a path: `./x`, `a/b/c`, `C:\\x`, `x/`, `x.gguf`, or none that the hub would have."""
    if name.startswith((".", "/", "~")) or name.endswith(os.sep) or "\\" in name or name.count("/") > 1:
        return True
    return name.lower().endswith(_WEIGHT_FILES) or _HUB_ID.fullmatch(name) is None


def _recommended(folder: Path) -> Mapping[str, Any]:
    path = folder / "ragkv.json"
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not readable JSON ({error}).") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} must hold one JSON object.")
    return found
