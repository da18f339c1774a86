"""Try ragkv with a small random model of every decoder family of transformers (`make models`).

A family's default configuration is shrunk field by field: only fields that it has are set, so a new family needs no
line here unless its fields depend on each other. Each engine's greedy tokens are compared with dense forwards of
transformers over whole sequences, without a cache. This reference is independent of the self-check: `full` and `pced`
run the family's own code. `block` and `ape` need masks and weights of their own, so their attention is written out here
with the windows of the masks that transformers makes, and it is compared with the family's eager attention first.

Several models of a family are tried. Families are tried in separate processes, so that a crash or a hang only costs the
family its row.
"""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ragkv.engines.base import ContextChunk, Engine, Request, make_engine, require_supported
from ragkv.errors import ConfigError, ModelLoadError, UnsupportedModelError
from ragkv.mini import lm_path
from ragkv.model.attention_hook import adapt
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.language_model import LanguageModel
from ragkv.model.loading import quiet_loading
from ragkv.model.self_check import load_checked
from ragkv.runtime import Stream, runtime_of
from ragkv.types import Encoding
from ragkv.util.display import first_sentence

VOCABULARY = 320

SIZES: tuple[dict[str, int], ...] = (
    {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "inner": 96, "experts": 4},
    {"hidden": 96, "heads": 6, "kv_heads": 3, "head_dim": 32, "inner": 64, "experts": 6},
)

# a field, by any of its names in the families -> its size here
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "hidden_dim"),
    "heads": (
        "num_attention_heads",
        "n_head",
        "num_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
    ),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "inner": (
        "intermediate_size",
        "ffn_hidden_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "expert_dim",
        "kv_channels",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "prefix_dense_intermediate_size",
        "dense_intermediate_size",
    ),
    "experts": (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
    ),
}
_FIXED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "rotary_dim": 8,
    "index_topk": 48,  # fewer than a prompt's tokens, so that the index has to choose
    "use_sliding_window": True,
    "is_decoder": True,
    "max_window_layers": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "query_pre_attn_scalar": 24,
    "attention_multiplier": 0.2,  # its default makes scores so sharp that fp32 itself is coarse
}

# latent attention has widths of its own, and as many key heads as query heads after expansion
_LATENT = {"kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14}

# fields that only make sense together in one family
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 4}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_d_state": 16, "mamba_chunk_size": 16}
_DELTA = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "head_dim": 8,
    "v_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
}
_EQUAL_HEADS = frozenset({"bailing_hybrid", "kimi_linear"})  # as many key heads as query heads
_NARROW = {"global_head_dim": 32}  # its default makes scores too sharp for fp32 as well
_NOTE = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 20,
    **{f"swa_{name}": width for name, width in _LATENT.items()},
}
_INDEXED = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "ngram_vocab_size_base": 1000,
    "split_ngram_parts": 1,
}
_MINIMAX = ("full_attn_beta_factor", "linear_attn_beta_factor", "mlp_beta_factor")
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _DELTA | {"layer_group_size": 4, "num_expert_group": 1},
    "bamba": _MAMBA | {"attn_layer_indices": [1, 5]},
    "codegen": {"n_head": 4, "num_attention_heads": 4},  # its number of heads is a multiple of 4
    "dbrx": {
        **dict.fromkeys(("d_model", "hidden_size"), 64),
        **dict.fromkeys(("n_heads", "num_attention_heads"), 4),
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "diffllama": {"num_key_value_heads": 2},  # an even number, because it halves them
    "dots3_note_text": _NOTE,
    "falcon_h1": _MAMBA | {"mamba_d_ssm": None},
    "granitemoehybrid": _MAMBA
    | {"layer_types": ["linear_attention", "full_attention"] * 4, "position_embedding_type": "rope"},
    "hrm_text": {"num_hidden_layers": 2},  # it runs them eight times, and rounding grows each time
    "kimi_linear": _DELTA,
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "mamba2": {"head_dim": 32, "state_size": 16, "chunk_size": 16, "n_groups": 2},
    "mimo_v2_flash": {"head_dim": 24},  # it rotates a third of it, which must be an even number
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention"] * 2 + ["minimax_m3_sparse"] * 6,
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6,
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "ministral": _MIXED,
    # its default residuals let rounding grow tenfold in eight layers
    "minimax": {"block_size": 16} | dict.fromkeys(_MINIMAX, 0.3),
    "qwen4_exp": _INDEXED,
    "qwen4_exp_text": _INDEXED,
    "reformer": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "attention_head_size": 16,
        "axial_pos_embds_dim": [16, 48],
        "axial_pos_shape": [16, 32],
        "attn_layers": ["local", "lsh"] * 4,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 4, "n_mamba_heads": 8, "mamba_d_state": 16, "chunk_size": 16},
    "zaya": {"num_experts_per_tok": 1},
    "cohere_compass_text": _MIXED | {"rope_parameters": dict.fromkeys(_MIXED["layer_types"], _ROPE)},
    "gpt_neo": {"attention_types": [[["global", "local"], 4]], "window_size": 24},
    "helium": {"head_dim": 16},
    "gemma3n_text": _MIXED | {"num_kv_shared_layers": 4},
    "gemma4": _NARROW,
    "gemma4_unified": _NARROW,
    "gemma4_unified_text": _NARROW,
    "gemma4_text": _MIXED | _NARROW | {"num_kv_shared_layers": 4},
    "laguna": _MIXED,
    "mellum": _MIXED,
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}


