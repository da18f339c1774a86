"""Facts that an index records about itself in its store, and the check that they have the form that ragkv writes.

The facts are: the model that cut the chunks, the embedder that made the vectors, the parts of the prompt, and the
reports of `ragkv doctor`. They have no checksums, and an index may come from anyone, so a fact of another form is
treated as damage. `repair` drops it, and it is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ragkv.errors import CorruptStoreError
from ragkv.store import Finding, Store

__all__ = ["FACTS", "damaged_facts", "read_fact"]

_MOST_NEWLINES = 1000  # as `PromptConfig` has it
_PARTS = {"prefix", "before_question", "after_question", "separator"}


def read_fact(store: Store, name: str) -> Any:
    """The fact, or None if there is none; `CorruptStoreError` if it does not have its form."""
    found = store.get_meta(name)
    if found is not None and not FACTS[name](found):
        raise CorruptStoreError(f"the fact {name!r} in {store.directory} is damaged: run `ragkv repair`")
    return found


def damaged_facts(store: Store) -> list[Finding]:
    """A finding for every fact that does not have its form; the store itself reports facts that are not JSON."""
    findings = []
    for name in FACTS:
        try:
            found = store.get_meta(name)
        except CorruptStoreError:
            continue
        if found is not None and not FACTS[name](found):
            what = "it does not have the form of this fact"
            key = b"fact/" + name.encode()
            findings.append(Finding(kind="damaged", table="meta", key=key, where=f"fact {name!r}", what=what))
    return findings


def _texts(found: Any, *names: str) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name), str) for name in names)


def _number(found: Any) -> bool:
    return type(found) in (int, float) and abs(found) < 1 << 64  # false for NaN and infinities


def _is_embedder(found: Any) -> bool:
    return _texts(found, "fingerprint") and isinstance(found.get("stamp", ""), str)


def _is_prompt(found: Any) -> bool:
    """Parts and ids may be missing: earlier versions did not record them."""
    if not isinstance(found, dict) or not isinstance(found.get("model", ""), str):
        return False
    parts, ids = found.get("parts"), found.get("prefix_ids", [])
    newlines = parts.get("prefix_newlines", 0) if isinstance(parts, dict) else 0
    whole = parts is None or (
        _texts(parts, *_PARTS)
        and parts.keys() <= _PARTS | {"prefix_newlines", "bos"}
        and parts.get("bos", "none") in ("auto", "none")
        and type(newlines) is int
        and 0 <= newlines <= _MOST_NEWLINES
    )
    return whole and isinstance(ids, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in ids)


def _is_report(found: Any) -> bool:
    return (
        _texts(found, "fingerprint", "date", "model")
        and all(_number(found.get(name)) for name in ("questions", "generation"))
        and isinstance(found.get("engines"), list)
        and all(_is_verdict(row, found) for row in found["engines"])
    )


def _is_verdict(row: Any, report: Mapping[str, Any]) -> bool:
    """A row with an accuracy needs the report's accuracy of `full` and its number of gold answers."""
    return (
        _texts(row, "engine", "verdict")
        and all(_number(row.get(name)) for name in ("top1", "answers"))
        and (
            row.get("accuracy", ...) is None
            or all(map(_number, (row.get("accuracy"), report.get("full_accuracy"), report.get("gold"))))
        )
    )


FACTS: Mapping[str, Callable[[Any], bool]] = {
    "model": lambda found: _texts(found, "fingerprint"),
    "embedder": _is_embedder,
    "prompt": _is_prompt,
    "quality": lambda found: isinstance(found, list) and all(map(_is_report, found)),
}
"""The facts that ragkv records, each with the check of its form."""
