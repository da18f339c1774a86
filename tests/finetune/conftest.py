"""A small tokenizer, so that the training tests take seconds."""

from __future__ import annotations

from minitokenizer import tokenizer

__all__ = ["tokenizer"]