def families() -> list[str]:
    """Every model type of AutoModelForCausalLM."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(model_type: str, *, size: int = 0, window: int = 24, layers: int = 8, **changes: Any) -> Any:
    """The family's configuration, shrunk; windows, where it has them, are `window` tokens."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    default = config_class()
    text = default.get_text_config(decoder=True)
    # an encoder-decoder's generic names are those of its encoder
    known = vars(default) if default.is_encoder_decoder else text.to_dict() | dict.fromkeys(text.attribute_map)
    wanted: dict[str, Any] = dict(_FIXED)
    for kind, names in _NAMES.items():
        wanted |= dict.fromkeys(names, SIZES[size % len(SIZES)][kind])
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"):
        wanted[name] = layers
    if "sliding_window" in known:
        wanted["sliding_window"] = window
    if "kv_lora_rank" in known:
        wanted |= _LATENT | dict.fromkeys(_NAMES["kv_heads"], wanted["num_attention_heads"])
        wanted["head_dim"] = wanted["qk_rope_head_dim"]
    fields = {name: value for name, value in wanted.items() if name in known}
    if default.is_encoder_decoder:  # the encoder is only as deep as the decoder if that is the family's default
        for name in {"encoder_layers", "num_encoder_layers"} & known.keys():
            fields[name] = layers if known[name] == known[name.replace("encoder", "decoder")] else layers // 2
    if model_type in _EQUAL_HEADS:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if "index_block_size" in known:  # each head of keys has an index of its own
        fields["index_n_heads"] = fields["num_key_value_heads"]
    fields |= _OWN.get(model_type, {}) | changes
    parts = {key: part for key, part in vars(default).items() if hasattr(part, "get_text_config")}
    key = next((key for key, part in parts.items() if part is text), None)
    if key is None:  # no part of it is the text model; an encoder-decoder makes such a part up on request
        return config_class(**fields)
    config = config_class()
    for name, part in parts.items():
        setattr(config, name, type(part)(**(fields if name == key else _seeing(part, wanted))))
    return config


