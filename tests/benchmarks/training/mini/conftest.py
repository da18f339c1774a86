"""A small tokenizer and a small model configuration, so that training tests take seconds."""

import pytest
from minitokenizer import tokenizer

from ragkv.benchmarks.training.mini.train import MiniTrainConfig, Stage

__all__ = ["tiny", "tokenizer"]


@pytest.fixture
def tiny():
    return MiniTrainConfig(
        hidden=64,
        layers=2,
        q_heads=4,
        kv_heads=2,
        intermediate=96,
        warmup=2,
        checkpoint_every=1,
        stages=(
            Stage(name="copy", kind="copy", steps=1, batch=2, passages=(3, 4)),
            Stage(name="qa", kind="qa", steps=2, batch=2, passages=(2, 2), questions=3, block_share=0.5, final_lr=1e-4),
        ),
    )
