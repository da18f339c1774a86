"""How transformers' layers call ragkv's attention: mask and attention functions, latent attention, family adapters.

The attention function is registered under one name. The backend is bound in a context variable around the forward pass:
threads do not see each other's, and no layer has to forward an argument (StableLM's and Nemotron's do not).

transformers states a layer's window twice: in the function that makes the mask, and, in most families, in the attention
call. Its eager and sdpa attention obey the mask alone, so the mask is authoritative (qwen2_moe and phimoe state their
windows nowhere else). ragkv builds no mask: its registered mask function returns a `Visible`, which the model's own
code passes on to the layers that the mask is for.

Latent attention (MLA, DeepSeek-V2 §2.1): all heads' keys and values are linear in one small vector per token. That
vector, after its norm, and one key with rotary positions are what transformers caches and ragkv stores: 576 numbers per
token and layer for DeepSeek-V3, instead of 40,960 expanded ones. Attention reads them as one key head that is its own
value. The matrix that would expand the keys is multiplied into the queries, and the one for the values into the result.
A chunk is placed by rotating the rope part of the queries; the rest of a score has no position.

On one layer of MiniCPM3 and of DeepSeek-V2-Lite (one CPU thread, 2,048 tokens of chunks), this takes 0.02 to 0.6 of
the time of expanding keys and values first for 1 to 64 queries, and the same time from about 200 queries on. A
sequence's own new tokens are read as latents too: expanding them would halve their attention's time, which is less than
2 % of the layer's in half types.

`adapt` routes the attention of families with code of their own (Falcon, GPT-J, CodeGen, GPT-NeoX Japanese) through the
attention function that the model is set to; with "eager" or "sdpa" they compute as before. `rotaries_of` finds a
model's rotary functions. How a family calls its rotation (queries and keys together, one of them, or a slice) is not
visible from outside, so every candidate is returned, and the self-check chooses the one that the model's keys obey.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ragkv.attention.partial import LayerCall
from ragkv.attention.rope import Rotary
from ragkv.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

# arguments that do not change what is visible: shapes, and how transformers builds the mask
_BUILDING = frozenset(
    {
        "batch_size",
        "q_length",
        "kv_length",
        "q_offset",
        "kv_offset",
        "allow_is_causal_skip",
        "allow_is_bidirectional_skip",
        "allow_torch_fix",
        "dtype",
        "config",
        "device",
        "cache_position",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """Takes the place of a layer's mask: a token sees the `window` last tokens up to itself; all of them if None.

    `rule` is transformers' own function of (batch, head, query, key) indices, which `require_rule` compares with it.
    """

    window: int | None
    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def visible(
    *,
    mask_function: Callable[..., Tensor],
    local_size: int | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **building: Any,
) -> Visible:
    """The registered mask function; transformers calls it once per kind of layer and forward pass.

    Raises UnsupportedModelError for a mask that the model has changed by functions of its own (`use_vmap`), for
    padding, and for an unknown argument.
    """
    if use_vmap:
        raise UnsupportedModelError("it changes its attention mask with its own functions")
    if attention_mask is not None:
        raise UnsupportedModelError("it builds its own padding mask")
    unknown = sorted(name for name in building.keys() - _BUILDING if not _neutral(building[name]))
    if unknown:
        raise UnsupportedModelError(f"its attention masks have arguments that ragkv does not know ({_list(unknown)})")
    return Visible(window=local_size, rule=mask_function)


def window_of(mask: object, named: int | None) -> int | None:
    """The layer's window as its mask states it; the attention call's own (`named`) must not contradict it."""
    if not isinstance(mask, Visible):
        raise UnsupportedModelError("its layers do not get the masks that transformers makes")
    if named is not None and named != mask.window:
        payload = "none" if mask.window is None else f"{mask.window} tokens"
        raise UnsupportedModelError(f"a layer names a window of {named} tokens, but its mask has {payload}")
    return mask.window


def require_rule(seen: Visible) -> None:
    """Compare transformers' function of indices with the window that came with it: UnsupportedModelError if they
    differ.

    The function is called near and far from the diagonal and from the window's edge, on both sides of each, for queries
    around every power of two. A chunked, bidirectional or otherwise changed mask differs somewhere there.
    """
    if seen.window is not None and seen.window < 1:
        raise UnsupportedModelError(f"a layer has a sliding window of {seen.window} tokens, so that it sees nothing")
    reach = seen.window or 4096
    near = torch.tensor([-2, -1, 0, 1, 2])
    behind = torch.cat([near, reach + near, 2 * reach + near, torch.tensor([3 * reach + 5, 40 * reach])])
    round_numbers = (2 ** torch.arange(3, 21))[:, None] + near  # (18, 5)
    queries = torch.cat([torch.arange(8), reach + near, 3 * reach + near, torch.tensor([41 * reach])])
    queries = torch.cat([queries.clamp_min(0), round_numbers.flatten()])
    query = queries[:, None].expand(-1, len(behind))  # (queries, keys)
    key = query - behind
    query, key = query[key >= 0], key[key >= 0]
    zero = torch.zeros_like(query)
    try:
        visible = seen.rule(zero, zero, query, key)
    except IndexError as error:  # it indexes something by the tokens of this very input
        raise UnsupportedModelError("its attention mask depends on more than positions") from error
    expected = key <= query
    if seen.window is not None:
        expected &= key > query - seen.window
    if not torch.equal(torch.as_tensor(visible).expand_as(expected).cpu(), expected):
        kind = "causal" if seen.window is None else f"a causal window of {seen.window} tokens"
        raise UnsupportedModelError(f"its attention mask is not {kind}")


def require_neutral(arguments: dict[str, Any]) -> None:
    """Refuse arguments of an attention call that would change its result, naming them: UnsupportedModelError."""
    unknown = sorted(name for name, value in arguments.items() if name not in _NO_MATTER and not _neutral(value))
    for name in unknown:
        if name in _REASONS:
            raise UnsupportedModelError(_REASONS[name])
    if unknown:
        raise UnsupportedModelError(f"its attention has arguments that ragkv does not know ({_list(unknown)})")


_REASONS = {
    "position_bias": "its attention adds a bias to each pair of positions",
    "dropout": "its attention drops weights at random",
}
# positions are the request's own; the optional extra outputs do not change the result
_NO_MATTER = frozenset(
    {
        "position_ids",
        "logits_to_keep",
        "num_items_in_batch",
        "use_cache",
        "output_attentions",
        "output_router_logits",
        "output_hidden_states",
    }
)


def _neutral(value: object) -> bool:
    return value is None or value is False or (isinstance(value, int | float) and value == 0)


def _list(names: list[str]) -> str:
    return ", ".join(names)


NAME = "ragkv"


class AttentionBackend(Protocol):
    """Computes the attention of a forward pass: a `Step`, or the slow reference of the self-check."""

    def attend(self, call: LayerCall) -> Tensor:
        """The layer's output, `(batch, q_heads, n, head_dim)`."""
        ...