def _seeing(part: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Fields of the vision or audio part of a configuration, which text never reaches: as small as possible."""
    known = part.to_dict()
    kept = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
    return {name: value for name, value in wanted.items() if name in known and name not in kept}


def small_model(model_type: str, *, seed: int = 0, **options: Any) -> Any:
    """A random fp32 model of the family, its weights large enough to make logits differ."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(small_config(model_type, **options), dtype=torch.float32)
    return randomise(model, seed)


def any_tokenizer() -> Any:
    """The bundled model's tokenizer: random models are asked by token ids, so any tokenizer will do."""
    return transformers.AutoTokenizer.from_pretrained(lm_path(), local_files_only=True, trust_remote_code=False)


def randomise(model: Any, seed: int) -> Any:
    """Draw every weight at random, so that no norm is one, no bias is zero and no layer is without effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(drawn * 0.15)
            else:
                weight.add_(drawn * 0.1)
    return model.eval()


def parameters(model_type: str, **options: Any) -> int:
    """The number of parameters of `small_model`, without allocating them."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(small_config(model_type, **options))
    return sum(weight.numel() for weight in model.parameters())


_NAME = "ragkv-whole"
_EAGER = 1e-4
"""Largest accepted difference between the attention here and eager attention, relative to the largest logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestPrompt:
    """Token ids of a prompt's parts, each chunk's score, APE's pair (T, S) and PCED's γ."""

    prefix: list[int]
    chunks: list[list[int]]
    suffix: list[int]
    scores: list[float]
    temperature: float = 1.0
    scale: float = 1.0
    gamma: float = 2.5


class DenseModel:
    """The next token's scores `(vocab,)` of each engine, from forwards over whole sequences; `model` is copied."""

    def __init__(self, model: Any, prompt: TestPrompt) -> None:
        self.prompt = prompt
        self._plain = copy.deepcopy(model).eval()
        self._plain.set_attn_implementation("eager")
        self._own: Any = None
        self._windows: dict[int, int | None] = {}
        self._strengths: list[float] = []

    def scores(self, engine: str, more: Sequence[int]) -> Tensor:
        """The scores of `engine` for the token after the suffix and `more`."""
        reference: Callable[[list[int]], Tensor] = getattr(self, f"_{engine}")
        return reference([*self.prompt.suffix, *more])

    def _full(self, own: list[int]) -> Tensor:
        return self._whole([*self.prompt.prefix, *(t for chunk in self.prompt.chunks for t in chunk), *own])

    def _pced(self, own: list[int]) -> Tensor:
        prompt = self.prompt
        streams = [[*prompt.prefix, *part, *own] for part in ([], *prompt.chunks)]
        amateur, *experts = (self._whole(tokens) for tokens in streams)
        if not self._strengths:
            self._strengths = [_divergence(amateur, expert) for expert in experts]
        rows = [
            (1 + b) * expert - b * amateur + prompt.gamma * math.log(r)
            for b, expert, r in zip(self._strengths, experts, prompt.scores, strict=True)
        ]
        return torch.stack(rows).amax(0)

    def _block(self, own: list[int]) -> Tensor:
        tokens = [*self.prompt.prefix, *(t for chunk in self.prompt.chunks for t in chunk), *own]
        visible = _causal(len(tokens))
        at = 0
        for part in (self.prompt.prefix, *self.prompt.chunks):
            visible[at : at + len(part), :at] = False
            at += len(part)
        return self._attended(tokens, torch.arange(len(tokens)), visible)

    def _ape(self, own: list[int]) -> Tensor:
        prefix, chunks = self.prompt.prefix, self.prompt.chunks
        tokens = [*prefix, *(t for chunk in chunks for t in chunk), *own]
        start, longest = len(prefix), max(map(len, chunks))
        places = [*range(start), *(start + i for chunk in chunks for i in range(len(chunk)))]
        places += range(start + longest, start + longest + len(own))
        visible = _causal(len(tokens))
        position = start
        for chunk in chunks:
            visible[position : position + len(chunk), start:position] = False
            position += len(chunk)
        weigh = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        weigh[position:, start:position] = True
        return self._attended(tokens, torch.tensor(places), visible, weigh)

    def _whole(self, tokens: list[int]) -> Tensor:
        logits: Tensor = self._plain(input_ids=torch.tensor([tokens]), use_cache=False).logits
        return logits[0, -1].float()

    def _attended(self, tokens: list[int], positions: Tensor, visible: Tensor, weigh: Tensor | None = None) -> Tensor:
        if self._own is None:
            self._prepare()
        plan = _Plan(
            visible=visible,
            behind=positions[:, None] - positions,
            windows=self._windows,
            weigh=weigh,
            temperature=self.prompt.temperature,
            scale=self.prompt.scale,
        )
        with _bound(plan):
            out = self._own(input_ids=torch.tensor([tokens]), position_ids=positions[None], use_cache=False).logits
        found: Tensor = out[0, -1].float()
        return found

    def _prepare(self) -> None:
        """Read each layer's window from transformers' own mask, and compare the attention here with eager's."""
        tokens = [*self.prompt.prefix, *(t for chunk in self.prompt.chunks for t in chunk), *self.prompt.suffix]
        masks: dict[int, Tensor] = {}
        self._own = copy.deepcopy(self._plain)
        adapt(self._own)
        self._own.set_attn_implementation(_NAME)
        with _bound(masks):
            self._own(input_ids=torch.tensor([tokens]), use_cache=False)
        self._windows = {layer: _window(mask) for layer, mask in masks.items()}
        found = self._attended(tokens, torch.arange(len(tokens)), _causal(len(tokens)))
        expected = self._whole(tokens)
        if not (found - expected).abs().max() <= _EAGER * expected.abs().max():
            raise UnsupportedModelError("its eager attention does more than the reference for block and ape knows")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """`visible` and `weigh` `(n, n)`: which keys each query sees, and which of them are APE's weighted group; `behind`
    `(n, n)`: the distances."""

    visible: Tensor
    behind: Tensor
    windows: dict[int, int | None]
    weigh: Tensor | None
    temperature: float
    scale: float


# read by the registered function, because not every family's layers forward call arguments to it
_binding: ContextVar[_Plan | dict[int, Tensor] | None] = ContextVar("ragkv_whole", default=None)


@contextmanager
def _bound(what: _Plan | dict[int, Tensor]) -> Iterator[None]:
    """Run forward passes with this plan, or record their layers' masks."""
    token = _binding.set(what)
    try:
        yield
    finally:
        _binding.reset(token)


def _causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def _window(mask: Tensor) -> int | None:
    """The window of a dense causal mask `(1, 1, n, n)`: the most keys that any token sees; None if that is all."""
    most = int(mask[0, 0].sum(-1).max())
    return None if most == mask.shape[-1] else most


def _divergence(a: Tensor, b: Tensor) -> float:
    p, q = torch.softmax(a.double(), -1), torch.softmax(b.double(), -1)
    m = (p + q) / 2
    return float(0.5 * (p * (p / m).log() + q * (q / m).log()).sum())


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    bound = _binding.get()
    if isinstance(bound, dict):
        bound[module.layer_idx] = attention_mask
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1).double(), value.repeat_interleave(groups, 1).double()
    scores = query.double() @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible, weigh = attention_mask[0, 0], None
    if isinstance(bound, _Plan):
        visible, weigh, window = bound.visible, bound.weigh, bound.windows[module.layer_idx]
        if window is not None:
            visible = visible & (bound.behind < window)
    scores = scores.masked_fill(~visible, -torch.inf)
    if weigh is not None:  # APE's Eq. 5: the group's sum Z of exp(s/T) enters the row as Z^(S·T)
        assert isinstance(bound, _Plan)
        sharp = (scores / bound.temperature).masked_fill(~weigh, -torch.inf)
        total = sharp.logsumexp(-1, keepdim=True)
        power = bound.scale * bound.temperature
        sharp = sharp + (power - 1) * torch.where(total.isinf(), 0.0, total)
        scores = torch.where(weigh, sharp, scores)
    if s_aux is not None:  # a sink: one more score in the softmax, whose value is zero
        sink = s_aux.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    return (shares @ value).to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, lambda **given: sdpa_mask(**given | {"allow_is_causal_skip": False}))


