"""A small tokenizer like the mini model's, trained in a second."""

import pytest

from ragkv.benchmarks.training.mini.data import train_tokenizer
from ragkv.benchmarks.training.mini.retrieval import world_texts

__all__ = ["tokenizer"]


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(world_texts(20), vocab_size=1024)
