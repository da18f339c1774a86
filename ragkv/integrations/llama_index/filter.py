"""LlamaIndex's metadata filters as a condition on chunks, which is applied before the best chunks are taken.

An operator means what it means in LlamaIndex's own `SimpleVectorStore`. If that would raise TypeError for a chunk (such
as comparing a text with a number), the chunk does not match. Groups of filters may contain groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters

from ragkv.errors import UsageError
from ragkv.integrations.llama_index.bundle import metadata_of
from ragkv.integrations.llama_index.node import SCORES
from ragkv.types import Chunk, Document

__all__ = ["chunk_filter", "metadata_filter"]

_Condition = Callable[[Mapping[str, Any]], bool]

_ORDER: Mapping[FilterOperator, Callable[[Any, Any], bool]] = {
    FilterOperator.GT: lambda found, value: bool(found > value),
    FilterOperator.GTE: lambda found, value: bool(found >= value),
    FilterOperator.LT: lambda found, value: bool(found < value),
    FilterOperator.LTE: lambda found, value: bool(found <= value),
}
_HOLDS: Mapping[FilterOperator, Callable[[Any, Any], bool]] = {
    FilterOperator.EQ: lambda found, value: bool(found == value),
    FilterOperator.NE: lambda found, value: bool(found != value),
    FilterOperator.IN: lambda found, value: found in value,
    FilterOperator.NIN: lambda found, value: found not in value,
    FilterOperator.ANY: lambda found, value: any(_contains(found, each) for each in value),
    FilterOperator.ALL: lambda found, value: all(_contains(found, each) for each in value),
    FilterOperator.CONTAINS: lambda found, value: _contains(found, value),
    FilterOperator.TEXT_MATCH: lambda found, value: isinstance(found, str) and value in found,
    FilterOperator.TEXT_MATCH_INSENSITIVE: lambda found, value: (
        isinstance(found, str) and value.lower() in found.lower()
    ),
}
_WITHOUT = (FilterOperator.NE, FilterOperator.NIN)
"""The operators that match a chunk without the key."""
_LISTS = (FilterOperator.IN, FilterOperator.NIN, FilterOperator.ANY, FilterOperator.ALL)
_TEXTS = (FilterOperator.TEXT_MATCH, FilterOperator.TEXT_MATCH_INSENSITIVE)


def chunk_filter(filters: MetadataFilters) -> Callable[[Document, Chunk], bool]:
    """The argument `only` of one search; it caches the last document's metadata. UsageError as in `metadata_filter`."""
    holds = metadata_filter(filters)
    last: Document | None = None
    facts: Callable[[Chunk], dict[str, Any]] = lambda _: {}  # noqa: E731 - replaced at the first document

    def only(document: Document, chunk: Chunk) -> bool:
        nonlocal last, facts
        if document is not last:
            last, facts = document, metadata_of(document)
        return holds(facts(chunk))

    return only


def metadata_filter(filters: MetadataFilters) -> _Condition:
    """A test of metadata. UsageError for what is not a filter, and for a value that its operator cannot take.

    A group without filters matches everything; NOT matches what none of its filters matches.
    """
    if not isinstance(filters, MetadataFilters):
        raise UsageError(
            f"filters takes LlamaIndex's MetadataFilters, not {type(filters).__name__}; "
            "write filters=MetadataFilters(filters=[MetadataFilter(key=…, value=…)])."
        )
    parts = [_single(part) if isinstance(part, MetadataFilter) else metadata_filter(part) for part in filters.filters]
    if not parts:
        return lambda _: True
    if filters.condition is FilterCondition.OR:
        return lambda metadata: any(part(metadata) for part in parts)
    if filters.condition is FilterCondition.NOT:
        return lambda metadata: not any(part(metadata) for part in parts)
    if filters.condition not in (FilterCondition.AND, None):
        raise UsageError(f"ragkv knows no filter condition {filters.condition!r}; use and, or, not.")
    return lambda metadata: all(part(metadata) for part in parts)


def _single(part: MetadataFilter) -> _Condition:
    key, value, operator = part.key, part.value, part.operator
    if key in SCORES:
        raise UsageError(
            f"A filter cannot ask for {key!r}, which a chunk only has once it was found; "
            "drop nodes by their score with a SimilarityPostprocessor."
        )
    if operator is FilterOperator.IS_EMPTY:
        return lambda metadata: _is_empty(metadata.get(key))
    if operator not in _HOLDS and operator not in _ORDER:
        raise UsageError(f"ragkv knows no filter operator {operator!r}; use {', '.join(_known())}.")
    if (wanted := _wanted(operator, value)) is not None:
        raise UsageError(f"The filter operator {operator.value!r} takes {wanted}, not {value!r} (key {key!r}).")
    holds = _HOLDS.get(operator) or _ordered(_ORDER[operator])
    without = operator in _WITHOUT

    def condition(metadata: Mapping[str, Any]) -> bool:
        found = metadata.get(key)
        return without if found is None else holds(found, value)

    return condition


def _wanted(operator: FilterOperator, value: Any) -> str | None:
    """What the operator takes, if the value is not that; else None."""
    if operator in _LISTS:
        return None if isinstance(value, list) else "a list"
    if operator in _TEXTS:
        return None if isinstance(value, str) else "a text"
    if operator in (FilterOperator.EQ, FilterOperator.NE):
        return 'a value (a key that is not there is operator "is_empty")' if value is None else None
    return None if isinstance(value, (int, float, str)) else "a number or a text"


def _known() -> list[str]:
    return [operator.value for operator in (*_HOLDS, *_ORDER, FilterOperator.IS_EMPTY)]


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Compare numbers with numbers and texts with texts; a number and a text never match."""

    def holds(found: Any, value: Any) -> bool:
        alike = isinstance(found, str) if isinstance(value, str) else isinstance(found, (int, float))
        return alike and compare(found, value)

    return holds


def _contains(found: Any, value: Any) -> bool:
    """Whether a list has the value as an element, or a text as a part."""
    if isinstance(found, str):
        return isinstance(value, str) and value in found
    return isinstance(found, (list, dict)) and value in found


def _is_empty(found: Any) -> bool:
    return found is None or found == "" or found == []