ENGINES = ("full", "pced", "block", "ape")
COLUMNS = ("family", *ENGINES, "error", "models", "RoPE", "layers", "why refused")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""The rope types that any family may have; a few families have one of their own."""
EXACT = 5e-5
"""The largest difference of scores that fp32 rounding explains, relative to the largest score."""
_PREFIX, _CHUNKS, _SUFFIX = 6, (17, 29, 11), 7  # together longer than a window of 24, and one chunk alone
_SCORES = [0.3, 0.8, 0.55]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyVerdict:
    """The result for one family.

    `errors`: for each engine that runs it, the largest difference from the reference relative to the largest score;
    `block` stands for `blend` too. `reasons`: the sentence of each engine that refuses it. `models` small models were
    tried, with these kinds of `layers` and `ropes`.
    """

    family: str
    layers: tuple[str, ...] = ()
    ropes: tuple[str, ...] = ()
    models: int = 0
    errors: Mapping[str, float] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def refused(cls, family: str, reason: str) -> FamilyVerdict:
        """The verdict that every engine refuses it for the same reason."""
        return cls(family=family, reasons=dict.fromkeys(ENGINES, reason))

    @property
    def error(self) -> float | None:
        """The largest error of its engines; None if no engine runs it."""
        return max(self.errors.values(), default=None)

    @property
    def reason(self) -> str:
        """Why engines refuse it: each sentence once, "" if none does."""
        return " ".join(dict.fromkeys(self.reasons.values()))

    @property
    def why(self) -> str:
        """The reasons alone, each once, without the names of model and engine, and without advice."""
        cores = (_core(sentence) for sentence in re.split(r"(?<=\.) (?=Engine ')", self.reason))
        return "; ".join(dict.fromkeys(core for core in cores if core))

    def cells(self) -> tuple[str, ...]:
        """The verdict as a row of a table with the head `COLUMNS`; RoPE "all" stands for `ROPE_TYPES`."""
        own = [kind for kind in self.ropes if kind not in ROPE_TYPES]
        ropes = ["all", *own] if set(ROPE_TYPES) <= set(self.ropes) else self.ropes
        error = "" if self.error is None else f"{self.error:.0e}"
        results = (self.engine(name) for name in ENGINES)
        return self.family, *results, error, str(self.models), ", ".join(ropes), ", ".join(self.layers), self.why

    def joined(self, other: FamilyVerdict) -> FamilyVerdict:
        """Both verdicts of a family combined: refused if either refuses, and the larger error."""
        reasons = {**other.reasons, **self.reasons}
        return FamilyVerdict(
            family=self.family,
            errors={name: max(off, other.errors[name]) for name, off in self.errors.items() if name not in reasons},
            reasons={name: reasons[name] for name in ENGINES if name in reasons},
            layers=tuple(dict.fromkeys((*self.layers, *other.layers))),
            ropes=tuple(dict.fromkeys((*self.ropes, *other.ropes))),
            models=self.models + other.models,
        )

    def engine(self, name: str) -> str:
        """`exact`, `refused`, or `wrong`: accepted although the numbers differ, which is a bug of ragkv."""
        if name in self.reasons:
            return "refused"
        return "exact" if self.errors.get(name, math.inf) <= EXACT else "wrong"

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> FamilyVerdict:
        """The verdict in a row of `to_json`; every engine that ran gets the largest of their errors."""
        refused = [name for name, result in row["engines"].items() if result == "refused"]
        return cls(
            family=row["family"],
            errors={
                name: math.inf if result == "wrong" else row["error"]
                for name, result in row["engines"].items()
                if result != "refused"
            },
            reasons=dict.fromkeys(refused, row["reason"] or ""),
            layers=tuple(row["layers"]),
            ropes=tuple(row["rope_types"]),
            models=row["models"],
        )

    def to_json(self) -> dict[str, Any]:
        """The row as `ragkv models --json` prints it."""
        return {
            "family": self.family,
            "engines": {name: self.engine(name) for name in ENGINES},
            "error": float(f"{self.error:.1e}") if self.error is not None and math.isfinite(self.error) else None,
            "reason": self.reason or None,
            "layers": list(self.layers),
            "rope_types": list(self.ropes),
            "models": self.models,
        }


def _core(sentence: str) -> str:
    for start in (r"Model '[^']*' \([^)]*\) is not supported: ", r"Engine '[^']*' cannot run on model '[^']*': "):
        sentence = re.sub(rf"^{start}", "", sentence)
    return re.sub(r"; use engine '[^']*'\.$", "", sentence).rstrip(".")


def examine(family: str, model: Any, tokenizer: Any, *, seed: int = 0, steps: int = 8) -> FamilyVerdict:
    """Load transformers' `model` as ragkv does; then, if it is accepted, compare `steps` greedy tokens of each engine.

    Refusals are part of the verdict; no other exception is caught.
    """
    generator = torch.Generator().manual_seed(100 + seed)
    high = min(model.config.get_text_config(decoder=True).vocab_size, 300)
    prefix, *chunks, suffix = (
        torch.randint(3, high, (n,), generator=generator).tolist() for n in (_PREFIX, *_CHUNKS, _SUFFIX)
    )
    prompt = TestPrompt(prefix=prefix, chunks=chunks, suffix=suffix, scores=_SCORES, temperature=0.7, scale=0.6)
    dense = DenseModel(model, prompt)
    try:
        language = load_checked(model, tokenizer, Checkpoint(name=family, location=family, local=True))
    except (UnsupportedModelError, ModelLoadError) as error:
        return FamilyVerdict.refused(family, str(error))
    tuning = {"ape": {"temperature": prompt.temperature, "scale": prompt.scale}}
    engines = {name: make_engine(name, tuning) for name in ENGINES}
    reasons = {name: reason for name, engine in engines.items() if (reason := _refusal(engine, language))}
    with torch.inference_mode():
        errors = {name: _worst(language, dense, engines[name], steps) for name in ENGINES if name not in reasons}
        if "block" in errors:  # blend runs where block does; with every token recomputed it is full
            blend = make_engine("blend", {"blend": {"ratio": 1.0, "over": "standalone"}})
            errors["block"] = max(errors["block"], _worst(language, dense, blend, steps, like="full"))
    return FamilyVerdict(family=family, errors=errors, reasons=reasons)


def _refusal(engine: Engine, language: LanguageModel) -> str:
    """The sentence with which `engine` refuses the model, "" if it runs it."""
    try:
        require_supported(engine, language)
    except UnsupportedModelError as error:
        return str(error)
    return ""


def _worst(language: LanguageModel, dense: DenseModel, engine: Engine, steps: int, *, like: str = "") -> float:
    """The largest difference of an engine's scores from the reference's (that of engine `like`), relative to the
    largest score.
    """
    stream = Stream(runtime_of(language), engine, _request(language, dense.prompt, engine))
    out: list[int] = []
    worst = 0.0
    for _ in range(steps):
        expected = dense.scores(like or engine.name, out)
        off = float((stream.scores - expected).abs().max() / expected.abs().max())
        worst = max(worst, off if math.isfinite(off) else math.inf)
        out.append(int(expected.argmax()))
        stream.advance(out[-1])
    return worst


def _request(language: LanguageModel, prompt: TestPrompt, engine: Engine) -> Request:
    """The prompt as the engine's request, its chunks in the engine's encoding."""
    prefix = None
    kvs: list[Any] = [None] * len(prompt.chunks)
    if engine.encoding is not None:
        [prefix] = language.encode([prompt.prefix])
        kvs = language.encode(prompt.chunks, prefix=prefix if engine.encoding is Encoding.PREFIXED else None)
    chunks = zip(prompt.chunks, prompt.scores, kvs, strict=True)
    return Request(
        prefix_ids=tuple(prompt.prefix),
        chunks=tuple(ContextChunk(token_ids=tuple(ids), score=score, kv=kv) for ids, score, kv in chunks),
        suffix_ids=tuple(prompt.suffix),
        prefix=prefix,
    )


RECORD = Path(__file__).parent / "families.json"
"""The result of the whole survey with the version of transformers that ragkv was released with."""
_MOST_PARAMETERS = 120_000_000
_MODELS = 3  # of a family, at least
_ROPE_KEPT = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")
_TRAINED = 80  # the training length of the rope types that need one; no prompt is longer
_LAYERS = ("layer_types", "layers_block_type", "attention_layers", "attn_layers", "block_types")
PATIENCE = 900.0
"""Seconds after which a family that has not finished is given up; it takes a few on an idle core."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The rows of a survey, and the version of transformers that it was made with."""

    transformers: str
    verdicts: tuple[FamilyVerdict, ...]

    @classmethod
    def recorded(cls) -> Survey:
        """The survey that is shipped with this version of ragkv."""
        return cls.from_json(json.loads(RECORD.read_text(encoding="utf-8")))

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Survey:
        return cls(found["transformers"], tuple(FamilyVerdict.from_json(row) for row in found["families"]))

    def to_json(self) -> dict[str, Any]:
        """The object that the record contains."""
        return {"transformers": self.transformers, "families": [verdict.to_json() for verdict in self.verdicts]}

    def exact(self, engine: str) -> int:
        """For how many families an engine is exact."""
        return sum(verdict.engine(engine) == "exact" for verdict in self.verdicts)

    def exact_counts(self) -> str:
        """The counts of all engines, as "full 160, pced 160"."""
        return ", ".join(f"{name} {self.exact(name)}" for name in ENGINES)


