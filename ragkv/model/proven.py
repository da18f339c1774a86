"""A transformers model as ragkv runs it: of the kind that most engines can use, or resumed, or refused."""

from __future__ import annotations

from typing import Any

from ragkv.errors import ModelLoadError, UnsupportedModelError
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.language import LanguageModel
from ragkv.model.proof import check_model

__all__ = ["proven"]

_REFUSAL = " is not supported: "


def proven(model: Any, tokenizer: Any, checkpoint: Checkpoint) -> LanguageModel:
    """The model, its numbers proved to be transformers' own.

    A model whose chunks cannot be merged or moved exactly is one whose cache is resumed (`ResumedModel`), if that is
    exact: `lacks` tells why. Raises UnsupportedModelError with both reasons, and ModelLoadError when the memory does
    not suffice.
    """
    try:
        loaded = LanguageModel(model, tokenizer, checkpoint)
        check_model(loaded)
        return loaded
    except UnsupportedModelError as error:
        because = _reason(error)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        because = f"its attention is not where ragkv looks for it ({type(error).__name__}: {error})"
    from ragkv.model.resumed import ResumedModel
    from ragkv.model.resumeproof import check_resumed

    name = f"Model {checkpoint.name!r} ({model.config.get_text_config(decoder=True).model_type})"
    try:
        resumed = ResumedModel(model, tokenizer, checkpoint, because=because)
        check_resumed(resumed)
        return resumed
    except ModelLoadError:
        raise
    except (MemoryError, OSError) as error:
        raise ModelLoadError(f"{name} does not fit into memory; load it on a larger device.") from error
    except Exception as error:
        told = str(error).strip().splitlines() or [""]
        why = told[0] if isinstance(error, UnsupportedModelError) else f"{type(error).__name__}: {told[0]}"
        raise UnsupportedModelError(
            f"{name}{_REFUSAL}{because}; and it cannot go on from its own cache: {why.rstrip('.')}."
        ) from error


def _reason(error: UnsupportedModelError) -> str:
    """Why, as the middle of a sentence."""
    return str(error).partition(_REFUSAL)[2].rstrip(".") or str(error).rstrip(".")
