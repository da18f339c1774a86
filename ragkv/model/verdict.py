"""What the self-check found about a model, in the user's cache: `$XDG_CACHE_HOME/ragkv/checked`.

The check takes as long as an answer of a short question, and transformers' model classes take twice that to import. So
a model that has passed is not checked again while nothing has changed that its numbers depend on: the checkpoint
(`Checkpoint.fingerprint`), the dtype and device, ragkv's own code, the libraries, the processor, and the variables that
choose kernels. A model that was refused is checked again each time.

An entry also tells whether the model computes the same bits as a `PlainDecoder` and a `PlainTokenizer`, and what these
need. Then later processes do not import transformers. It carries a checksum with the user's key, so an entry that is
damaged or was written by somebody else counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ragkv.attention.sequence import TokenSequence
from ragkv.model.attention_hook import attend_by_ragkv, without_rotary
from ragkv.model.checkpoint import Checkpoint, digest_files
from ragkv.model.decoder import PlainDecoder
from ragkv.model.language_model import LanguageModel
from ragkv.model.loading import UnpackedCopy, checksums, note_load, open_checkpoint, open_tokenizer, weight_files
from ragkv.model.tokenizer import PlainTokenizer, facts_of
from ragkv.types import Capability
from ragkv.util.files import keyed_digest, make_folder, parse_json, read_plain, replace_plain, user_folder

logger = logging.getLogger(__name__)

_LIBRARIES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "llvmlite"),
    *("accelerate", "kernels", "flash-attn", "triton", "gguf"),
)
_VARIABLES = ("ATEN_CPU", "DNNL_", "ONEDNN_", "MKL_CBWR", "MKL_ENABLE", "NUMBA_CPU", "NUMBA_DISABLE", "USE_HUB_KERNELS")
"""The beginnings of the names of variables that choose kernels."""
_CODE = ("attention", "model", "util/kernels.py")
_MOST_BYTES = 256 << 20  # a tokenizer of 256,000 words takes 35 MB
_MOST_ENTRIES = 32
_KEY_CHARACTERS = 64
_LLAMA = "LlamaForCausalLM"


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """The entry of one model, whether it exists or not."""

    path: Path
    checkpoint: Checkpoint
    dtype: str
    """The option as given."""
    devices: tuple[torch.device, ...]

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, dtype: str, devices: tuple[torch.device, ...], revision: str | None = None
    ) -> CheckRecord | None:
        """None if nothing can be kept: for a user without a home, and a hub model without a `revision`."""
        if not checkpoint.local and revision is None:
            return None
        try:
            folder = user_folder("XDG_CACHE_HOME", ".cache") / "ragkv" / "checked"
        except RuntimeError:
            return None
        model = checkpoint.fingerprint(dtype, revision, device=str(devices[0]))
        key = model, dtype, [*map(_device, devices)], _code(), _libraries(), _variables()
        return cls(folder / hashlib.sha256(repr(key).encode()).hexdigest(), checkpoint, dtype, devices)

    def read(self) -> tuple[dict[str, Any], str] | None:
        """What was found, and the text of the tokenizer.json; None without an entry by this user."""
        try:
            content = read_plain(self.path, limit=_MOST_BYTES)
        except OSError as error:
            logger.debug("model %s has not been checked here: %s", self.checkpoint.name, error)
            return None
        key, body = content[:_KEY_CHARACTERS], content[_KEY_CHARACTERS:]
        if not secrets.compare_digest(key, keyed_digest(body)):
            logger.debug("%s is damaged, or not by this user", self.path)
            return None
        head, _, tokenizer = body.partition(b"\n")
        return parse_json(head), tokenizer.decode()

    def settle(self, model: LanguageModel) -> bool:
        """Set what a check of `model` would find; False without an entry."""
        entry = self.read()
        if entry is not None:
            _settle(model, entry[0])
        return entry is not None

    def write(self, model: LanguageModel) -> None:
        """Keep what the check of `model` has found, before its layers are replaced."""
        facts: dict[str, Any] = {
            "windows": model.windows,
            "missing": {need.value: why for need, why in model.missing_capabilities.items()},
            "moves_within": model.moves_within,
            "shared": list(model.shared.items()),
            "rotary": next((at for at, each in enumerate(model.rotaries) if each.apply is model.rotary.apply), None),
            "kinds": model.rotary.kinds,
        }
        tokenizer, plain = "", self._plain(model)
        if plain is not None:
            tokenizer, facts["plain"] = plain
        body = json.dumps(facts).encode() + b"\n" + tokenizer.encode()
        try:
            make_folder(self.path.parent)
            replace_plain(self.path, keyed_digest(body) + body, mode=0o600)
            entries = sorted(self.path.parent.iterdir(), key=lambda path: path.lstat().st_mtime)
            for old in entries[:-_MOST_ENTRIES]:
                old.unlink()
        except OSError as error:
            logger.debug("the check of model %s is not kept: %s", self.checkpoint.name, error)

    def plain_model(self) -> LanguageModel | None:
        """The checked model on a `PlainDecoder`, before its layers are replaced; None without an entry for one."""
        entry = self.read()
        plain = None if entry is None else entry[0].get("plain")
        if entry is None or plain is None:
            return None
        note_load()
        checkpoint = self._files()
        try:
            if plain["files"] is not None and plain["files"] != checksums(Path(checkpoint.location)):
                return None  # the loader reports it
            network = PlainDecoder(
                _tensors(Path(checkpoint.location), getattr(torch, plain["dtype"])),
                plain["config"],
                inv_freq=torch.tensor(plain["inv_freq"]),
                scaling=plain["scaling"],
                eos_token_id=plain["eos_token_id"],
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            logger.debug("model %s is opened by transformers: %s", self.checkpoint.name, error)
            return None
        tokenizer = PlainTokenizer(entry[1], plain["tokenizer"], lambda: open_tokenizer(checkpoint))
        model = LanguageModel(network, tokenizer, self.checkpoint)
        _settle(model, entry[0])
        model.load_whole = self._load_whole
        return model

    def _load_whole(self) -> Any:
        model, _ = open_checkpoint(self.checkpoint, dtype=self.dtype, devices=self.devices)
        attend_by_ragkv(model.eval())
        return model

    def _files(self) -> Checkpoint:
        """The folder with the weights: the checkpoint's own, or the copy that was unpacked."""
        if self.checkpoint.file is None:
            return self.checkpoint
        copy = UnpackedCopy.of(self.checkpoint, self.checkpoint.picked(self.dtype, self.devices[0]))
        return self.checkpoint if copy is None else copy.checkpoint

    def _plain(self, model: LanguageModel) -> tuple[str, dict[str, Any]] | None:
        """The tokenizer.json and the constants with which plain modules do what `model` does; None if they do not."""
        network, checkpoint = model.network, self._files()
        folder = Path(checkpoint.location)
        simple = type(network).__name__ == _LLAMA and [device.type for device in self.devices] == ["cpu"]
        limits = (model.windows, model.missing_capabilities, model.moves_within, model.shared)
        if not simple or any(limits) or network.config.hidden_act != "silu" or checkpoint.adapter is not None:
            return None
        if not checkpoint.local or not weight_files(folder):
            return None
        rope = network.model.rotary_emb
        if rope.rope_type in ("dynamic", "longrope") or (tokenizer := facts_of(model.tokens.tokenizer)) is None:
            return None
        plain = {
            "config": json.loads(network.config.to_json_string(use_diff=False)),
            "eos_token_id": getattr(network.generation_config, "eos_token_id", None),
            "inv_freq": rope.inv_freq.tolist(),
            "scaling": float(rope.attention_scaling),
            "dtype": str(model.dtype).removeprefix("torch."),
            "tokenizer": tokenizer[1],
            "files": None if self.checkpoint.file is None else checksums(folder),
        }
        tensors = {name: tensor.detach() for name, tensor in network.named_parameters()}
        constants = {name: plain[name] for name in ("scaling", "eos_token_id")}
        try:
            other = LanguageModel(
                PlainDecoder(tensors, plain["config"], inv_freq=torch.tensor(plain["inv_freq"]), **constants),
                model.tokens.tokenizer,
                self.checkpoint,
            )
        except (ValueError, KeyError, AttributeError) as error:
            logger.debug("model %s has no plain modules: %s", self.checkpoint.name, error)
            return None
        _settle(other, {"rotary": 0, "kinds": model.rotary.kinds, "moves_within": None})
        return (tokenizer[0], plain) if _same_bits(model, other) else None


