"""What ragkv refuses to run by its configuration alone, before any weight is read, and why.

What is allowed is listed; whatever a later transformers calls by a new name is refused by that name until somebody
has looked at it.
"""

from __future__ import annotations

from typing import Any

from ragkv.errors import UnsupportedModelError

__all__ = ["chooses_by_index", "reach", "refuse_by_name", "refuse_whole"]

_LAYERS = frozenset({"full_attention", "sliding_attention"})
_ROPES = frozenset({"default", "linear", "yarn", "llama3", "proportional"})
_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
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


def chooses_by_index(config: Any) -> bool:
    """Whether some layers read a choice of the keys alone."""
    kinds = getattr(config, "layer_types", None) or []
    return _indexed(config) is not None or any(word in kind for kind in kinds for word in _SPARSE)


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


def _rope_kinds(config: Any) -> list[dict[str, Any]]:
    """The parameters of each kind of rotary positions that the model has."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [p for p in parameters.values() if isinstance(p, dict)] or [parameters]


def _unknown_rope(config: Any) -> str | None:
    found = (kind.get("rope_type", "default") for kind in _rope_kinds(config))
    unknown = next((kind for kind in found if kind not in _ROPES | _LENGTH_DEPENDENT), None)
    return None if unknown is None else f"its RoPE is of a kind that ragkv does not know ({unknown})"


def _positions(config: Any) -> str | None:
    nested = _rope_kinds(config)
    if any("mrope_section" in p for p in nested):
        return "its RoPE counts images and text on several axes"
    if getattr(config, "alibi", False):
        return "its attention adds a bias for every distance (ALiBi)"
    return None


def reach(config: Any) -> tuple[int | None, str]:
    """How many positions a prompt of this model may have (None: no limit is known), and why not more, or "".

    RoPE of the kinds "dynamic" and "longrope" is one thing up to the length that the model was first trained for, and
    another beyond it. Stored keys are of the first kind, so longer prompts are refused.
    """
    named = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    most: int | None = min((found for found in named if isinstance(found, int)), default=None)
    why = ""
    for each in _rope_kinds(config):
        if (kind := each.get("rope_type")) in _LENGTH_DEPENDENT:
            trained = each.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", most
            )
            if isinstance(trained, int) and (most is None or trained <= most):
                most, why = trained, f", as far as its RoPE ({kind}) is the one that chunks are stored with"
    return most, why
