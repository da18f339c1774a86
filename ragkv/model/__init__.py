"""A transformers model as ragkv runs it: checkpoint, prompt, loading, and the self-check that its numbers are right.

Only this package touches the internals of transformers. Importing it loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel

__all__ = [
    "LanguageModel",
]


def __getattr__(name: str) -> Any:
    if name == "LanguageModel":
        from ragkv.model.language_model import LanguageModel

        return LanguageModel
    raise AttributeError(f"module 'ragkv.model' has no attribute {name!r}")
