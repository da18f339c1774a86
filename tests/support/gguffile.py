"""A GGUF file of a random Qwen 2, as llama.cpp's converter writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragkv.model.language_model import LanguageModel

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write(path: Path, model: LanguageModel, *, packed: bool, pre: str = "qwen2") -> None:
    """`packed`: matrices as Q8_0 blocks, else everything in float32. `pre` says how text is split before merges."""
    import gguf

    config = model.config
    file = gguf.GGUFWriter(path, "qwen2")
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_rope_freq_base(10000.0)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(config.vocab_size)
    _write_vocabulary(file, model.tokens._tokenizer, config.vocab_size, pre)
    for name, weight in model.module.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module in NAMES:
            to = f"{NAMES[module]}.{kind}"
        else:
            _, _, layer, part = module.split(".", 3)
            to = f"blk.{layer}.{NAMES[part]}.{kind}"
        numbers = weight.float().numpy()
        if packed and numbers.ndim == 2:
            q8 = gguf.GGMLQuantizationType.Q8_0
            file.add_tensor(to, gguf.quants.quantize(numbers, q8), raw_dtype=q8)
        else:
            file.add_tensor(to, numbers)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def _write_vocabulary(file: Any, tokenizer: Any, size: int, pre: str) -> None:
    tokens = [f"[unused{index}]" for index in range(size)]
    for token, index in tokenizer.get_vocab().items():
        tokens[index] = token
    tokens[-1] = "qz"  # a merge: the format knows no vocabulary without any
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre(pre)
    file.add_token_list(tokens)
    file.add_token_types([3 if index < 3 else 1 for index in range(size)])
    file.add_token_merges(["q z"])
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)
    file.add_pad_token_id(2)
    file.add_chat_template(tokenizer.chat_template)
