"""A book whose blocks are known exactly: a tiny model with byte tokens, and paragraphs of one block each."""

import random
import shutil
from pathlib import Path

import torch

__all__ = ["BLOCK", "CHUNK", "LENGTHS", "book", "tiny_model"]

BLOCK = 8
LENGTHS = {"block": BLOCK, "anchor": 4, "passing": 2}
CHUNK = 4 * BLOCK
"""Tokens of a chunk: four blocks."""
_END = "\n\n"  # as between two chunks of a prompt, so that a paragraph is a block in any position


def tiny_model(folder: Path, like: Path) -> Path:
    """A random two-layer Llama for texts of a few thousand bytes, with the tokenizer of the folder `like`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,  # large enough for answers to depend on the input
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    shutil.copytree(like, folder, dirs_exist_ok=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def book(blocks: int, seed: int = 5) -> str:
    """A text of this many blocks; a longer one begins with it."""
    drawn = random.Random(seed)
    words = ("".join(drawn.choices("abcdefgh", k=BLOCK - len(_END))) for _ in range(blocks))
    return _END.join(words)
