"""Compressors choose which keys and values of a block are passed on: a score per token, layer and kv head (§3.4).

`KeyNorm`, `Random` and `AttentionScore` need no training. `Heads` uses trained retaining heads (Locret; APB §3.4), a
small scorer for each layer beside a frozen model: s = fc2(SiLU(fc1([Q; K; V]))), one number per kv head, of the flat
projections without positions; APB takes the highest of five neighbouring scores (`pool`). Queries and keys are those of
attention, rotated back to position 0, so models that normalise them (Qwen3, Gemma 3) give the normalised ones.

The checkpoint of the heads is one safetensors file: `layers.<l>.fc1` `(inner, (q_heads + 2·kv_heads)·head_dim)` and
`layers.<l>.fc2` `(kv_heads, inner)` for each layer that has keys of its own, in one float type. Its metadata are
`format` = "ragkv-retaining-heads-1", `model`, the digest of the checkpoint that they were trained for, and `pool`, an
odd number. A file without `model` is checked by its shapes alone; one without `pool` has the paper's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ragkv.errors import ModelLoadError
from ragkv.util.files import replace_plain, require_plain

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel

_TIE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTokens:
    """The tokens of a block that may be passed on, in one layer.

    `query` `(q_heads, n, head_dim)`, `key` and `value` `(kv_heads, n, head_dim)` as attention gets them, rotated for
    the positions from `position` on. `unrotated()` gives query and key without their positions.
    """

    layer: int
    position: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    unrotated: Callable[[], tuple[Tensor, Tensor]]

    @property
    def tokens(self) -> int:
        return self.key.shape[1]


class Compressor(Protocol):
    """Scores tokens; those with the highest scores are passed on. It is deterministic, in every process."""

    def identity(self) -> str:
        """Everything besides the block that its choice depends on: part of the store key of blocks."""

    def scores(self, local: BlockTokens) -> Tensor:
        """`(kv_heads, n)` in fp32."""


def chosen(compressor: Compressor, local: BlockTokens, most: int) -> Tensor:
    """The indices of the `most` best tokens per kv head, ascending, `(kv_heads, most)`; the first among equals."""
    scores = compressor.scores(local).float()
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :most]
    return best.sort(-1).values


@dataclass(frozen=True, slots=True)
class KeyNorm:
    """Keys of small norm attract attention (Devoto et al. 2024), so they are passed on. No training, no question.

    It is of little use to models that normalise all keys of a head (Qwen3, Gemma 3). Processors round differently, so
    norms within a millionth of their neighbour count as equal and are ordered by token, on every machine.
    """

    def identity(self) -> str:
        return "key-norm-2"

    def scores(self, local: BlockTokens) -> Tensor:
        norms = torch.linalg.vector_norm(local.key, dim=-1, dtype=torch.float64)
        rising, order = norms.sort(-1)
        larger = rising.diff(dim=-1) > _TIE * rising[:, 1:]
        ranks = torch.zeros_like(order)
        ranks.scatter_(-1, order[:, 1:], larger.cumsum(-1))
        return -ranks.float()


@dataclass(frozen=True, slots=True)
class Random:
    """Random tokens: the paper's ablation ("Rd.", Table 3). The same ones whenever a block is encoded."""

    seed: int = 0

    def identity(self) -> str:
        return f"random-{self.seed}"

    def scores(self, local: BlockTokens) -> Tensor:
        result = f"{self.seed} {local.layer} {local.position}".encode()
        seed = int.from_bytes(hashlib.blake2b(result, digest_size=7).digest(), "little")
        drawn = torch.rand(local.key.shape[:2], dtype=torch.float32, generator=torch.Generator().manual_seed(seed))
        return drawn.to(local.key.device)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionScore:
    """The highest attention logit of a token over the question's tokens and the heads of its group.

    Retaining heads are trained to predict it (Locret), from queries of a question that has seen only the prompt's
    prefix. `queries[layer]` is `(q_heads, l_q, head_dim)`, rotated to the question's position.
    """

    queries: Mapping[int, Tensor]
    question: str = ""

    def identity(self) -> str:
        return f"attention-{self.question}"

    def scores(self, local: BlockTokens) -> Tensor:
        return highest_logits(self.queries[local.layer], local.key, local.scale)