def _settle(model: LanguageModel, facts: Mapping[str, Any]) -> None:
    model.windows = facts.get("windows", [])
    model.missing_capabilities = {Capability(need): why for need, why in facts.get("missing", {}).items()}
    model.moves_within, model.shared = facts["moves_within"], dict(facts.get("shared", ()))
    if facts["rotary"] is None:
        model.rotary = without_rotary(model.layers)
    else:
        model.rotary = replace(model.rotaries[facts["rotary"]], kinds=tuple(facts["kinds"]))


def _same_bits(model: LanguageModel, other: LanguageModel) -> bool:
    """Whether both give the same logits and KV, from the start and further on, at once and over their own KV."""
    results, ids = [], [(17 * at) % min(model.config.vocab_size, 997) for at in range(40)]
    for each in (model, other):
        sequences = [TokenSequence((), 0), TokenSequence((), 1000)]
        logits = [
            each.step(sequences, [ids[begin:end], ids[::-1][begin:end]], every=True)
            for begin, end in pairwise((0, 31, 39, 40))
        ]
        kv = [sequence.cache.chunk_kv() for sequence in sequences]
        results.append([*logits, *(tensor for some in kv for tensor in (*some.keys, *some.values))])
    return all(torch.equal(one, same) for one, same in zip(*results, strict=True))


def _tensors(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights in the files of a folder, mapped and not copied if they have this dtype."""
    tensors = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            tensors.update({name: file.get_tensor(name).to(dtype) for name in file.keys()})  # noqa: SIM118
    return tensors


@cache
def _code() -> str:
    """The digest of the code that a model's numbers depend on."""
    root = Path(__file__).parents[1]
    paths = [
        path for each in _CODE for path in ([root / each] if each.endswith(".py") else (root / each).rglob("*.py"))
    ]
    return digest_files(root, sorted(paths))


@cache
def _libraries() -> list[str]:
    versions = [platform.python_version()]
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    return versions


def _variables() -> list[tuple[str, str]]:
    return sorted((name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES))


def _device(device: torch.device) -> str:
    """A device by all that chooses its kernels."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_properties(device)} {torch.version.cuda}"
    return f"{device} {_processor()}"


@cache
def _processor() -> str:
    try:
        lines: Sequence[str] = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.platform()} {platform.processor()}"
    changing = ("processor", "cpu MHz", "bogomips", "core id", "apicid", "initial apicid", "physical id", "siblings")
    return "\n".join(line for line in lines if not line.startswith((*changing, "cpu cores")))