class LayerMask(NamedTuple):
    """What one layer's mask lets a token see in a pass."""

    layer: int
    visible: Visible


@dataclass(frozen=True, slots=True)
class _Pass:
    attending: AttentionBackend
    seen: list[LayerMask] | None


_running: ContextVar[_Pass | None] = ContextVar("ragkv_running", default=None)


@contextmanager
def attention_backend(by: AttentionBackend, *, seen: list[LayerMask] | None = None) -> Iterator[None]:
    """Forward passes in this thread attend by `by`; every layer appends to `seen` what the self-check reads."""
    token = _running.set(_Pass(by, seen))
    try:
        yield
    finally:
        _running.reset(token)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: `(batch, heads, n, head_dim)` in, `(batch, n, heads, head_dim)` out."""
    running = _running.get()
    if running is None:
        raise UnsupportedModelError("its attention was called outside of ragkv's forward pass")
    if is_causal is False:
        raise UnsupportedModelError("its attention is not causal")
    require_neutral(others)
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise UnsupportedModelError("its attention sinks are not one number per head")
    window = window_of(attention_mask, sliding_window)
    layer: int = module.layer_idx  # type: ignore[assignment]
    if running.seen is not None and attention_mask is not None:
        running.seen.append(LayerMask(layer, attention_mask))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = LayerCall(
        layer=layer, query=query, key=key, value=value, scale=scale, softcap=softcap, window=window, sink=s_aux
    )
    out = running.attending.attend(call)
    return out.transpose(1, 2).contiguous(), None


def attend_by_ragkv(model: Any) -> None:
    """Have a transformers model call ragkv's attention function and mask function."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, visible)
    model.set_attn_implementation(NAME)


