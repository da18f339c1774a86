"""A small tokenizer of the mini model's kind, trained in a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ragkv.benchmarks.mini.tokenizer import train_tokenizer
from ragkv.finetune.trainingtext import world_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["tokenizer"]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(world_texts(20), vocab_size=1024)
