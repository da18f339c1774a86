"""Opens a checkpoint with transformers and refuses what ragkv cannot run, before any weight is read where possible.

Checkpoints are not trusted. transformers would ask on stdin whether to run a checkpoint's Python code, fill missing
weights with random numbers after a warning, and allocate whatever sizes a configuration states; here each of these is
an error of one sentence. Layer types and kinds of RoPE are an allowlist, so that a new one in transformers is refused
by name until it has been checked.

A GGUF file is unpacked once: transformers takes ten seconds for what it then reads in a second. The copy, with the
adapter merged, is in the user's cache, `$XDG_CACHE_HOME/ragkv/unpacked`, under the digest of both, the dtype and
transformers' version.

A model that is larger than one device is split by layers, in order, by the memory of each device. Everything before and
after the layers is on the first device, with the token ids; an untied output matrix, often the largest of all, is on
the last.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from tokenizers import pre_tokenizers

from ragkv.errors import MissingExtraError, ModelLoadError, RagkvError, UnsupportedModelError, install_hint
from ragkv.model.checkpoint import ADAPTER, Checkpoint, Quantised, shares
from ragkv.util.files import make_folder, parse_json, read_plain, remove_tree, sync_path, user_folder, write_plain
from ragkv.util.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

logger = logging.getLogger(__name__)

_LAYERS = frozenset({"full_attention", "sliding_attention"})
_ROPES = frozenset({"default", "linear", "yarn", "llama3", "proportional"})
_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
_RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid")
_SPARSE = ("sparse", "indexed", "compressed")


def refuse_by_name(name: str, config: Any) -> None:
    """Raise UnsupportedModelError, naming model, family and reason, for an architecture that is known to be inexact.

    `config` is the configuration of the text model.
    """
    refuse_whole(name, config)
    reason = _indexed(config) or _layers(config) or _positions(config)
    if reason is not None:
        raise UnsupportedModelError(f"Model {name!r} ({config.model_type}) is not supported: {reason}.")


def refuse_whole(name: str, config: Any) -> None:
    """Raise UnsupportedModelError for models that no engine can run, before any weight is read."""
    reason = "it is an encoder-decoder" if getattr(config, "is_encoder_decoder", False) else _unknown_rope(config)
    if reason is not None:
        raise UnsupportedModelError(f"Model {name!r} ({config.model_type}) is not supported: {reason}.")


def _indexed(config: Any) -> str | None:
    """Sparse attention: which keys a token reads depends on all keys before it, so chunks cannot be read separately."""
    return (
        "it has sparse attention, which selects keys from all earlier tokens"
        if getattr(config, "index_topk", None)
        else None
    )


def chooses_by_index(config: Any) -> bool:
    """Whether some layers read only a selection of the keys."""
    kinds = getattr(config, "layer_types", None) or []
    return _indexed(config) is not None or any(word in kind for kind in kinds for word in _SPARSE)


def _layers(config: Any) -> str | None:
    for kind in dict.fromkeys(getattr(config, "layer_types", None) or []):
        if any(word in kind for word in _RECURRENT):
            return f"it has recurrent layers ({kind}), whose states cannot be merged across chunks"
        if kind == "chunked_attention":
            return "its attention is chunked at fixed positions, so chunks cannot be moved"
        if any(word in kind for word in _SPARSE):
            return f"it has sparse attention ({kind}), which selects keys from all earlier tokens"
        if kind not in _LAYERS:
            return f"it has layers of an unknown kind ({kind})"
    return None


def _rope_kinds(config: Any) -> list[dict[str, Any]]:
    """The parameters of each kind of rotary positions that the model has."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [p for p in parameters.values() if isinstance(p, dict)] or [parameters]


def _unknown_rope(config: Any) -> str | None:
    found = (kind.get("rope_type", "default") for kind in _rope_kinds(config))
    unknown = next((kind for kind in found if kind not in _ROPES | _LENGTH_DEPENDENT), None)
    return None if unknown is None else f"its RoPE is of an unknown kind ({unknown})"


