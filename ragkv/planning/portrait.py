"""What one model needs: which engines run on it, the bytes of its KV in every codec, its memory, and what is slow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from ragkv.engines import engine_names, make_engine
from ragkv.engines.ability import refusal
from ragkv.model.device import computes_in
from ragkv.model.families.latent import latent_bytes
from ragkv.model.language import LanguageModel
from ragkv.store import KVIdentity, Store, codec_from_config, codec_names
from ragkv.types import Encoding

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV

__all__ = ["Portrait", "draw_portrait"]

_TOKENS = 256
"""Of the chunk that is encoded: as many as a chunk has by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portrait:
    """One loaded model. `engines`: None for one that is exact, else why it is refused.

    `kv_bytes` by codec: what one token more adds to a chunk. `state_bytes` per chunk, of recurrent layers.
    `expanded_bytes` per token: of latent attention, what full keys and values would take. `slow`: sentences on what
    will be slow, and why.
    """

    name: str
    family: str
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
        told = asdict(self)
        engines = told.pop("engines")
        reasons = {name: reason for name, reason in engines.items() if reason is not None}
        verdicts = {name: "exact" if reason is None else "refused" for name, reason in engines.items()}
        return {**told, "engines": verdicts, "reasons": reasons}


def draw_portrait(name: str, *, dtype: str = "auto", device: str | None = None) -> Portrait:
    """Load a model and look at it. Raises ModelLoadError or UnsupportedModelError for one that cannot be run."""
    model = LanguageModel.load(name, dtype=dtype, device=device)
    engines = {each: refusal(make_engine(each, {}), model) for each in engine_names()}
    packed = model.checkpoint.quantised(model.device, model.revision)
    tokens = min(_TOKENS, model.max_positions or _TOKENS)
    ids = [i % min(model.config.vocab_size, 1000) for i in range(3, 3 + tokens)]
    kv, half = model.encode([ids, ids[: tokens // 2]])
    return Portrait(
        name=name,
        family=model.config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        device=", ".join(dict.fromkeys(map(str, model.place))) if isinstance(model.place, tuple) else str(model.place),
        parameters=model.parameters,
        weight_bytes=sum(p.numel() * p.element_size() for p in model.module.parameters()),
        positions=model.max_positions,
        windows=tuple(model.windows),
        quantised=None if packed is None else packed.regime,
        engines=engines,
        kv_bytes={
            codec: max(0, _stored(kv, codec) - _stored(half, codec))
            / (kv.tokens - half.tokens)  # without what has no length
            for codec in sorted(codec_names(), key=lambda each: each != "raw")
        },
        state_bytes=kv.shape.state_bytes,
        expanded_bytes=_expanded(model),
        slow=tuple(_slow(model, engines)),
    )


def _stored(kv: ChunkKV, codec: str) -> int:
    """Bytes of a record in a codec."""
    identity = KVIdentity(model="portrait", encoding=Encoding.STANDALONE, prefix_ids=(), chunk_ids=(0,) * kv.tokens)
    with (
        TemporaryDirectory(prefix="ragkv-") as folder,
        Store.create(folder, codec=codec_from_config({"id": codec})) as store,
    ):
        store.keep_kv(identity, kv.to(torch.device("cpu")))
        return store.stats().kv_bytes


def _expanded(model: LanguageModel) -> int | None:
    """Bytes per token of the keys and values that latent attention makes of what it caches; None of other models."""
    if not getattr(model.config, "kv_lora_rank", None):
        return None
    return latent_bytes(model.config, model.dtype.itemsize)[1]


def _slow(model: LanguageModel, engines: Mapping[str, str | None]) -> list[str]:
    """What a user should know before an ingest of hours."""
    found = []
    packed = model.checkpoint.quantised(model.device, model.revision)
    if not computes_in(model.device, model.dtype):
        found.append(f"this processor has no units for {model.dtype}: --dtype float32 is several times faster")
    if packed is not None and packed.unpacked:
        found.append(f"its {packed.method} weights are unpacked here, so they take the memory of ordinary ones")
    if not model.joins:
        found.append("every row goes on from a cache of its own, so questions share no reading of chunks")
    if engines.get("block") is not None and engines.get("ape") is not None:
        found.append("each retrieved chunk is a row of its own (pced), so a question costs as many passes as chunks")
    if getattr(model.config, "attn_logit_softcapping", None):
        found.append("its soft-capped scores have no fast kernel: attention is a plain matrix product")
    return found