def select_families(names: str) -> list[str]:
    """The families in a comma-separated list, or "all"; ConfigError for one that transformers does not know."""
    known = families()
    if names == "all":
        return known
    chosen = [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in known]:
        raise ConfigError(
            f"The installed transformers has no decoder family {unknown[0]!r}; `all` tries all that it has."
        )
    return list(dict.fromkeys(chosen))


def survey(names: Sequence[str]) -> Iterator[FamilyVerdict]:
    """Judge small random models of these families, in this order, two at a time if there are two processors."""
    idle: list[_Worker] = []

    def ask(name: str) -> FamilyVerdict:
        worker = idle.pop() if idle else _Worker()
        result = worker.ask((name, 0), PATIENCE)
        if isinstance(result, str):  # the process has ended
            worker.end()
            return FamilyVerdict.refused(name, result)
        idle.append(worker)
        return result

    try:
        with ThreadPoolExecutor(min(2, os.cpu_count() or 1, max(1, len(names)))) as pool:
            yield from pool.map(ask, names)
    finally:
        for worker in idle:
            worker.end()


def judge(family: str, seed: int = 0) -> FamilyVerdict:
    """The verdict on one family, in this process. Any error in it is a refusal with its reason.

    It tries models with different weights, sizes and prompts, and every rope type with which transformers runs the
    family. It stops at a model that every engine refuses.
    """
    try:
        size = parameters(family, size=seed)
        if size > _MOST_PARAMETERS:
            raise ValueError(f"{size:,} parameters")
        model = small_model(family, seed=seed, size=seed)
    except Exception as error:  # a configuration whose fields depend on each other in its own way
        return FamilyVerdict.refused(family, f"Not tried: no small model of it can be built ({_message(error)}).")
    try:
        return _judged(family, model, seed)
    except Exception as error:
        return FamilyVerdict.refused(family, f"Not judged: {_message(error)}.")


