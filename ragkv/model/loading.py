"""Open a checkpoint with transformers, trusting nothing in it: no code of its own, no weight that is not in its files.

transformers would ask on stdin whether to run a checkpoint's Python code, fill missing weights with random numbers and
go on after a warning, and allocate whatever sizes a configuration states. Each is one sentence of ragkv's instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging as transformers_logging

from ragkv.errors import MissingExtraError, ModelLoadError, RagkvError
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.device import shares
from ragkv.model.quantised import Quantised
from ragkv.model.refusal import refuse_whole
from ragkv.model.split import module_map

__all__ = ["explained", "open_checkpoint", "quiet_loading", "wants_code"]

_ATTENTION = "eager"  # what every family can be built with; ragkv's own is set afterwards
_SLACK = 1.5  # parameters that a configuration may describe for each one in the files


def open_checkpoint(
    checkpoint: Checkpoint, *, dtype: str, devices: tuple[torch.device, ...], revision: str | None = None
) -> tuple[Any, Any]:
    """transformers' model and tokenizer of `checkpoint`, complete and on its device, or split over `devices`.

    Raises UnsupportedModelError for what ragkv cannot run exactly, MissingExtraError for a quantised checkpoint whose
    package is not installed, and ModelLoadError for everything else that a broken, foreign or hostile folder leads to.
    """
    name, place = checkpoint.name, checkpoint.location
    options: dict[str, Any] = {"local_files_only": checkpoint.local, "trust_remote_code": False}
    if not checkpoint.local:
        options["revision"] = revision
    if checkpoint.file is not None:
        options["gguf_file"] = checkpoint.file
        Quantised(method="gguf", unpacked=True).require(name)
    with explained("Model", name):
        if checkpoint.local and (Path(place) / "adapter_config.json").exists():
            raise ModelLoadError(
                f"Model {name!r} is an adapter for another model (adapter_config.json); merge it and give the result."
            )
        # a download is worth a bar, opening a file is not
        with quiet_loading(reports=False) if checkpoint.local else nullcontext():
            shapes = _stored_shapes(checkpoint)
            if shapes is not None:
                _require_layers(checkpoint, len(shapes), revision)
            config = AutoConfig.from_pretrained(place, **options)
            refuse_whole(name, config.get_text_config(decoder=True))
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
            if shapes is not None:
                _require_sizes(name, shapes, config)
            packed = checkpoint.quantised(devices[0], revision)
            with _its_package(name, packed):
                model, found = _maker(config).from_pretrained(
                    place,
                    config=config,
                    dtype=checkpoint.picked(dtype, devices[0], revision),
                    attn_implementation=_ATTENTION,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # so that they are named, and refused below
                    **options,
                    **_placed(name, config, packed, devices),
                )
        _require_weights(name, found)
        return model if packed is not None or len(devices) > 1 else model.to(devices[0]), tokenizer


def _placed(name: str, config: Any, packed: Quantised | None, devices: tuple[torch.device, ...]) -> dict[str, Any]:
    """Where transformers shall put the weights while it reads them, and how it shall run packed ones.

    Packed weights are never moved: `model.to` is not for them. The ordinary ones of a single device are read to the
    host, which needs no further package, and moved.
    """
    if packed is not None:
        packed.require(name)
        if packed.method != "gguf":
            config.quantization_config = {**config.quantization_config, **packed.settings}
    if len(devices) == 1:
        return {} if packed is None else {"device_map": {"": devices[0]}}
    if find_spec("accelerate") is None:
        raise MissingExtraError(
            f"Splitting model {name!r} over {len(devices)} devices needs accelerate; install it with: "
            'pip install "ragkv[split]"'
        )
    return {"device_map": module_map(_without_weights(config), devices, shares(devices))}


@contextmanager
def _its_package(name: str, packed: Quantised | None) -> Iterator[None]:
    """What a packed checkpoint lacks is a package or a device, and transformers says which: MissingExtraError."""
    try:
        yield
    except ImportError as error:
        if packed is None:
            raise
        raise MissingExtraError(f"Model {name!r} is quantised ({packed.method}): {_reason(error)}.") from error


def _maker(config: Any) -> Any:
    """transformers' class for it: of a model that sees too and writes text, the one that has the whole checkpoint."""
    sees = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees and not _writes(config) else AutoModelForCausalLM


def _writes(config: Any) -> bool:
    return type(config) in AutoModelForCausalLM._model_mapping


def _without_weights(config: Any) -> Any:
    """The model that a configuration describes, without memory for its parameters."""
    with torch.device("meta"):
        return _maker(config).from_config(config, trust_remote_code=False, attn_implementation=_ATTENTION)


