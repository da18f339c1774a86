"""A small tokenizer of the mini model's kind, trained in a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ragkv.benchmarks.mini.data import train_tokenizer
from ragkv.benchmarks.mini.retrieval import world_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["tokenizer"]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(world_texts(20), vocab_size=1024)
