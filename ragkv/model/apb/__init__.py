"""APB: one long document in blocks that see an anchor, what earlier blocks pass on, and themselves (APB §3)."""

from ragkv.model.apb.blockpass import BlockPass, Exchange, Kept
from ragkv.model.apb.book import Block, Book
from ragkv.model.apb.compressor import Compressor, KeyNorm, Local, Random
from ragkv.model.apb.executor import Executor, Sequential
from ragkv.model.apb.layout import PLAIN_BELOW, Layout, Lengths, lengths_for, star

__all__ = [
    "PLAIN_BELOW",
    "Block",
    "BlockPass",
    "Book",
    "Compressor",
    "Exchange",
    "Executor",
    "Kept",
    "KeyNorm",
    "Layout",
    "Lengths",
    "Local",
    "Random",
    "Sequential",
    "lengths_for",
    "star",
]