def _judged(family: str, model: Any, seed: int) -> FamilyVerdict:
    trial = _trial(family, model, seed, steps=8)
    ropes = set(trial.ropes)
    for kind in (kind for kind in ROPE_TYPES if ropes and ropes != {kind}):
        seed += 1
        if trial.errors and (model := _with_rope(family, kind, seed)) is not None:
            trial = trial.joined(_trial(family, model, seed, steps=3))
    while trial.errors and trial.models < _MODELS:
        seed += 1
        trial = trial.joined(_trial(family, small_model(family, seed=seed, size=seed), seed, steps=3))
    return trial


def _trial(family: str, model: Any, seed: int, *, steps: int) -> FamilyVerdict:
    layers, ropes = layer_kinds(model.config.get_text_config(decoder=True)), tuple(sorted(_ropes(model)))
    verdict = examine(family, model, any_tokenizer(), seed=seed, steps=steps)
    return replace(verdict, layers=layers, ropes=ropes, models=1)


def layer_kinds(config: Any) -> tuple[str, ...]:
    """The kinds of layers that a configuration names, in order; empty if all are alike."""
    named = next((kinds for name in _LAYERS if (kinds := getattr(config, name, None))), ())
    return tuple(dict.fromkeys([*named, *(getattr(config, "mlp_layer_types", None) or ())]))