class LatentProjection:
    """One layer's mapping between heads and latents. `module` is an attention module of transformers.

    UnsupportedModelError if its keys are expanded by anything else than a matrix.
    """

    def __init__(self, module: Any) -> None:
        try:
            self._project, self._rank, self._nope = module.kv_b_proj, module.kv_lora_rank, module.qk_nope_head_dim
            self._width = self._nope + module.v_head_dim
        except AttributeError as error:
            raise UnsupportedModelError(f"its latent attention does not have the usual modules ({error})") from error
        self._module = module
        # a quantised matrix is unpacked once, into the dtype that it computes with
        self._unpacked = None if _plain(self._project) else _matrix(self._project, self._rank, module)

    @property
    def weight(self) -> Tensor:
        """`(q_heads, nope + value_dim, rank)`, by which the layer expands a latent now: training changes it in place,
        and an adapter (LoRA) puts another module in its place.
        """
        project = self._module.kv_b_proj
        if _plain(project):
            matrix: Tensor = project.weight.detach()
        elif self._unpacked is not None and project is self._project and not _hooked(project):
            matrix = self._unpacked
        else:
            matrix = _matrix(project, self._rank, self._module)
        return matrix.view(-1, self._width, self._rank)

    def keys(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `(1, 1, n, rank + rope)` and values from what the layer caches; values are columns of the keys, so their
        width is 0.
        """
        key = torch.cat([latent, rope], -1)
        return key, key[..., :0]

    def queries(self, query: Tensor) -> Tensor:
        """Queries for such keys, `(1, q_heads, n, rank + rope)`, from queries for expanded keys."""
        return torch.cat([query[..., : self._nope] @ self.weight[:, : self._nope], query[..., self._nope :]], -1)

    def values(self, out: Tensor) -> Tensor:
        """The heads' attention output, `(1, q_heads, n, value_dim)`, from weighted sums of latent keys."""
        latent, expand = out[..., : self._rank], self.weight[:, self._nope :]
        if latent.dtype == torch.float32:
            return latent @ expand.transpose(-1, -2)
        # in half types a CPU multiplies by a transposed matrix four times slower
        return (expand @ latent.transpose(-1, -2)).transpose(-1, -2)


def latents_of(model: nn.Module) -> dict[int, LatentProjection]:
    """The projections of the layers that have latent attention."""
    modules = (module for module in model.modules() if hasattr(module, "expand_kv"))
    return {module.layer_idx: LatentProjection(module) for module in modules}  # type: ignore[misc]


def _plain(project: Any) -> bool:
    """Whether it is a plain linear layer without hooks or packing."""
    plain = type(project) is nn.Linear and not _hooked(project) and getattr(project, "bias", None) is None
    return plain and type(project.weight.data) is Tensor


def _hooked(project: nn.Module) -> bool:
    return bool(project._forward_hooks or project._forward_pre_hooks)


def _matrix(project: nn.Module, rank: int, module: nn.Module) -> Tensor:
    """`(out, rank)`: the matrix of the linear map `project`, from its output for unit vectors."""
    like = next(p for p in module.parameters() if p.is_floating_point() and p.itemsize > 1)
    with torch.no_grad():
        units = torch.eye(rank + 1, rank, dtype=like.dtype, device=like.device)  # the last row is the zero vector
        *made, nothing = project(units[None])[0]
    if nothing.any():
        raise UnsupportedModelError("its latent attention expands keys with more than a matrix")
    return torch.stack(made, -1)


def latent_bytes(config: Any, itemsize: int) -> tuple[int, int]:
    """Bytes of one token's KV in all layers, as latents and as expanded keys and values."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    kept = config.kv_lora_rank + config.qk_rope_head_dim
    expanded = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return layers * kept * itemsize, layers * expanded * itemsize


class LatentAttention:
    """Attention over latents by `step`, in the layers that have them; `cache` receives what these layers keep."""

    def __init__(self, step: AttentionBackend, latents: Mapping[int, LatentProjection], cache: Any) -> None:
        self._step = step
        self._latents = latents
        self._cache = cache

    def attend(self, call: LayerCall) -> Tensor:
        """As `AttentionBackend.attend`, of queries, keys and values of all heads."""
        latent = self._latents.get(call.layer)
        if latent is None:
            return self._step.attend(call)
        if self._cache.given is None or self._cache.given[0] != call.layer:
            raise UnsupportedModelError(f"layer {call.layer} passes no latents to its cache")
        key, value = latent.keys(*self._cache.given[1:])
        absorbed = replace(call, query=latent.queries(call.query), key=key, value=value)
        return latent.values(self._step.attend(absorbed))


def rotated_last(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last elements of `states` `(batch, heads, n, head_dim)` rotated, in the half-split layout.

    transformers' rotation leaves them in this layout, whichever one they had before.
    """
    return _last(states, cos, sin, _apart)


def rotated_last_in_pairs(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in the interleaved layout, where transformers rotates complex numbers."""
    return _last(states, cos, sin, _beside)


def _last(states: Tensor, cos: Tensor, sin: Tensor, quarter: Callable[[Tensor], Tensor]) -> Tensor:
    rank = states.shape[-1] - cos.shape[-1]
    rope = states[..., rank:]
    return torch.cat([states[..., :rank], rope * cos[:, None] + quarter(rope) * sin[:, None]], -1)


def _apart(rope: Tensor) -> Tensor:
    first, second = rope.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _beside(rope: Tensor) -> Tensor:
    return torch.stack([-rope[..., 1::2], rope[..., ::2]], -1).flatten(-2)


def adapt_falcon(model: Any) -> bool:
    """Replace the forward of the attention modules of a Falcon `model` with RoPE, in place; whether there are any.

    Its own code attends inline, so this repeats its forward with a call of the attention function.
    """
    modules = [module for module in model.modules() if type(module).__name__ == "FalconAttention"]
    if not modules or model.config.alibi:
        return False
    for module in modules:
        module.forward = MethodType(_forward, module)
    return True


def _forward(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Any,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: Any = None,
    **others: Any,
) -> tuple[Tensor, Any]:
    name = module.config._attn_implementation
    if name in ("eager", "sdpa"):
        given = (hidden_states, alibi, attention_mask, position_ids, layer_past, use_cache, output_attentions)
        found: tuple[Tensor, Any] = type(module).forward(module, *given, position_embeddings, **others)
        return found
    query, key, value = module._split_heads(module.query_key_value(hidden_states))  # (batch, n, heads, head_dim)
    if module.new_decoder_architecture:  # it repeats each key head for its query heads
        groups = module.num_heads // module.num_kv_heads
        key, value = key[:, :, ::groups], value[:, :, ::groups]
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    apply = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = apply(query, key, *position_embeddings)
    out, weights = _attention_function(name)(module, query, key, value, attention_mask, scaling=module.head_dim**-0.5)
    return module.dense(out.flatten(2)), weights


def tabled(attention: Any, apply: Callable[..., Tensor], layers: int) -> Rotary | None:
    """The rotation of GPT-J and CodeGen, which keep a table of sine and cosine per position in each layer.

    None for an attention without such a table `embed_positions` `(positions, rotary_dim)`.
    """
    if not isinstance(getattr(attention, "embed_positions", None), Tensor):
        return None

    def angles(positions: Tensor, _kind: str) -> tuple[Tensor, Tensor]:
        found = attention.embed_positions.to(positions.device)[positions.abs()]  # sines, then cosines
        sin, cos = found.float().chunk(2, -1)
        return cos, sin * positions.sign()[..., None]

    def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = 2 * cos.shape[-1]
        moved = apply(states[..., :width].transpose(1, 2), sin, cos).transpose(1, 2)  # takes (batch, n, heads, d)
        return torch.cat([moved, states[..., width:]], -1)

    return Rotary(apply=rotate, angles=angles, kinds=("default",) * layers)


_SIGNATURE = ["query", "key", "value", "attention_mask"]


def adapt_inner(model: Any) -> bool:
    """Replace `self._attn(query, key, value, attention_mask)` in every such module, in place; whether there are any.

    GPT-J, CodeGen and GPT-NeoX Japanese have such a method, which only attends.
    """
    adapted = False
    for module in model.modules():
        method = getattr(type(module), "_attn", None)
        if not hasattr(module, "layer_idx") or method is None:
            continue
        if list(inspect.signature(method).parameters)[1:] != _SIGNATURE or _has_masks(module):
            continue
        module._ragkv = (model.config, _scale(module))
        module._attn = MethodType(_attend, module)
        adapted = True
    return adapted


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, Any]:
    """`(batch, heads, n, head_dim)` in and out, like the family's method."""
    config, scale = module._ragkv
    name = config._attn_implementation
    if name in ("eager", "sdpa"):
        found: tuple[Tensor, Any] = type(module)._attn(module, query, key, value, attention_mask)
        return found
    out, weights = _attention_function(name)(module, query, key, value, attention_mask, scaling=scale)
    return out.transpose(1, 2), weights


def _attention_function(name: str) -> Callable[..., tuple[Tensor, Any]]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: Callable[..., tuple[Tensor, Any]] = ALL_ATTENTION_FUNCTIONS[name]
    return function


def _has_masks(module: nn.Module) -> bool:
    """Whether the module holds a mask table over pairs of positions, which could hide arbitrary ones (GPT-Neo)."""
    return any(b.ndim >= 2 and b.shape[-1] == b.shape[-2] for b in module.buffers(recurse=False))


def _scale(module: Any) -> float:
    """The factor of the attention scores; the self-check would notice a wrong one."""
    divisor: Any = getattr(module, "scale_attn", getattr(module, "norm_factor", 1.0))
    return 1 / float(divisor)


Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(states `(batch, heads, n, head_dim)`, cos, sin `(batch, n, rotary_dim)`) -> states, rotated."""


def rotations_of(apply: Callable[..., Any]) -> tuple[Rotation, ...]:
    """The ways in which a family's `apply_rotary_pos_emb` may have to be called, the usual one first."""

    def pair(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated: Tensor = apply(states, states[:, :1], cos, sin)[0]
        return rotated

    def lone(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # Gemma 3n, Gemma 4
        rotated: Tensor = apply(states, cos, sin)
        return rotated

    return pair, lone, _sliced(pair), _sliced(lone)


def _sliced(rotation: Rotation) -> Rotation:
    """`rotation` applied only to the leading dimensions that have angles (Phi, Persimmon, StableLM)."""

    def first(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = cos.shape[-1]
        return torch.cat([rotation(states[..., :width], cos, sin), states[..., width:]], -1)

    return first


def adapt(model: Any) -> None:
    """Route the attention of families that have their own code through transformers' interface, in place.

    With its own attention ("eager", "sdpa") the model computes as before.
    """
    if not (adapt_inner(model) | adapt_falcon(model)):
        return
    for module in model.modules():
        if hasattr(module, "set_attn_implementation"):  # it searches the family's source for the interface
            module._can_set_attn_implementation = _yes


def read_whole(model: Any, name: str) -> None:
    """Make BigBird attend to all tokens, in place.

    With more than 704 tokens, transformers uses sparse attention until the model has once read fewer, and then never
    again. So an answer would depend on what was read before.
    """
    for module in model.modules():
        if getattr(module, "attention_type", None) == "block_sparse":  # the decoder's own setting, which comes first
            module.set_attention_type("original_full")
            logger.warning("Model %r attends to all tokens (original_full), not sparsely (block_sparse).", name)
            return


def _yes() -> bool:
    return True


def rotaries_of(model: Any, config: Any) -> tuple[Rotary, ...]:
    """The candidates for the model's RoPE, the usual one first; empty if there is none.

    The self-check chooses the one that the keys obey, and finds the layers that have no RoPE.
    """
    decoder = model.get_decoder()
    if next(_attentions(decoder), None) is None:  # ModernBERT has another module under that name
        decoder = model
    embedding = _embedding(decoder)
    attention = next(_attentions(decoder), None)
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    layers = config.num_hidden_layers
    if apply is not None and (table := tabled(attention, apply, layers)) is not None:
        return (table,)
    if any(hasattr(module, "expand_kv") for module in decoder.modules()):  # latent attention
        rotations: tuple[Rotation, ...] = (rotated_last, rotated_last_in_pairs)
    else:
        rotations = () if apply is None else rotations_of(apply)
    if embedding is None or not rotations:
        return ()
    typed = "layer_type" in inspect.signature(embedding.forward).parameters
    width = torch.zeros(1, device=model.device)

    def scaled(positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        found = embedding(width, positions, kind) if typed else embedding(width, positions)
        if isinstance(found, Tensor):  # complex numbers, one for each pair (DeepSeek V2)
            return found.real.repeat_interleave(2, -1), found.imag.repeat_interleave(2, -1)
        cos, sin = found
        return cos, sin

    def angles(positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        cos, sin = scaled(positions.to(width.device), kind)
        # a family may scale both; the cosine at position 0 is that factor
        one, _ = scaled(torch.zeros((1, 1), dtype=torch.long, device=width.device), kind)
        return (cos / one).to(positions.device), (sin / one).to(positions.device)

    kinds: tuple[str | None, ...] = tuple(config.layer_types[:layers]) if typed else ("default",) * layers
    return tuple(Rotary(apply=rotation, angles=angles, kinds=kinds) for rotation in rotations)


def head_dim(config: Any) -> int:
    """The width of a key by the configuration."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotary_of(config: Any) -> Rotary:
    """A model's RoPE from its configuration alone, where another program runs the model (`ragkv.integrations.vllm`)."""
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size, small.pad_token_id = 1, 8, None
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    model.to_empty(device="cpu")  # memory that nothing writes to
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config)
    probe = torch.zeros((1, 2, 3, head_dim(config)))
    for rotary in rotaries_of(model, config):
        with suppress(
            TypeError, RuntimeError, ValueError, LookupError, AttributeError
        ):  # another family's way to call it
            if rotary.rotate(probe, 0, torch.arange(3)[None]).shape == probe.shape:
                return rotary
    raise UnsupportedModelError(f"how the family {config.model_type} rotates its keys is not known")


def without_rotary(layers: int) -> Rotary:
    """The `Rotary` of a model whose queries are never rotated."""

    def none(states: Tensor, *_: object) -> Tensor:
        raise AssertionError("no layer of this model has a rotation")

    return Rotary(apply=none, angles=none, kinds=(None,) * layers)  # type: ignore[arg-type]


def _attentions(decoder: nn.Module) -> Iterator[nn.Module]:
    """The attention modules, which carry their layer's index."""
    for module in decoder.modules():
        if hasattr(module, "layer_idx") and "Attention" in type(module).__name__:
            yield module


def _embedding(decoder: nn.Module) -> Any:
    """The module that computes cos and sin from positions: the model's own, or that of the first layer."""
    named = (module for name, module in decoder.named_modules() if name.rpartition(".")[2] == "rotary_emb")
    return getattr(decoder, "rotary_emb", None) or next(named, None)
