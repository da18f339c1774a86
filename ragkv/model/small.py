"""Small random models of every decoder family that the installed transformers knows, to try ragkv with each of them.

A family's own default configuration is shrunk field by field: only fields that it has are set, so that a family that
appears tomorrow needs no line here unless its fields depend on each other.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ragkv.mini import lm_path

__all__ = ["any_tokenizer", "families", "parameters", "small_config", "small_model", "stir"]

VOCABULARY = 320

SIZES: tuple[dict[str, int], ...] = (
    {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "inner": 96, "experts": 4},
    {"hidden": 96, "heads": 6, "kv_heads": 3, "head_dim": 32, "inner": 64, "experts": 6},
)

# what a field is called in one family or another -> the size that it gets
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

# latent attention has widths of its own, and as many key heads as query heads once it is expanded
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
_EQUAL_HEADS = frozenset({"bailing_hybrid", "kimi_linear"})  # as many heads of keys as of queries
_MINIMAX = ("full_attn_beta_factor", "linear_attn_beta_factor", "mlp_beta_factor")
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _DELTA | {"layer_group_size": 4, "num_expert_group": 1},
    "bamba": _MAMBA | {"attn_layer_indices": [1, 5]},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": None},
    "granitemoehybrid": _MAMBA | {"layer_types": ["linear_attention", "full_attention"] * 4},
    "kimi_linear": _DELTA,
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
    "mamba2": {"head_dim": 32, "state_size": 16, "chunk_size": 16, "n_groups": 2},
    # its default residuals let rounding grow tenfold in eight layers
    "minimax": {"block_size": 16} | dict.fromkeys(_MINIMAX, 0.3),
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 4, "n_mamba_heads": 8, "mamba_d_state": 16, "chunk_size": 16},
    "zaya": {"num_experts_per_tok": 1},
    "cohere_compass_text": _MIXED | {"rope_parameters": dict.fromkeys(_MIXED["layer_types"], _ROPE)},
    "gpt_neo": {"attention_types": [[["global", "local"], 4]], "window_size": 24},
    "helium": {"head_dim": 16},
    "gemma3n_text": _MIXED | {"num_kv_shared_layers": 4},
    "gemma4_text": _MIXED | {"num_kv_shared_layers": 4},
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
    known = text.to_dict()
    known |= {name: getattr(text, name, None) for name in getattr(text, "attribute_map", {})}
    wanted: dict[str, Any] = dict(_FIXED)
    for kind, names in _NAMES.items():
        wanted |= dict.fromkeys(names, SIZES[size % len(SIZES)][kind])
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        wanted[name] = layers
    if known.get("sliding_window") is not None or "sliding_window" in known:
        wanted["sliding_window"] = window
    if "kv_lora_rank" in known:
        wanted |= _LATENT | dict.fromkeys(_NAMES["kv_heads"], wanted["num_attention_heads"])
        wanted["head_dim"] = wanted["qk_rope_head_dim"]
    fields = {name: value for name, value in wanted.items() if name in known}
    if model_type in _EQUAL_HEADS:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    fields |= _OWN.get(model_type, {}) | changes
    parts = {key: part for key, part in vars(default).items() if hasattr(part, "get_text_config")}
    key = next((key for key, part in parts.items() if part is text), None)
    if key is None:  # no part of it is the text model; an encoder-decoder makes such a part up when it is asked
        return config_class(**fields)
    config = config_class()
    for name, part in parts.items():
        setattr(config, name, type(part)(**(fields if name == key else _seeing(part, wanted))))
    return config


def _seeing(part: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Fields of the part of a configuration that sees or hears, which text never reaches: as small as it may be."""
    known = part.to_dict()
    kept = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
    return {name: value for name, value in wanted.items() if name in known and name not in kept}


def small_model(model_type: str, *, seed: int = 0, **options: Any) -> Any:
    """A random fp32 model of the family, its weights large enough to make logits differ."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(small_config(model_type, **options), dtype=torch.float32)
    return stir(model, seed)


def any_tokenizer() -> Any:
    """The bundled model's tokenizer: who asks a random model by token ids needs one, and any does."""
    return transformers.AutoTokenizer.from_pretrained(lm_path(), local_files_only=True, trust_remote_code=False)


def stir(model: Any, seed: int) -> Any:
    """Draw every weight anew, so that no norm is one, no bias zero and no layer without effect."""
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
    """How many parameters `small_model` would have, without making them."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(small_config(model_type, **options))
    return sum(weight.numel() for weight in model.parameters())