def _ropes(model: Any) -> set[str]:
    """The rope types of a model's rotary embeddings: one for all layers, or one for each kind of layers."""
    found = (getattr(module, "rope_type", ()) for module in model.modules())
    return {kind for kinds in found for kind in ([kinds] if isinstance(kinds, str) else dict(kinds).values())}


def _with_rope(family: str, kind: str, seed: int) -> Any:
    """A small model whose layers have this rope type; None if transformers cannot run the family with it."""
    plain = small_model(family, seed=seed, size=seed)
    config = plain.config.get_text_config(decoder=True)
    rotary = (module for module in plain.modules() if getattr(module, "config", None) is config)
    buffers = (each for module in rotary for each in module.named_buffers(recurse=False))
    angles = {name: len(buffer) for name, buffer in buffers if name.endswith("inv_freq")}
    tables = config.rope_parameters
    if "rope_type" in tables:
        rope = _rope_table(kind, tables, angles["inv_freq"])
    else:  # one entry per kind of layer; some have no positions, or a rope type of their own
        rope = {
            name: _rope_table(kind, table, angles.get(f"{name}_inv_freq", angles.get("inv_freq", 0)))
            if table and table["rope_type"] in ROPE_TYPES
            else table
            for name, table in tables.items()
        }
    fields: dict[str, Any] = {"rope_parameters": rope}
    if kind == "dynamic":
        fields["max_position_embeddings"] = _TRAINED
    if kind == "longrope" and hasattr(config, "original_max_position_embeddings"):
        fields["original_max_position_embeddings"] = _TRAINED
    try:
        model = small_model(family, seed=seed, size=seed, **fields)
        model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    except Exception:  # its configuration forbids this rope type, or its code computes another
        plain(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)  # if this fails too, it is not the rope type
        return None
    return model


