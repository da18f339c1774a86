"""Which compressor a configuration means, for a model and a question."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.attention.kv import ChunkKV
from ragkv.errors import ConfigError
from ragkv.model.apb.book import question_score
from ragkv.model.apb.compressor import Compressor, KeyNorm, Random
from ragkv.model.apb.heads import Heads, load_heads
from ragkv.model.checkpoint import HEADS

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel

__all__ = ["compressor_for", "heads_beside"]


def compressor_for(
    name: str,
    model: LanguageModel,
    *,
    question_ids: tuple[int, ...] = (),
    prefix: ChunkKV | None = None,
    position: int = 0,
) -> Compressor:
    """The compressor called `name` (`ragkv.engines.apb.APBConfig`); the question, if any, will stand at `position`.

    ConfigError for the attention of a question where there is none, ModelLoadError for heads that do not fit.
    """
    if name == "heads" or (name == "auto" and heads_beside(model)):
        return model.companion(_heads)
    if name == "attention" and not question_ids:
        raise ConfigError(
            'apb: compressor = "attention" needs the question, and stored blocks are made without one; use '
            'key-norm or heads, or ask about the file itself with "ragkv query --context".'
        )
    if name == "random":
        return Random()
    if name == "key-norm" or not question_ids:
        return KeyNorm()
    return question_score(model, question_ids, prefix, position=position)


def heads_beside(model: LanguageModel) -> Path | None:
    """The file of retaining heads in the model's folder, if there is one."""
    path = Path(model.checkpoint.location) / HEADS
    return path if model.checkpoint.local and path.exists() else None


def _heads(model: LanguageModel) -> Heads:
    return load_heads(Path(model.checkpoint.location) / HEADS, model)
