"""ragkv: retrieval-augmented generation over a precomputed KV document store.

Importing this package pulls in neither torch nor transformers; each loads where it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ragkv.util.processors import sleep_soon

if TYPE_CHECKING:
    from ragkv.decoding import Decoding
    from ragkv.pipeline import RagKV
    from ragkv.types import Answer

__all__ = [
    "Answer",
    "Decoding",
    "RagKV",
    "__version__",
]


__version__ = "0.1.0"
sleep_soon()  # before anything imports torch


def __getattr__(name: str) -> Any:
    if name == "RagKV":
        from ragkv.pipeline import RagKV

        return RagKV
    if name == "Decoding":
        from ragkv.decoding import Decoding

        return Decoding
    if name == "Answer":
        from ragkv.types import Answer

        return Answer
    raise AttributeError(f"module 'ragkv' has no attribute {name!r}")
