"""Quality reports kept in the index: the newest of each model, and what a later reader must know of them."""

from __future__ import annotations

from typing import Any

from ragkv.store import Store

__all__ = ["keep_quality", "kept_quality", "outdated"]

_META = "quality"
_MOST = 8  # models that were tried on one index


def keep_quality(store: Store, report: dict[str, Any]) -> None:
    """Put a report first, in place of the same model's earlier one. StoreError when the index cannot be written."""
    others = [kept for kept in kept_quality(store) if kept["fingerprint"] != report["fingerprint"]]
    store.put_meta(_META, [report, *others][:_MOST])


def kept_quality(store: Store) -> list[dict[str, Any]]:
    """All kept reports, newest first."""
    found = store.get_meta(_META)
    return list(found) if isinstance(found, list) else []


def outdated(store: Store, report: dict[str, Any]) -> str | None:
    """Why a report does not speak of the index as it is now; None when it does.

    The model is the one that made the index, so that nothing has to be loaded or hashed.
    """
    made = store.get_meta("model")
    if isinstance(made, dict) and made["fingerprint"] != report["fingerprint"]:
        return "another model than the index's"
    if report["generation"] != store.generation:
        return "the documents changed since"
    return None