def _positions(config: Any) -> str | None:
    nested = _rope_kinds(config)
    if any("mrope_section" in p for p in nested):
        return "its RoPE counts images and text on several axes"
    if getattr(config, "alibi", False):
        return "its attention adds a bias that depends on distance (ALiBi)"
    return None


def reach(config: Any) -> tuple[int | None, str]:
    """The longest prompt of this model in positions (None: no known limit), and the reason for the limit, or "".

    RoPE of the kinds "dynamic" and "longrope" changes beyond the length that the model was first trained for. Stored
    keys are rotated as below that length, so longer prompts are refused.
    """
    named = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    most: int | None = min((found for found in named if isinstance(found, int)), default=None)
    why = ""
    for each in _rope_kinds(config):
        if (kind := each.get("rope_type")) in _LENGTH_DEPENDENT:
            trained = each.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", most
            )
            if isinstance(trained, int) and (most is None or trained <= most):
                most, why = trained, f", as far as its RoPE ({kind}) is the one that chunks are stored with"
    return most, why


def module_map(model: Any, devices: Sequence[torch.device], shares: Sequence[float]) -> dict[str, torch.device]:
    """Module name -> device, so that every parameter is in exactly one of them; `model` may be without weights.

    `shares[i]` is the share of the layers that `devices[i]` takes.
    """
    layers = model.get_decoder().layers
    [stack] = (name for name, module in model.named_modules() if module is layers)
    devices_of = {f"{stack}.{index}": device for index, device in enumerate(_runs(len(layers), devices, shares))}
    head = model.get_output_embeddings()
    tied = head is None or head.weight is model.get_input_embeddings().weight or _ties(model)
    everything = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, _ in everything:
        if not name.startswith(f"{stack}."):
            module = name.rpartition(".")[0]
            if stack.startswith(f"{module}."):  # it contains the layers too, so name this one tensor
                devices_of[name] = devices[0]
                continue
            last = not tied and model.get_submodule(module) is head
            devices_of[module] = devices[-1] if last else devices[0]
    return devices_of


def _ties(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False))


def _runs(layers: int, devices: Sequence[torch.device], shares: Sequence[float]) -> list[torch.device]:
    """Each layer's device: consecutive runs of layers whose lengths approximate the shares."""
    runs: list[torch.device] = []
    total = 0.0
    for device, share in zip(devices, shares, strict=True):
        total += share
        runs += [device] * (round(total * layers) - len(runs))
    return runs + [devices[-1]] * (layers - len(runs))


_ATTENTION = "eager"  # all families support it; ragkv's own is set afterwards
_NOT_PLAIN = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save")
_LORA_A, _LORA_B = ".lora_A.weight", ".lora_B.weight"
_SLACK = 1.5  # parameters that a configuration may describe per parameter in the files


def open_checkpoint(checkpoint: Checkpoint, *, dtype: str, devices: tuple[torch.device, ...]) -> tuple[Any, Any]:
    """transformers' model and tokenizer of `checkpoint`, complete and on its device, or split over `devices`.

    Raises UnsupportedModelError for what ragkv cannot run exactly, MissingExtraError for a quantised checkpoint whose
    package is not installed, and ModelLoadError for everything else that a broken, foreign or hostile folder leads to.
    """
    copy = None
    if checkpoint.file is not None:
        with describe_error("Model", checkpoint.name):
            dtype = checkpoint.picked(dtype, devices[0])
            copy = UnpackedCopy.of(checkpoint, dtype)
    if copy is not None and copy.is_whole():
        return _open(copy.checkpoint, dtype=dtype, devices=devices)
    model, tokenizer = _open(checkpoint, dtype=dtype, devices=devices)
    if checkpoint.adapter is not None:
        with describe_error("Adapter of model", checkpoint.name):
            merge_adapter(model, Path(checkpoint.adapter))
    if copy is not None:
        with describe_error("Model", checkpoint.name), quiet_loading(reports=False):
            copy.write(model, tokenizer)
    return model, tokenizer


