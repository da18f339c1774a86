"""A GGUF file of a random Qwen 2, as llama.cpp's converter writes it."""

from pathlib import Path
from typing import Any

from ragkv.benchmarks.speed.llama_cpp import add_sizes, finish
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
    add_sizes(file, config)
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
    finish(file)


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
