"""How APB cuts a long document: which block holds which tokens, where they stand, what they see (APB §3.2-3.3)."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.errors import ConfigError

__all__ = ["PLAIN_BELOW", "Layout", "Lengths", "lengths_for", "star"]

K = 1024
PLAIN_BELOW = 32 * K
"""Documents of fewer tokens are read with plain attention, which is exact: there APB gains less (APB, Limitations)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """l_b, l_a and l_p in tokens: of a block, of the document's head in every anchor, and of what a block passes on.

    ConfigError for an anchor or a passing length that is longer than a block.
    """

    block: int
    anchor: int
    passing: int

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ConfigError(f"apb: a block holds at least 1 token, not {self.block}.")
        for name, value in (("anchor", self.anchor), ("passing", self.passing)):
            if not 0 <= value <= self.block:
                raise ConfigError(
                    f"apb: the {name} length must be from 0 to that of a block ({self.block} tokens), not {value}."
                )


TABLE = {
    32 * K: Lengths(block=4 * K, anchor=K, passing=K // 2),
    64 * K: Lengths(block=8 * K, anchor=2 * K, passing=K),
    128 * K: Lengths(block=16 * K, anchor=4 * K, passing=2 * K),
    256 * K: Lengths(block=32 * K, anchor=8 * K, passing=4 * K),
    512 * K: Lengths(block=64 * K, anchor=8 * K, passing=8 * K),
}
"""The paper's hyper-parameters for documents of so many tokens (APB, Appendix B)."""


def lengths_for(tokens: int) -> Lengths | None:
    """The paper's lengths for a document of so many tokens; None where plain attention is the better choice."""
    if tokens < PLAIN_BELOW:
        return None
    return TABLE[next((length for length in TABLE if tokens <= length), max(TABLE))]


def star(block: int) -> Lengths:
    """Star Attention: the whole first block is the anchor, and nothing is passed on."""
    return Lengths(block=block, anchor=block, passing=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A document of `tokens` tokens in blocks, from position `start` on, after so many tokens of the prompt's prefix.

    Every block sees the prefix. The anchor is the `question`'s tokens, if any, and the document's first; it stands
    from `start` on, while blocks keep their places in the document. Only the last block may be shorter.
    """

    tokens: int
    lengths: Lengths
    start: int = 0
    question: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError("a document without tokens has no blocks")

    @property
    def blocks(self) -> int:
        """H, how many there are."""
        return -(-self.tokens // self.lengths.block)

    @property
    def end(self) -> int:
        """Position after the document, at which a question stands."""
        return self.start + self.tokens

    @property
    def anchor_head(self) -> int:
        """How many of the document's first tokens are in the anchor."""
        return min(self.lengths.anchor, self.tokens)

    @property
    def anchor(self) -> int:
        """Tokens of the anchor that blocks 1.. see."""
        return self.question + self.anchor_head

    def span(self, block: int) -> range:
        """The document's tokens that it holds, from 0."""
        first = block * self.lengths.block
        return range(first, min(first + self.lengths.block, self.tokens))

    def position(self, block: int) -> int:
        """Where its first token stands."""
        return self.start + block * self.lengths.block

    def candidates(self, block: int) -> range:
        """Which of its tokens, from 0, it may pass on: not those that all others see in the anchor."""
        return range(self.anchor_head if block == 0 else 0, len(self.span(block)))

    def passed(self, block: int) -> int:
        """How many tokens it passes on, in every layer and for every kv head."""
        return min(self.lengths.passing, len(self.candidates(block)))

    def passing(self, block: int) -> int:
        """How many tokens it is passed, by all blocks before it."""
        return sum(self.passed(before) for before in range(block))