def _rope_table(kind: str, table: Mapping[str, Any], angles: int) -> dict[str, Any]:
    own: dict[str, Any] = {name: table[name] for name in _ROPE_KEPT if name in table} | {"rope_type": kind}
    if kind in ("yarn", "longrope", "llama3"):
        own["original_max_position_embeddings"] = _TRAINED
    if kind == "longrope":
        own["short_factor"] = [1.0 + 0.1 * i for i in range(angles)]
        own["long_factor"] = [2.0 + i for i in range(angles)]
    elif kind == "llama3":
        own |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    elif kind != "default":
        own["factor"] = 4.0
    return own


class _Worker:
    """A process that judges one family after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def ask(self, question: tuple[str, int], patience: float) -> FamilyVerdict | str:
        """The verdict, or the reason why there is none."""
        try:
            self._pipe.send(question)
            if not self._pipe.poll(patience):
                return f"Not judged: it came to no end within {patience:.0f} s."
            found: FamilyVerdict = self._pipe.recv()
            return found
        except (EOFError, OSError):
            self._process.join()
            return f"Not judged: the process that tried it ended (code {self._process.exitcode})."

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _work(pipe: Connection) -> None:
    """Judge the families that arrive on the pipe until it closes; the output of libraries is discarded."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with suppress(EOFError, OSError, KeyboardInterrupt), quiet_loading(reports=False):
        while True:
            family, seed = pipe.recv()
            pipe.send(judge(family, seed))


def _message(error: Exception) -> str:
    """The error's message, to be quoted; a configuration's validation puts it into the cause."""
    return first_sentence(error.__cause__ or error)[:160]
