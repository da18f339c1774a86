"""A chunk of an answer or a search as the document of another framework."""

from __future__ import annotations

from typing import Any

from ragkv.types import Source


def source_metadata(source: Source) -> dict[str, Any]:
    """What a chunk's document, snippet and scores are, without its text; what it has not is left out."""
    facts = source.to_json()
    for name in ("text", "chunk_id", "tokens_won"):
        facts.pop(name, None)
    return {"source": facts.pop("document"), **{name: value for name, value in facts.items() if value is not None}}
