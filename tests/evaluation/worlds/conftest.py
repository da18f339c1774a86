"""The tokenizer of the bundled model."""

from minitokenizer import tokenizer

__all__ = ["tokenizer"]
