"""What a model needs: the engines that run on it, bytes of KV per codec, memory, slow paths, and prefill operations.

The formula for operations counts multiplications and additions apart (APB, Table 6).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from ragkv.engines import engine_names, make_engine
from ragkv.engines.base import unsupported_reason
from ragkv.model.apb.document import BlockLayout
from ragkv.model.attention_hook import latent_bytes
from ragkv.model.checkpoint import computes_in
from ragkv.model.language_model import LanguageModel
from ragkv.model.self_check import load_model
from ragkv.store import KVIdentity, Store, codec_from_config, codec_names
from ragkv.types import Encoding

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV

_TOKENS = 256
"""Of the chunk that is encoded: as many as a chunk has by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequirements:
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
        fields = asdict(self)
        engines = fields.pop("engines")
        reasons = {name: reason for name, reason in engines.items() if reason is not None}
        verdicts = {name: "exact" if reason is None else "refused" for name, reason in engines.items()}
        return {**fields, "engines": verdicts, "reasons": reasons}


def model_requirements(name: str, *, dtype: str = "auto", device: str | None = None) -> ModelRequirements:
    """Load a model and look at it. Raises ModelLoadError or UnsupportedModelError for one that cannot be run."""
    model = load_model(name, dtype=dtype, device=device)
    engines = {each: unsupported_reason(make_engine(each, {}), model) for each in engine_names()}
    packed = model.checkpoint.quantised(model.device, model.revision)
    tokens = min(_TOKENS, model.max_positions or _TOKENS)
    ids = [i % min(model.config.vocab_size, 1000) for i in range(3, 3 + tokens)]
    kv, half = model.encode([ids, ids[: tokens // 2]])
    return ModelRequirements(
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
        found.append("every sequence continues from its own cache, so questions cannot share the reading of chunks")
    if engines.get("block") is not None and engines.get("ape") is not None:
        found.append("each retrieved chunk has a sequence of its own (pced), so a question costs a pass per chunk")
    if getattr(model.config, "attn_logit_softcapping", None):
        found.append("its soft-capped scores have no fast kernel: attention is a plain matrix product")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes of a decoder with gated feed-forward layers that its cost depends on."""

    layers: int
    hidden: int
    inner: int
    q_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> DecoderShape:
        """From a transformers configuration."""
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            q_heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )

    @property
    def width(self) -> int:
        """Of all query heads together: d of the formulas for attention."""
        return self.q_heads * self.head_dim

    @property
    def keys(self) -> int:
        """For the keys and values of one token in one layer."""
        return 4 * self.hidden * self.kv_heads * self.head_dim

    @property
    def token(self) -> int:
        """c: for one token in one layer, attention left out; 4d²(1+1/g) + 6dI where q_heads·head_dim is d."""
        return 4 * self.hidden * self.width + self.keys + 6 * self.hidden * self.inner


def _layers(shape: DecoderShape, tokens: int, pairs: float) -> float:
    """A pass for keys and values alone, with `pairs` of a query and a key it sees: the last layer makes only these."""
    return (shape.layers - 1) * (tokens * shape.token + 4 * shape.width * pairs) + tokens * shape.keys


def full_flops(shape: DecoderShape, tokens: int) -> float:
    """Plain causal attention over one sequence: L[n·c + 2d·n²], the last layer as in `apb_flops`."""
    return _layers(shape, tokens, tokens * tokens / 2)


def apb_flops(
    shape: DecoderShape,
    layout: BlockLayout,
    *,
    anchors: int = 1,
    compressor: float = 0,
    only: Iterable[int] | None = None,
) -> float:
    """All blocks together, or `only` these: L[(n + a·l_a)·c + 2d(Σ l_b² + a·l_a²) + 4d·Σ_h l_b·(l_a + passing) + R].

    `anchors` a: how often the anchor is computed. One process does it once; machines that share nothing but what is
    passed on do it H-1 times, which is the paper's formula, with (H-1)(l_a + l_b)². `compressor` R is what it costs per
    layer. The last layer makes keys and values and nothing else.
    """
    anchor = layout.anchor if layout.blocks > 1 else 0
    lengths = {block: len(layout.span(block)) for block in (range(layout.blocks) if only is None else only)}
    seen = sum(
        tokens * (layout.start + (anchor if block else 0) + layout.passing(block)) for block, tokens in lengths.items()
    )
    own = sum(tokens**2 for tokens in lengths.values()) / 2
    beside = anchors * anchor * (anchor / 2 + layout.start)
    tokens = sum(lengths.values()) + anchors * anchor
    return _layers(shape, tokens, seen + own + beside) + shape.layers * compressor


def passing_bytes(shape: DecoderShape, layout: BlockLayout, itemsize: int) -> int:
    """Bytes that one block passes on in all layers, keys and values, at most: 2·L·l_p·kv_heads·head_dim·itemsize."""
    return 2 * shape.layers * layout.lengths.passing * shape.kv_heads * shape.head_dim * itemsize
