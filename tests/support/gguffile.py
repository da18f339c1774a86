"""GGUF files of models: written as llama.cpp's own converter does, quantised by llama.cpp, and read back."""

from pathlib import Path

import numpy as np
import torch

from ragkv.benchmarks.speed.llama_cpp import add_sizes
from ragkv.model.gguf_merge import neighbours

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "phi3": "phi3",
}


def write_model(path: Path, model) -> Path:
    """`model`, a `LanguageModel` of one of these families, in float32, with its tokenizer's vocabulary."""
    import gguf

    config = model.config
    family = config.model_type.removesuffix("_text")
    file = gguf.GGUFWriter(path, ARCHITECTURES[family])
    add_sizes(file, config)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    file.add_key_length(width)
    file.add_value_length(width)
    file.add_rope_dimension_count(width)
    if family == "gemma3":
        file.add_sliding_window(config.sliding_window)
    if family == "phi3":
        file.add_rope_scaling_orig_ctx_len(config.max_position_embeddings)
        file.add_sliding_window(0)
    _write_vocabulary(file, model.tokens._tokenizer, config.vocab_size)
    for name, numbers in tensors_of(model, model.module.state_dict()).items():
        file.add_tensor(name, numbers)
    finish(file)
    return path


def finish(file) -> None:
    """Write a file (`gguf.GGUFWriter`) with everything that was added to it, and close it."""
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def tensors_of(model, weights) -> dict:
    """llama.cpp's names and forms of a model's weights."""
    import gguf

    config = model.config
    family = config.model_type.removesuffix("_text")
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[family])
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, weight in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        numbers = weight.float().numpy()
        if ARCHITECTURES[family] == "llama" and (count := heads.get(name.split(".")[-2])):
            numbers = neighbours(numbers, count)
        if family == "gemma3" and name.endswith("norm.weight"):
            numbers = numbers + 1
        if family == "gemma3" and ".q_norm." in name:
            numbers = numbers * _query_scale(config)
        module, _, part = name.rpartition(".")
        tensors[f"{names.get_name(module)}.{part}"] = numbers
    return tensors


@torch.no_grad()
def read_weights(path: Path, model) -> None:
    """Give a model the weights of a file that was written of it, unpacked to float32."""
    import gguf

    weights = model.module.state_dict()
    places = {name: key for key in weights for name in tensors_of(model, {key: weights[key]})}
    config, heads = model.config, {}
    if ARCHITECTURES[config.model_type.removesuffix("_text")] == "llama":
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for tensor in gguf.GGUFReader(path).tensors:
        key = places.get(tensor.name)
        if key is None:
            continue
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if count := heads.get(key.split(".")[-2]):
            rows, width = numbers.shape
            numbers = numbers.reshape(count, rows // count // 2, 2, width).swapaxes(1, 2).reshape(rows, width)
        if config.model_type.startswith("gemma3") and key.endswith("norm.weight"):
            numbers = numbers / (_query_scale(config) if ".q_norm." in key else 1) - 1
        weights[key].copy_(torch.from_numpy(numbers.copy()))


def _query_scale(config) -> float:
    """llama.cpp scales Gemma's queries by the width of a head, and transformers by a number of its own."""
    return (config.head_dim / config.query_pre_attn_scalar) ** 0.5


def _write_vocabulary(file, tokenizer, size: int) -> None:
    """The tokenizer's tokens; a merge, of which the format requires one, that no text has."""
    tokens = [f"[unused{index}]" for index in range(size)]
    for token, index in tokenizer.get_vocab().items():
        tokens[index] = token
    tokens[-1] = "qz"
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(tokens)
    file.add_token_types([3 if i in special else 1 for i in range(size)])
    file.add_token_merges(["q z"])
    file.add_bos_token_id(tokenizer.bos_token_id)
    file.add_eos_token_id(tokenizer.eos_token_id)
    file.add_add_bos_token(bool(tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id))
    file.add_chat_template(tokenizer.chat_template)
