"""Refuse arguments that other parts of LlamaIndex take and ragkv does not; ignoring them would mislead."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ragkv.errors import UsageError

__all__ = ["chunk_count", "refuse_unknown"]

_PROMPT = "the index's own model answers with the index's own prompt ([prompt] in its ragkv.toml)"
_SEARCH = 'the search is set by search={"retrieval": "hybrid", "rerank": True, "candidates": 32}'
_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("llm", "response_synthesizer", "response_mode", "output_cls", "multimodal"), _PROMPT),
    **dict.fromkeys(("text_qa_template", "refine_template", "summary_template", "simple_template"), _PROMPT),
    **dict.fromkeys(("vector_store_query_mode", "alpha", "sparse_top_k", "hybrid_top_k"), _SEARCH),
    **dict.fromkeys(("embed_model", "vector_store_kwargs", "mmr_threshold"), _SEARCH),
    "doc_ids": 'filter by the key "doc_id" with the operator "in"',
    "node_ids": 'filter by the key "node_id" with the operator "in"',
    "use_async": "call aquery",
}


def refuse_unknown(owner: type[Any], options: Mapping[str, Any]) -> None:
    """UsageError for the first of `options`, none of which `owner`'s constructor has as a parameter."""
    for name in options:
        if name in _INSTEAD:
            raise UsageError(f"{owner.__name__} does not take {name}: {_INSTEAD[name]}.")
        known = [
            each.name
            for each in inspect.signature(owner).parameters.values()
            if each.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        raise UsageError(f"{owner.__name__} does not take {name!r}; it takes {', '.join(known)}.")


def chunk_count(top_k: int | None, similarity_top_k: int | None) -> int | None:
    """The value under either name, or None. UsageError for both names, or for anything but a whole number above 0."""
    if top_k is not None and similarity_top_k is not None:
        raise UsageError("top_k and similarity_top_k are two names of one setting; give one of them.")
    name, count = ("top_k", top_k) if similarity_top_k is None else ("similarity_top_k", similarity_top_k)
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise UsageError(f"{name} must be a whole number from 1 up, not {count!r}.")
    return count
