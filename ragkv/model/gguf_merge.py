"""A GGUF file with a LoRA adapter merged into its weights, in the user's cache: `$XDG_CACHE_HOME/ragkv/llama-cpp`.

The projections that the adapter changes are unpacked, become W + alpha / rank · BA (LoRA, 2106.09685, §4.1) and are
packed again, as Q8_0: in the 4 bits of the original the rounding would be as large as the change. All else is copied.
(A LoRA that was set at run time ended the process here; this was not looked into.)
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ragkv.errors import MissingExtraError, ModelLoadError, install_hint
from ragkv.util.files import make_folder, sync_path, user_folder

if TYPE_CHECKING:
    from ragkv.model.checkpoint import Checkpoint

REGIME = "merged-q8_0-1"
"""Part of the identity of a model that is run from a merged file; it changes with the numbers in it."""
_Pairs = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]


def merged_file(checkpoint: Checkpoint) -> Path:
    """A checkpoint with its adapter, made at its first use in place of earlier ones; its name has its checksum.

    Raises ModelLoadError for an adapter of another model and without a cache, MissingExtraError without gguf.
    """
    try:
        folder = user_folder("XDG_CACHE_HOME", ".cache") / "ragkv" / "llama-cpp"
    except RuntimeError as error:
        raise ModelLoadError(
            f"Model {checkpoint.name!r} needs a folder for its merged weights ({error}); let XDG_CACHE_HOME name one."
        ) from error
    name = hashlib.sha256(f"{checkpoint.digest(None)}:{REGIME}".encode()).hexdigest()[:32]
    for path in folder.glob(f"{name}-*.gguf"):
        if path.stem.endswith(f"-{_checksum(path)}"):
            return path
        path.unlink(missing_ok=True)
    if find_spec("gguf") is None:
        raise MissingExtraError(f"Merging the adapter of {checkpoint.name!r} needs gguf; {install_hint('gguf')}.")
    make_folder(folder)
    fresh = folder / f"{name}.{secrets.token_hex(4)}.new"
    try:
        _write(checkpoint, fresh)
        sync_path(fresh)
        path = folder / f"{name}-{_checksum(fresh)}.gguf"
        fresh.replace(path)
        for old in {*folder.glob("*.gguf")} - {path}:  # of another adapter or file, or of numbers made otherwise
            with suppress(OSError):  # Windows keeps a file that is mapped
                old.unlink()
    except OSError as error:
        raise ModelLoadError(
            f"The merged weights of model {checkpoint.name!r} cannot be written to {folder} "
            f"({os.strerror(error.errno or 0)}); make room there, or let XDG_CACHE_HOME name another folder."
        ) from error
    finally:
        fresh.unlink(missing_ok=True)
    return path


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _write(checkpoint: Checkpoint, path: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(Path(checkpoint.location, str(checkpoint.file)))
    facts = {field.name: field for field in reader.fields.values() if not field.name.startswith("GGUF.")}
    family = facts["general.architecture"].contents()
    if family != "llama":
        raise ModelLoadError(f"The adapter of model {checkpoint.name!r} is for a Llama, not for {family!r}.")
    scale, pairs = _adapter(Path(str(checkpoint.adapter)), {name: field.contents for name, field in facts.items()})
    writer = gguf.GGUFWriter(path, family)
    for name, field in facts.items():
        if name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
        elif name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    kind = gguf.GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        if tensor.name not in pairs:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        down, up = pairs.pop(tensor.name)
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if weight.shape != (up.shape[0], down.shape[1]):
            raise ModelLoadError(f"{checkpoint.adapter} is an adapter of another model: {tensor.name} differs.")
        writer.add_tensor(tensor.name, gguf.quants.quantize(weight + scale * (up @ down), kind), raw_dtype=kind)
    if pairs:
        raise ModelLoadError(f"{checkpoint.adapter} is an adapter of another model: it has no {min(pairs)}.")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def neighbours(numbers: Any, heads: int) -> Any:
    """A projection's rows as llama.cpp has them: it rotates neighbours, transformers the halves of a head."""
    rows, width = numbers.shape
    return numbers.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def _adapter(folder: Path, facts: dict[str, Any]) -> tuple[float, _Pairs]:
    """Its scale, and A and B of each tensor by llama.cpp's name, with rows in llama.cpp's order."""
    import gguf

    from ragkv.model.loading import adapter_pairs  # imports torch, which only a merge needs

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, facts["llama.block_count"]())
    heads = {"q_proj": facts["llama.attention.head_count"](), "k_proj": facts["llama.attention.head_count_kv"]()}
    scale, modules = adapter_pairs(folder)
    pairs: _Pairs = {}
    for module, (down, up) in modules.items():
        rows = up.numpy()
        if count := heads.get(module.rpartition(".")[2]):
            rows = neighbours(rows, count)
        pairs[f"{names.get_name(module)}.weight"] = down.numpy(), rows
    return scale, pairs
