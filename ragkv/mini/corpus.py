"""Which documents the bundled models were made to be shown on: those of `examples/corpus`."""

from __future__ import annotations

__all__ = ["is_example"]

_EXAMPLES = frozenset(
    (
        "189c10247b168a4f91022109020ffefa",  # companies/baliphor-optics.md
        "4b11161f0181bfc8fd7cb79330044fca",  # companies/finolnova-tools.md
        "937e28b3fac99938ebff8928639c95d1",  # companies/halillex-robotics.md
        "5d3f16740e9a202b80d70184f3bde61d",  # companies/ililtek-tools.md
        "a3f5dfc746dbea6033922371380d9895",  # companies/kirarzon-pumps.md
        "9bf62e235f3374893c3e989ad9b4e1e3",  # companies/linodyne-paper.md
        "da904355119b8d8a86c529649c3437b6",  # companies/malinsol-robotics.md
        "628a6bd27e46a67c9e7fd959f0c82e37",  # companies/nordyne-paper.md
        "e69570e25585f2d8dd4221da8f5177cd",  # companies/parinphor-brewery.md
        "7a3d42325b2b9c8ac94bc20c15a3ed96",  # companies/pelophor-press.md
        "95e993bad146bea31a3e1519dd61613f",  # companies/quinoncor-robotics.md
        "c57c31af42c1610f86864dc0ee06d233",  # companies/tamillex-clocks.md
        "5546ed43cf26b5f7dd22fd567173240a",  # companies/uladbix-labs.md
        "5c8573114741313c288bcffc69d23d6a",  # companies/valivia-clocks.md
        "0c9194cd326ac1912662c293085abfc4",  # companies/yeladquor-pumps.md
        "21045a21ee01fd0916270b4b4bcfbead",  # product-catalogue.pdf
        "16bf050c89f9b309dd1485d1c7d572f4",  # towns-north.html
        "5282cb4b31e05239ebe8febcc5f2003e",  # towns-south.html
    )
)
"""The first 32 hex digits of each file's blake2b."""


def is_example(content_hash: str) -> bool:
    """Whether a document of this content hash (`Document.content_hash`) is a file of `examples/corpus`."""
    return content_hash[:32] in _EXAMPLES