@contextmanager
def explained(what: str, name: str) -> Iterator[None]:
    """Whatever goes wrong in the libraries below is one sentence: ModelLoadError. ragkv's own errors pass."""
    try:
        yield
    except RagkvError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ModelLoadError(f"{what} {name!r} does not fit into memory; load it on a larger device.") from error
    except Exception as error:  # transformers, torch, tokenizers and pickle each raise their own for a broken file
        if wants_code(error):
            raise ModelLoadError(
                f"{what} {name!r} wants to run Python code of its own (auto_map), which ragkv never does; give a model "
                "whose architecture transformers itself has."
            ) from error
        raise ModelLoadError(f"{what} {name!r} cannot be loaded: {_reason(error)}.") from error


def wants_code(error: BaseException) -> bool:
    """Whether a library refused because it was not allowed to run code that a checkpoint brings along."""
    return "trust_remote_code" in str(error)


@contextmanager
def quiet_loading(*, reports: bool = True) -> Iterator[None]:
    """No progress bar while a checkpoint is opened and, without `reports`, no table of unmatched weights either.

    For the embedders and rerankers too, which reach transformers through FlagEmbedding.
    """
    bar, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
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
    """What a library's error says: its first sentence, and its type where the text alone says nothing."""
    text = str(error).strip()
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    said = lines[0] if lines else ""
    if said.endswith(":") and len(lines) > 1:
        said = f"{said} {lines[1]}"
    said = said.split(". ")[0].rstrip(".:")
    plain = isinstance(error, OSError | ValueError | RuntimeError | ImportError)
    return said if said and plain else f"{type(error).__name__} {said}".strip()


def _require_weights(name: str, found: dict[str, Any]) -> None:
    """Refuse a model of which a weight was not in its files or had another shape: it would be random numbers."""
    absent = sorted(map(str, found.get("missing_keys") or ()))
    if absent:
        raise ModelLoadError(f"Model {name!r} lacks weights ({_some(absent)}); fetch it again.")
    wrong = sorted(str(key[0]) if isinstance(key, tuple) else str(key) for key in found.get("mismatched_keys") or ())
    if wrong:
        raise ModelLoadError(
            f"Model {name!r} has weights of another shape than its config.json says ({_some(wrong)}); fetch it again."
        )
    if errors := found.get("error_msgs") or found.get("conversion_errors"):
        raise ModelLoadError(f"Model {name!r} has weights that cannot be read ({_some(list(map(str, errors)))}).")


def _require_layers(checkpoint: Checkpoint, tensors: int, revision: str | None) -> None:
    """Refuse more layers than there are tensors, before the configuration lists the kind of each of them."""
    told = checkpoint.described(revision)
    if checkpoint.file is not None:
        fields = _gguf(checkpoint).fields
        told = {f"n_layers ({name})": f.contents() for name, f in fields.items() if name.endswith(".block_count")}
    counts = {key: value for each in (told, told.get("text_config")) for key, value in _layer_counts(each)}
    for key, value in counts.items():
        if value > tensors:
            raise ModelLoadError(
                f"Model {checkpoint.name!r} says {key} = {value}, but its files hold {tensors} tensors; fetch it again."
            )


def _layer_counts(told: object) -> Iterator[tuple[str, int]]:
    if isinstance(told, Mapping):
        for key, value in told.items():
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
                f"of at most {most} rows; fetch it again."
            )
    if getattr(config, "quantization_config", None) is not None:
        return
    described, held = sum(p.numel() for p in _without_weights(config).parameters()), sum(map(prod, shapes))
    if described > _SLACK * held:
        raise ModelLoadError(
            f"Model {name!r} has {held} parameters in its files, but its config.json describes {described}; "
            "fetch it again."
        )


def _gguf(checkpoint: Checkpoint) -> Any:
    from gguf import GGUFReader

    return GGUFReader(Path(checkpoint.location, str(checkpoint.file)))


def _stored_shapes(checkpoint: Checkpoint) -> list[tuple[int, ...]] | None:
    """The shapes of all stored tensors; None where transformers is left to say that it finds no weights."""
    if not checkpoint.local:
        return None
    folder = Path(checkpoint.location)
    if checkpoint.file is not None:
        return [tuple(map(int, tensor.shape)) for tensor in _gguf(checkpoint).tensors]
    shapes: list[tuple[int, ...]] = []
    if paths := _safetensors(folder):
        for path in paths:
            with safe_open(path, framework="pt") as file:
                shapes += [tuple(file.get_slice(key).get_shape()) for key in file.keys()]  # noqa: SIM118
        return shapes
    paths = sorted(folder.glob("pytorch_model*.bin"))
    for path in paths:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        shapes += [tuple(tensor.shape) for tensor in state.values() if isinstance(tensor, torch.Tensor)]
    return shapes if paths else None


def _safetensors(folder: Path) -> list[Path]:
    """The files that transformers would read: one, or those of an index."""
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
