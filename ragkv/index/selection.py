"""Choose documents by name, or by conditions on their fields and metadata."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Sequence
from pathlib import Path

from ragkv.errors import UsageError
from ragkv.store import StoredDocument
from ragkv.types import Document

__all__ = ["all_values", "is_pattern", "match", "unmatched", "values_of", "wanted_values", "where_filter"]

_FIELDS = ("source", "title", "media_type", "document_id")


def match(documents: Sequence[StoredDocument], names: Sequence[str]) -> list[StoredDocument]:
    """The documents that names mean: an id, a path, a source's name or its last part, or a pattern (`*`, `?`, `[…]`).

    Patterns apply to ids and source names. Raises UsageError for a name that means no document, and for one that
    means several without being a pattern.
    """
    chosen: dict[str, StoredDocument] = {}
    for name in names:
        found = _named(documents, name)
        if len(found) > 1 and not is_pattern(name):
            ids = ", ".join(stored.document.document_id for stored in found[:5])
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise UsageError(f"{name!r} names {len(found)} documents; say which by id: {ids}{more}.")
        if not found:
            known = {form: stored for stored in documents for form in _forms(stored)}
            close = [known[form].document.document_id for form in difflib.get_close_matches(name, known, n=3)]
            near = ", ".join(dict.fromkeys(close))
            hint = f"near it are {near}." if close else "ragkv stats --per-document lists all."
            raise UsageError(f"No document is called {name!r}; {hint}")
        chosen.update((stored.document.document_id, stored) for stored in found)
    return list(chosen.values())


def wanted_values(conditions: Sequence[str]) -> dict[str, list[str]]:
    """The patterns by field of conditions `FIELD=PATTERN`; UsageError for a condition of another form."""
    wanted: dict[str, list[str]] = {}
    for condition in conditions:
        name, sign, pattern = condition.partition("=")
        if not sign or not name.strip():
            raise UsageError(f"--where takes FIELD=PATTERN, as in source=notes/*.md, not {condition!r}.")
        wanted.setdefault(name.strip(), []).append(pattern.strip())
    return wanted


def where_filter(conditions: Sequence[str]) -> Callable[[Document], bool]:
    """A test for conditions `FIELD=PATTERN`: of several conditions on one field, one must hold; all fields must match.

    FIELD is source, title, media_type, document_id or a key of the document's metadata; PATTERN may hold `*`, `?` and
    `[…]`. A source also matches by its last part (`source=a.md`). UsageError for a condition of another form.
    """
    wanted = wanted_values(conditions)

    def holds(document: Document) -> bool:
        return all(
            any(fnmatch.fnmatchcase(value, pattern) for value in values_of(document, name) for pattern in patterns)
            for name, patterns in wanted.items()
        )

    return holds


def unmatched(conditions: Sequence[str]) -> str:
    """What to say if no document meets the conditions."""
    return f"No document matches --where {' '.join(conditions)}; ragkv ls lists all."


def values_of(document: Document, name: str) -> tuple[str, ...]:
    """The values of a field, each once: a source has its last part too."""
    if name == "source":
        return tuple(dict.fromkeys((document.source, Path(document.source).name)))
    value = getattr(document, name) if name in _FIELDS else document.metadata.get(name)
    return () if value is None else (value,)


def all_values(document: Document) -> dict[str, tuple[str, ...]]:
    """The values of every field that a document has."""
    found = {name: values_of(document, name) for name in (*_FIELDS, *document.metadata)}
    return {name: values for name, values in found.items() if values}


def _named(documents: Sequence[StoredDocument], name: str) -> list[StoredDocument]:
    try:
        path = str(Path(name).resolve())
    except ValueError:  # no path can have such a name: it holds a null byte, or half of a surrogate pair
        path = name
    for wanted in ({name}, {path}):
        if by_id := [stored for stored in documents if stored.document.document_id in wanted]:
            return by_id
    for form in (lambda source: source, lambda source: Path(source).name):
        if by_source := [stored for stored in documents if form(stored.document.source) == name]:
            return by_source
    if not is_pattern(name):
        return []
    return [
        stored
        for stored in documents
        if any(fnmatch.fnmatchcase(form, pattern) for form in _forms(stored) for pattern in (name, path))
    ]


def _forms(stored: StoredDocument) -> tuple[str, str]:
    return stored.document.document_id, stored.document.source


def is_pattern(name: str) -> bool:
    """Whether a name is a pattern: one that can match others than itself."""
    return any(sign in name for sign in "*?[")
