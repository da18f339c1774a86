"""What ragkv refuses to run by its configuration alone, before any weight is read, and why.

What is allowed is listed; whatever a later transformers calls by a new name is refused by that name until somebody
has looked at it.
"""

from __future__ import annotations

from typing import Any

from ragkv.errors import UnsupportedModelError

__all__ = ["LENGTH_DEPENDENT", "refuse_by_name", "refuse_whole", "rope_kinds"]

_LAYERS = frozenset({"full_attention", "sliding_attention"})
_ROPES = frozenset({"default", "linear", "yarn", "llama3", "proportional"})
LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
_RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid")
_SPARSE = ("sparse", "indexed", "compressed")


def refuse_by_name(name: str, config: Any) -> None:
    """Raise UnsupportedModelError, naming model, family and reason, for an architecture that is known to be inexact.

    `config` is the configuration of the text model.
    """
    refuse_whole(name, config)
    reason = _indexed(config) or _layers(config) or _positions(config)
    if reason is not None:
        raise UnsupportedModelError(f"Model {name!r} ({config.model_type}) is not supported: {reason}.")


def refuse_whole(name: str, config: Any) -> None:
    """Raise UnsupportedModelError for what no engine can run, before any weight is read."""
    reason = "it is an encoder-decoder" if getattr(config, "is_encoder_decoder", False) else _unknown_rope(config)
    if reason is not None:
        raise UnsupportedModelError(f"Model {name!r} ({config.model_type}) is not supported: {reason}.")


def _indexed(config: Any) -> str | None:
    """Sparse attention: which keys a token reads depends on all keys before it, so chunks cannot be read apart."""
    return "its layers choose by an index which keys they read" if getattr(config, "index_topk", None) else None


def _layers(config: Any) -> str | None:
    for kind in dict.fromkeys(getattr(config, "layer_types", None) or []):
        if any(word in kind for word in _RECURRENT):
            return f"it has recurrent layers ({kind}), whose state cannot be merged with another chunk's"
        if kind == "chunked_attention":
            return "its attention is cut at fixed positions, so a chunk cannot be moved"
        if any(word in kind for word in _SPARSE):
            return f"its layers choose by an index which keys they read ({kind})"
        if kind not in _LAYERS:
            return f"it has layers of a kind that ragkv does not know ({kind})"
    return None


def rope_kinds(config: Any) -> list[dict[str, Any]]:
    """The parameters of each kind of rotary positions that the model has."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [p for p in parameters.values() if isinstance(p, dict)] or [parameters]


def _unknown_rope(config: Any) -> str | None:
    found = (kind.get("rope_type", "default") for kind in rope_kinds(config))
    unknown = next((kind for kind in found if kind not in _ROPES | LENGTH_DEPENDENT), None)
    return None if unknown is None else f"its RoPE is of a kind that ragkv does not know ({unknown})"


def _positions(config: Any) -> str | None:
    nested = rope_kinds(config)
    for kind in dict.fromkeys(p.get("rope_type", "default") for p in nested):
        if kind in LENGTH_DEPENDENT:
            return f"its RoPE ({kind}) depends on the prompt's length, so cached keys would be wrong"
    if any("mrope_section" in p for p in nested):
        return "its RoPE counts images and text on several axes"
    if getattr(config, "alibi", False):
        return "its attention adds a bias for every distance (ALiBi)"
    return None
