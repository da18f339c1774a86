"""What a model needs: the engines that run on it, bytes of KV per codec, memory, and what will be slow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from ragkv.config import LLAMA_CPP, TRANSFORMERS, IndexConfig
from ragkv.engines import engine_names, make_engine, unsupported_reason
from ragkv.index.index import load_language_model, runs_by_llama_cpp
from ragkv.model.checkpoint import computes_in, resolve
from ragkv.store import KVIdentity, codec_from_config, codec_names
from ragkv.store.record import encode_record
from ragkv.types import Encoding

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.config import ModelDType
    from ragkv.model.language_model import LanguageModel

_TOKENS = 256
"""Tokens of the chunk that is encoded: the default size of a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequirements:
    """The requirements of a loaded model. `engines`: None for an exact one, else why it is refused.

    `dtype` by llama-cpp: what the file holds. `kv_bytes` by codec: bytes per additional token of a chunk; llama.cpp's
    states have one codec. `state_bytes` per chunk, for recurrent layers and what llama.cpp adds to each state.
    `expanded_bytes` per token: the size of full keys and values, for latent attention. `slow`: sentences on what will
    be slow, and why.
    """

    name: str
    family: str
    runtime: str
    dtype: str
    device: str
    parameters: int
    weight_bytes: int
    positions: int | None
    windows: tuple[int, ...]
    quantised: str | None
    engines: Mapping[str, str | None]
    kv_bytes: Mapping[str, float]
    state_bytes: int
    expanded_bytes: int | None
    slow: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As `ragkv models MODEL --json` prints it."""
        fields = asdict(self)
        engines = fields.pop("engines")
        reasons = {name: reason for name, reason in engines.items() if reason is not None}
        verdicts = {name: "exact" if reason is None else "refused" for name, reason in engines.items()}
        return {**fields, "engines": verdicts, "reasons": reasons}


def model_requirements(name: str, *, dtype: str = "auto", device: str | None = None) -> ModelRequirements:
    """Load a model and measure it. Raises ModelLoadError or UnsupportedModelError if it cannot be run."""
    opaque = runs_by_llama_cpp(resolve(name), {"dtype": dtype})
    runtime = LLAMA_CPP if opaque else TRANSFORMERS
    config = IndexConfig(model=name, dtype=cast("ModelDType", dtype), executor=cast("Any", runtime))
    model = load_language_model(config, device)
    engines = {name: unsupported_reason(make_engine(name, {}), model) for name in engine_names()}
    packed = None if opaque else model.checkpoint.quantised(model.device, model.revision)
    tokens = min(_TOKENS, model.max_positions or _TOKENS)
    ids = [i % min(model.config.vocab_size, 1000) for i in range(3, 3 + tokens)]
    kv, half = model.encode([ids, ids[: tokens // 2]])
    return ModelRequirements(
        name=name,
        family=model.config.model_type,
        runtime=runtime,
        dtype=model.precision if opaque else str(model.dtype).removeprefix("torch."),
        device=", ".join(dict.fromkeys(map(str, model.place))) if isinstance(model.place, tuple) else str(model.place),
        parameters=model.parameters,
        weight_bytes=model.weight_bytes,
        positions=model.max_positions,
        windows=tuple(model.windows),
        quantised=None if packed is None else packed.regime,
        engines=engines,
        kv_bytes={
            codec: max(0, _stored(kv, codec) - _stored(half, codec))
            / (kv.tokens - half.tokens)  # without the part of constant size
            for codec in (["half"] if opaque else sorted(codec_names(), key=lambda each: each != "raw"))
        },
        state_bytes=kv.shape.state_bytes,
        expanded_bytes=_expanded(model),
        slow=() if opaque else tuple(_slow(model, engines)),
    )


def _stored(kv: ChunkKV, codec: str) -> int:
    """Bytes of a record in a codec."""
    identity = KVIdentity(model="requirements", encoding=Encoding.STANDALONE, prefix_ids=(), chunk_ids=(0,) * kv.tokens)
    return encode_record(kv, identity, codec_from_config({"id": codec})).stored_bytes


def _expanded(model: LanguageModel) -> int | None:
    """Bytes per token of the keys and values that latent attention expands from its cache; None for other models."""
    if not getattr(model.config, "kv_lora_rank", None):
        return None
    from ragkv.model.attention_hook import latent_bytes

    return latent_bytes(model.config, model.dtype.itemsize)[1]


def _slow(model: LanguageModel, engines: Mapping[str, str | None]) -> list[str]:
    """What a user should know before an ingest of hours."""
    reasons = []
    packed = model.checkpoint.quantised(model.device, model.revision)
    if not computes_in(model.device, model.dtype):
        reasons.append(f"this processor has no units for {model.dtype}: --dtype float32 is several times faster")
    if packed is not None and packed.unpacked:
        reasons.append(f"its {packed.method} weights are unpacked here, so they take the memory of ordinary ones")
    if not model.joins:
        reasons.append("every sequence continues from its own cache, so questions cannot share the reading of chunks")
    if engines.get("block") is not None and engines.get("ape") is not None:
        reasons.append("each retrieved chunk has a sequence of its own (pced), so a question costs a pass per chunk")
    if getattr(model.config, "attn_logit_softcapping", None):
        reasons.append("its soft-capped scores have no fast kernel: attention is a plain matrix product")
    return reasons