def highest_logits(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """For each key, the highest logit before the softmax over the queries of its group, `(kv_heads, n)` in fp32.

    `query` `(q_heads, m, head_dim)` and `key` `(kv_heads, n, head_dim)`, both rotated to their positions.
    """
    asking = query.float().reshape(key.shape[0], -1, query.shape[-1])  # (kv_heads, g·m, head_dim)
    logits: Tensor = asking @ key.float().transpose(-1, -2) * scale
    return logits.amax(1)


FORMAT = "ragkv-retaining-heads-1"
INNER = 1024
"""The papers' inner width."""
POOL = 5
"""The paper's pooling width: a token gets the highest of this many neighbouring scores; 1 does not pool."""
_MOST_INNER = 1 << 16
_DTYPES = frozenset({"F32", "BF16", "F16"})


class RetainingHeads(nn.Module):
    """The trainable heads of all layers: `widths[l]` is (flat width of Q, K and V, kv heads) of layer l."""

    def __init__(self, widths: Mapping[int, tuple[int, int]], inner: int = INNER) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {
                str(layer): nn.ModuleDict(
                    {"fc1": nn.Linear(wide, inner, bias=False), "fc2": nn.Linear(inner, kv_heads, bias=False)}
                )
                for layer, (wide, kv_heads) in widths.items()
            }
        )

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Scores `(kv_heads, n)` of `query` `(q_heads, n, head_dim)`, `key`, `value` `(kv_heads, n, head_dim)`.

        Query and key are without positions; no pooling.
        """
        head = self.layers[str(layer)]
        flat = torch.cat([states.transpose(0, 1).flatten(1) for states in (query, key, value)], -1)
        hidden = nn.functional.silu(head["fc1"](flat.to(head["fc1"].weight.dtype)))  # type: ignore[index]
        scores: Tensor = head["fc2"](hidden)  # type: ignore[index]
        return scores.T

    def save(self, path: Path, model: str | None = None, *, pool: int = POOL) -> None:
        """Write the checkpoint; `model` is `Checkpoint.digest` of the model that the heads were trained for."""
        tensors = {name.removesuffix(".weight"): weight.contiguous() for name, weight in self.state_dict().items()}
        facts = {"format": FORMAT, "pool": str(pool)} | ({} if model is None else {"model": model})
        replace_plain(path, pack_tensors(tensors, facts))


def pack_tensors(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    """A safetensors file with its header in a fixed order; safetensors writes metadata in a different order each time.

    Stored KV refers to trained heads by their file's digest.
    """
    file = save(dict(tensors), dict(facts))
    end = 8 + int.from_bytes(file[:8], "little")
    header = json.dumps(json.loads(file[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # tensors are aligned
    return len(header).to_bytes(8, "little") + header + file[end:]


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """Trained retaining heads as a compressor; `digest` is that of their file, `pool` an odd number."""

    heads: RetainingHeads
    digest: str
    pool: int = POOL

    def identity(self) -> str:
        return f"heads-{self.digest}"

    @torch.inference_mode()
    def scores(self, local: BlockTokens) -> Tensor:
        query, key = local.unrotated()
        scores = self.heads(local.layer, query, key, local.value).float()
        pooled: Tensor = nn.functional.max_pool1d(scores[None], self.pool, stride=1, padding=self.pool // 2)[0]
        return pooled


def widths_of(model: LanguageModel) -> dict[int, tuple[int, int]]:
    """The widths of `RetainingHeads` for this model; ModelLoadError for latent attention, which has no keys."""
    q_heads = model.config.num_attention_heads
    widths = {}
    for layer, (kv_heads, key_dim, value_dim) in enumerate(model.kv_shape.layers):
        if layer in model.shared:
            continue
        if not value_dim:
            raise ModelLoadError(f"Model {model.checkpoint.name!r} keeps latents: retaining heads cannot score them.")
        widths[layer] = (q_heads * key_dim + kv_heads * (key_dim + value_dim), kv_heads)
    return widths


def load_heads(path: Path, model: LanguageModel) -> Heads:
    """The heads in an untrusted file; ModelLoadError, with the reason, if they do not fit this model.

    Names, shapes and types are compared with the model's before any data is read.
    """
    try:
        if not require_plain(path):
            raise ModelLoadError(f"There are no retaining heads at {path}; choose another compressor for apb.")
        with safe_open(path, framework="pt") as file:
            inner = _checked(path, file, widths_of(model))
            facts = file.metadata()
            trained_for, pool = facts.get("model"), facts.get("pool", str(POOL))
            tensors = {f"layers.{name}.weight": file.get_tensor(f"layers.{name}") for name in inner[1]}
        digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"The retaining heads at {path} cannot be read ({error}).") from error
    if trained_for is not None and trained_for != model.checkpoint.digest(model.revision):
        raise ModelLoadError(
            f"The retaining heads at {path} were trained for another model than {model.checkpoint.name!r}; train them "
            "for it by: python -m ragkv.benchmarks.training.retaining_heads."
        )
    if not (pool.isdecimal() and pool.isascii() and len(pool) < 4 and int(pool) % 2):
        result = f"The retaining heads at {path} pool {pool[:20]!r} scores"
        raise ModelLoadError(f"{result}; only an odd number has a middle.")
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ModelLoadError(f"The retaining heads at {path} hold numbers that are not finite.")
    with torch.device("meta"):
        heads = RetainingHeads(widths_of(model), inner[0])
    heads.load_state_dict(tensors, assign=True)
    return Heads(heads.requires_grad_(False).to(model.device).eval(), digest, int(pool))


def _checked(path: Path, file: Any, widths: Mapping[int, tuple[int, int]]) -> tuple[int, list[str]]:
    """The inner width of the heads in a file, and the names of their matrices; ModelLoadError if they do not fit."""
    if (file.metadata() or {}).get("format") != FORMAT:
        raise ModelLoadError(f"{path} is not a file of retaining heads ({FORMAT}).")
    names = [f"{layer}.{part}" for layer in widths for part in ("fc1", "fc2")]
    if sorted(file.keys()) != sorted(f"layers.{name}" for name in names):
        raise ModelLoadError(f"The retaining heads at {path} are for other layers than the model's.")
    inner: set[int] = set()
    kinds: set[str] = set()
    for layer, (wide, kv_heads) in widths.items():
        first, second = (file.get_slice(f"layers.{layer}.{part}") for part in ("fc1", "fc2"))
        kinds |= {first.get_dtype(), second.get_dtype()}
        shapes = [list(each.get_shape()) for each in (first, second)]
        inner |= {shape[0] for shape in shapes[:1] if shape} | {shape[-1] for shape in shapes[1:] if shape}
        if len(inner) != 1 or shapes != [[*inner, wide], [kv_heads, *inner]] or max(inner) > _MOST_INNER:
            raise ModelLoadError(f"The retaining heads at {path} do not fit layer {layer} of the model.")
    if len(kinds) != 1 or not kinds <= _DTYPES:
        raise ModelLoadError(f"The retaining heads at {path} are not all of one float type.")
    return inner.pop(), names