def merge_adapter(model: Any, folder: Path) -> None:
    """Add a LoRA adapter in peft's layout to the weights: W + alpha / rank · BA in fp32 (LoRA, 2106.09685, §4.1).

    Raises ModelLoadError for an adapter of another kind or of another model.
    """
    scale, pairs = adapter_pairs(folder)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for module, (down, up) in pairs.items():
            weight = parameters.get(f"{module}.weight")
            if weight is None or weight.shape != (up.shape[0], down.shape[1]):
                raise ModelLoadError(f"{folder} is an adapter of another model: {module} has no place in this one.")
            weight.copy_(weight.float() + scale * (up @ down).to(weight.device))


def adapter_pairs(folder: Path) -> tuple[float, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The scale of a LoRA adapter in peft's layout, and by its modules in order A `(rank, in)` and B `(out, rank)` in
    fp32. ModelLoadError for one of another kind.
    """
    settings = parse_json(read_plain(folder / "adapter_config.json"))
    plain = isinstance(settings, dict) and settings.get("peft_type") == "LORA" and settings.get("bias") == "none"
    if not plain or any(settings.get(name) for name in _NOT_PLAIN):
        raise ModelLoadError(f"{folder} is not a plain LoRA adapter; merge it and give the merged model.")
    pairs = {}
    with safe_open(folder / ADAPTER, framework="pt") as file:
        for name in sorted(name for name in file.keys() if name.endswith(_LORA_A)):  # noqa: SIM118
            down, up = (file.get_tensor(part).float() for part in (name, name.replace(_LORA_A, _LORA_B)))
            pairs[name.removeprefix("base_model.model.").removesuffix(_LORA_A)] = down, up
    return settings["lora_alpha"] / settings["r"], pairs


def _open(checkpoint: Checkpoint, *, dtype: str, devices: tuple[torch.device, ...]) -> tuple[Any, Any]:
    """As `open_checkpoint`, without the adapter; a GGUF file is unpacked."""
    from transformers import AutoConfig

    name, place = checkpoint.name, checkpoint.location
    options: dict[str, Any] = {"local_files_only": checkpoint.local, "trust_remote_code": False}
    if checkpoint.file is not None:
        options["gguf_file"] = checkpoint.file
        Quantised(method="gguf", unpacked=True).require(name)
    with describe_error("Model", name):
        if checkpoint.local and (Path(place) / "adapter_config.json").exists():
            raise ModelLoadError(
                f"Model {name!r} is an adapter for another model (adapter_config.json); merge it and give the result."
            )
        # show a bar for a download, not for opening a file
        reading = nullcontext() if checkpoint.file is None else _gguf(Path(place, checkpoint.file))
        with quiet_loading(reports=not checkpoint.local, bars=not checkpoint.local), reading as gguf:
            shapes = _stored_shapes(checkpoint, gguf)
            if shapes is not None:
                _require_layers(checkpoint, len(shapes), gguf)
            config = AutoConfig.from_pretrained(place, **options)
            refuse_whole(name, config.get_text_config(decoder=True))
            tokenizer = _tokenizer(place, options)
            if gguf is not None:
                _split_digits(tokenizer, gguf)
            if shapes is not None:
                _require_sizes(name, shapes, config)
            packed = checkpoint.quantised(devices[0])
            try:
                model, info = _maker(config).from_pretrained(
                    place,
                    config=config,
                    dtype=checkpoint.picked(dtype, devices[0]),
                    attn_implementation=_ATTENTION,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # so that they are listed, and refused below
                    **options,
                    **_placed(name, config, packed, devices),
                )
            except ImportError as error:
                if packed is None:
                    raise
                raise MissingExtraError(f"Model {name!r} is quantised ({packed.method}): {_reason(error)}.") from error
        _require_weights(name, info)
        return model if packed is not None or len(devices) > 1 else model.to(devices[0]), tokenizer


def open_tokenizer(checkpoint: Checkpoint) -> Any:
    """transformers' tokenizer of a folder."""
    with describe_error("Model", checkpoint.name), quiet_loading():
        return _tokenizer(checkpoint.location, {"local_files_only": True, "trust_remote_code": False})


def _tokenizer(place: str, options: Mapping[str, Any]) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # an unpacked copy keeps its text splitting in tokenizer.json; the family's class would replace it
    reader = PreTrainedTokenizerFast if Path(place, _MANIFEST).exists() else AutoTokenizer
    return reader.from_pretrained(place, **options)


def _placed(name: str, config: Any, packed: Quantised | None, devices: tuple[torch.device, ...]) -> dict[str, Any]:
    """Where transformers loads the weights, and how it runs packed ones.

    Packed weights cannot be moved by `model.to`, so they are read directly to their device. Ordinary weights for a
    single device are read to the host, which needs no further package, and then moved.
    """
    options: dict[str, Any] = {}
    if packed is not None:
        packed.require(name)
        if packed.method != "gguf":
            config.quantization_config = {**config.quantization_config, **packed.settings}
        else:
            import transformers

            if hasattr(transformers, "GgufConfig"):  # its default is to unpack them only where it finds no kernel
                options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    if len(devices) == 1:
        return options if packed is None else {**options, "device_map": {"": devices[0]}}
    if find_spec("accelerate") is None:
        raise MissingExtraError(
            f"Splitting model {name!r} over {len(devices)} devices needs accelerate; {install_hint('split')}."
        )
    return {**options, "device_map": module_map(_without_weights(config), devices, shares(devices))}


def _maker(config: Any) -> Any:
    """transformers' class for the checkpoint; for a model that takes images and writes text, the class of the whole
    model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees, writes = (type(config) in kind._model_mapping for kind in (AutoModelForImageTextToText, AutoModelForCausalLM))
    return AutoModelForImageTextToText if sees and not writes else AutoModelForCausalLM


def _without_weights(config: Any) -> Any:
    """The model that a configuration describes, without memory for its parameters."""
    with torch.device("meta"):
        return _maker(config).from_config(config, trust_remote_code=False, attn_implementation=_ATTENTION)


@contextmanager
def describe_error(what: str, name: str) -> Iterator[None]:
    """Turn any error of the libraries below into a ModelLoadError of one sentence. ragkv's own errors pass."""
    try:
        yield
    except RagkvError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ModelLoadError(f"{what} {name!r} does not fit into memory; load it on a larger device.") from error
    except Exception as error:  # transformers, torch, tokenizers and pickle raise different errors for a broken file
        if wants_code(error):
            raise ModelLoadError(
                f"{what} {name!r} wants to run Python code of its own (auto_map), which ragkv never does; give a model "
                "whose architecture transformers itself has."
            ) from error
        raise ModelLoadError(f"{what} {name!r} cannot be loaded: {_reason(error)}.") from error


def wants_code(error: BaseException) -> bool:
    """Whether a library refused because it was not allowed to run a checkpoint's own code."""
    return "trust_remote_code" in str(error)


_one_load = RLock()
_loaded = False
"""Whether this process, or the one that it was forked from, has loaded a model."""
_lost_threads = False
"""Whether torch had several threads when a process with a model was forked into this one."""


def _after_fork() -> None:
    """Make the child able to load and run models.

    The thread that may have held the lock does not exist here, and neither do torch's: its next operation on several
    threads would wait for them for ever, or crash (OpenMP).
    """
    global _one_load, _lost_threads
    _one_load = RLock()
    threads = getattr(sys.modules.get("torch"), "get_num_threads", None)  # an import that was under way stays so
    if _loaded and threads is not None and threads() > 1:
        torch.set_num_threads(1)
        _lost_threads = True


os.register_at_fork(after_in_child=_after_fork)


def note_load() -> None:
    """Called before a model is loaded, in whatever way: a child that is forked later computes on one thread."""
    global _loaded, _lost_threads
    if _lost_threads:
        logger.warning(
            "This process was forked from one that had loaded a model, so torch computes on one thread here; start it "
            "with multiprocessing's method 'spawn' to use all processors."
        )
        _lost_threads = False
    _loaded = True


@contextmanager
def quiet_loading(*, reports: bool = True, bars: bool = False) -> Iterator[None]:
    """One load at a time, without progress bars; without `reports`, without the table of unmatched weights too.

    While it loads, transformers replaces torch's default dtype, torch's initialisers and its own method that ties
    weights. Two loads at once would restore each other's replacements and leave the process so for good: models in the
    wrong dtype, and models that "lack" their tied weights.

    Embedders and rerankers that use transformers need it too. `bars` shows download progress.
    """
    from transformers.utils import logging as transformers_logging

    note_load()
    with _one_load:
        bar, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
        if not bars:
            transformers_logging.disable_progress_bar()
        if not reports:
            transformers_logging.set_verbosity_error()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(level)
            if bar:
                transformers_logging.enable_progress_bar()


def _reason(error: Exception) -> str:
    """The first sentence of a library's error, with its type if the text alone says nothing."""
    text = str(error).strip()
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    message = lines[0] if lines else ""
    if message.endswith(":") and len(lines) > 1:
        message = f"{message} {lines[1]}"
    message = message.split(". ")[0].rstrip(".:")
    plain = isinstance(error, OSError | ValueError | RuntimeError | ImportError)
    return message if message and plain else f"{type(error).__name__} {message}".strip()


def _require_weights(name: str, info: dict[str, Any]) -> None:
    """Refuse a model if a weight is missing from its files or has another shape there: it would be random."""
    absent = sorted(map(str, info.get("missing_keys") or ()))
    if absent:
        raise ModelLoadError(f"Model {name!r} lacks weights ({_some(absent)}); download it again.")
    wrong = sorted(str(key[0]) if isinstance(key, tuple) else str(key) for key in info.get("mismatched_keys") or ())
    if wrong:
        raise ModelLoadError(
            f"Model {name!r} has weights of another shape than in config.json ({_some(wrong)}); download it again."
        )
    if errors := info.get("error_msgs") or info.get("conversion_errors"):
        raise ModelLoadError(f"Model {name!r} has weights that cannot be read ({_some(list(map(str, errors)))}).")


def _require_layers(checkpoint: Checkpoint, tensors: int, gguf: Any) -> None:
    """Refuse more layers than tensors, before the configuration lists the type of every layer."""
    payload = checkpoint.described()
    if gguf is not None:
        found = ((name, f.contents()) for name, f in gguf.fields.items() if name.endswith(".block_count"))
        payload = {f"n_layers ({name})": count for name, count in found}
    counts = {key: value for each in (payload, payload.get("text_config")) for key, value in _layer_counts(each)}
    for key, value in counts.items():
        if value > tensors:
            raise ModelLoadError(
                f"Model {checkpoint.name!r} has {key} = {value}, but only {tensors} tensors; download it again."
            )


def _layer_counts(payload: object) -> Iterator[tuple[str, int]]:
    if isinstance(payload, Mapping):
        for key, value in payload.items():
            if isinstance(value, int) and "layer" in str(key) and str(key).startswith(("n_", "num_")):
                yield str(key), value


def _require_sizes(name: str, shapes: list[tuple[int, ...]], config: Any) -> None:
    """Refuse sizes that the files contradict, before any memory is allocated for them.

    A quantised checkpoint packs several parameters into one number, so only its counts are compared.
    """
    text = config.get_text_config(decoder=True)
    most = max([len(shapes), *(size for shape in shapes for size in shape)])
    counted = {key: value for key, value in text.to_dict().items() if key.startswith(("num_", "n_"))}
    counted["num_hidden_layers"] = text.num_hidden_layers
    for key, value in counted.items():
        if type(value) is int and value > most:
            raise ModelLoadError(
                f"Model {name!r} has {key} = {value} in its config.json, but its files hold {len(shapes)} tensors "
                f"of at most {most} rows; download it again."
            )
    if getattr(config, "quantization_config", None) is not None:
        return
    described, held = sum(p.numel() for p in _without_weights(config).parameters()), sum(map(prod, shapes))
    if described > _SLACK * held:
        raise ModelLoadError(
            f"Model {name!r} has {held} parameters in its files, but its config.json describes {described}; "
            "download it again."
        )


@contextmanager
def _gguf(path: Path) -> Iterator[Any]:
    """gguf's reader of a file.

    transformers makes a reader for each of configuration, tokenizer and weights, and cannot be given one. Each parses
    the whole vocabulary, seconds for 50,000 tokens, so within this context all of them share one. transformers' bar
    over the tensors, which `disable_progress_bar` does not disable, is then only drawn on a terminal.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as unpacking

    reader_class, bar = gguf.GGUFReader, unpacking.tqdm

    class Bounded(gguf.GGUFReader):  # type: ignore[misc]
        """Ends where the file ends. gguf's own reads on, for as many empty elements as an array claims to have."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **more: Any) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("the file ends early")
            return super()._get(offset, dtype, count, *order, **more)

    reader = Bounded(path)
    if sum(int(tensor.n_bytes) for tensor in reader.tensors) > path.stat().st_size:
        raise ValueError("its tensors overlap")  # each is unpacked, so a small file would fill the memory

    def shared(name: Any, *mode: Any) -> Any:
        return reader if not mode and Path(name).resolve() == path.resolve() else reader_class(name, *mode)

    gguf.GGUFReader, unpacking.tqdm = shared, partial(bar, disable=None)
    try:
        yield reader
    finally:
        gguf.GGUFReader, unpacking.tqdm = reader_class, bar


_DIGITS = frozenset({"codeshell", "command-r", "exaone", "refact", "smollm", "starcoder"})
"""The values of `tokenizer.ggml.pre` that mean: split off every digit, then as GPT-2. transformers 5.23 does not know
them, and tokenises numbers after two spaces or an empty line differently from the published tokenizers."""


def _split_digits(tokenizer: Any, gguf: Any) -> None:
    kind = gguf.fields.get("tokenizer.ggml.pre")
    if kind is not None and kind.contents() in _DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


_MANIFEST = "ragkv-unpacked.json"
_LAYOUT = 2  # raised when ragkv's own code changes the content of a copy


class UnpackedCopy:
    """An unpacked GGUF file in the user's cache, with its adapter merged: a model folder and the xxh3 checksums of its
    files.

    A folder gets its name when it is complete. One that another process has locked is being written; one without a lock
    was left behind by a process that was killed.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint) -> None:
        self.folder = folder
        self.checkpoint = replace(checkpoint, location=str(folder), file=None, adapter=None)
        """The copy as a checkpoint of its own."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: str) -> UnpackedCopy | None:
        """The location of a checkpoint's copy, whether it exists or not; None, with a warning, for a user without a
        home."""
        try:
            base = user_folder("XDG_CACHE_HOME", ".cache") / "ragkv" / "unpacked"
        except RuntimeError as error:
            _warn(checkpoint.name, str(error))
            return None
        made_by = f"{_LAYOUT}-{version('transformers')}"
        name = hashlib.sha256(checkpoint.digest(None).encode()).hexdigest()[:32]
        return cls(base / f"{name}-{dtype}-{made_by}", checkpoint)

    def is_whole(self) -> bool:
        """Whether it exists and is intact; a damaged copy is removed."""
        try:
            if parse_json(read_plain(self.folder / _MANIFEST)) == checksums(self.folder):
                return True
            reason = "its checksums are not those of its files"
        except (FileNotFoundError, NotADirectoryError):
            if not self.folder.exists():
                return False
            reason = "files are missing"
        except (OSError, ValueError) as error:
            reason = str(error)
        logger.warning("the unpacked copy %s is damaged (%s), so the file is unpacked again", self.folder, reason)
        with suppress(OSError):  # `write` will fail too, with a warning
            remove_tree(self.folder)
        return False

    def write(self, model: Any, tokenizer: Any) -> None:
        """Keep a model as `from_pretrained` returns it; if that fails, log a warning with the reason."""
        fresh = self.folder.with_name(f"{self.folder.name}.{secrets.token_hex(4)}.new")
        try:
            make_folder(fresh.parent)
            _remove_abandoned(fresh.parent)
            _require_space(fresh.parent, sum(p.numel() * p.element_size() for p in model.parameters()))
            fresh.mkdir()
            with _locked(fresh):
                model.save_pretrained(fresh)
                tokenizer.save_pretrained(fresh)
                write_plain(fresh / _MANIFEST, json.dumps(checksums(fresh)).encode())
                for path in (*fresh.iterdir(), fresh):
                    sync_path(path)
                fresh.rename(self.folder)
                sync_path(fresh.parent)
        except (OSError, SafetensorError) as error:
            if not self.folder.is_dir():  # otherwise another process has written it in the meantime
                _warn(self.checkpoint.name, str(error))
        finally:
            with suppress(OSError):
                shutil.rmtree(fresh)


def _warn(name: str, reason: str) -> None:
    logger.warning(
        "model %r is unpacked each time that it is loaded, because the result cannot be kept (%s): let XDG_CACHE_HOME "
        "name a folder that you may write to and that has room",
        name,
        reason,
    )


def checksums(folder: Path) -> dict[str, str]:
    """The xxh3 checksum of every file except the list of checksums."""
    checksums = {}
    for path in sorted(folder.iterdir()):
        if path.name != _MANIFEST:
            with path.open("rb") as file:
                checksums[path.name] = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    return checksums


def _require_space(folder: Path, nbytes: int) -> None:
    """Refuse to fill the disk: OSError. Not every library survives a disk that fills while it writes."""
    if shutil.disk_usage(folder).free < nbytes + (64 << 20):
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, it takes {nbytes / 1e6:,.0f} MB", str(folder))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that is being written; BlockingIOError if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    for left in parent.glob("*.new"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left)


def _stored_shapes(checkpoint: Checkpoint, gguf: Any) -> list[tuple[int, ...]] | None:
    """The shapes of all stored tensors; None if there are none, which transformers itself reports."""
    if not checkpoint.local:
        return None
    folder = Path(checkpoint.location)
    if gguf is not None:
        return [tuple(map(int, tensor.shape)) for tensor in gguf.tensors]
    shapes: list[tuple[int, ...]] = []
    if paths := weight_files(folder):
        for path in paths:
            with safe_open(path, framework="pt") as file:
                shapes += [tuple(file.get_slice(key).get_shape()) for key in file.keys()]  # noqa: SIM118
        return shapes
    paths = sorted(folder.glob("pytorch_model*.bin"))
    for path in paths:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        shapes += [tuple(tensor.shape) for tensor in state.values() if isinstance(tensor, torch.Tensor)]
    return shapes if paths else None


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read: one, or those that an index lists."""
    if (whole := folder / "model.safetensors").exists():
        return [whole]
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return []
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    if any(Path(name).name != name for name in names):
        raise ModelLoadError(f"{index} names files outside its own folder.")
    return [folder / name for name in sorted(set(names))]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
