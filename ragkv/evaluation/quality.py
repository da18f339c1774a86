"""The quality reports kept in an index: the newest of each model, read without loading torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from ragkv.index.conversation import QUALITY
from ragkv.store import Store

Verdict = Literal["good", "fair", "poor", "not enough to tell"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
UNKNOWN: Verdict = "not enough to tell"

_MOST = 8  # reports that an index keeps, one per model
_Check = Callable[[Any], bool]


def _text(found: Any) -> bool:
    return isinstance(found, str)


def _whole(found: Any) -> bool:
    return isinstance(found, int) and 0 <= found < 1 << 63


def _share(found: Any) -> bool:
    return isinstance(found, (int, float)) and -1 <= found <= 1


def _share_or_none(found: Any) -> bool:
    return found is None or _share(found)


_REPORT: dict[str, _Check] = {
    "date": _text,
    "model": _text,
    "fingerprint": _text,
    "generation": _whole,
    "questions": _whole,
    "gold": _whole,
    "full_accuracy": _share_or_none,
    "engines": lambda found: isinstance(found, list),
}
_ROW: dict[str, _Check] = {
    "engine": _text,
    "verdict": lambda found: found in VERDICTS,
    "top1": _share,
    "answers": _share,
    "accuracy": _share_or_none,
}
"""The fields that a reader needs, with their checks, because an index may contain anything."""


def keep_quality(store: Store, report: dict[str, Any]) -> None:
    """Put a report first and drop the same model's earlier one. Raises StoreError if the index cannot be written."""
    others = [kept for kept in kept_quality(store) if kept["fingerprint"] != report["fingerprint"]]
    store.put_meta(QUALITY, [report, *others][:_MOST])


def kept_quality(store: Store) -> list[dict[str, Any]]:
    """All kept reports that can be read, newest first.

    Reports of early versions have no intervals; their verdicts ignored how few questions were asked, so they become
    "not enough to tell".
    """
    found = store.get_meta(QUALITY)
    reports = [report for report in found if _readable(report)] if isinstance(found, list) else []
    return [{**report, "engines": [_engine(row) for row in report["engines"]]} for report in reports]


def unread_quality(store: Store) -> bool:
    """Whether the index keeps something that is not a report of `keep_quality`."""
    found = store.get_meta(QUALITY)
    return found is not None and not (isinstance(found, list) and all(map(_readable, found)))


def _readable(report: Any) -> bool:
    return _has(report, _REPORT) and all(_has(row, _ROW) for row in report["engines"])


def _has(found: Any, fields: dict[str, _Check]) -> bool:
    return isinstance(found, dict) and all(name in found and check(found[name]) for name, check in fields.items())


def _engine(row: dict[str, Any]) -> dict[str, Any]:
    ci95 = row.get("ci95")
    if isinstance(ci95, dict) and all(_interval(ci95.get(name)) for name in ("top1", "answers")):
        loss = ci95.get("loss")
        if loss is None or _interval(loss):
            return row
    return {**row, "verdict": UNKNOWN, "ci95": None}


def _interval(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(map(_share, found))


def outdated(store: Store, report: dict[str, Any]) -> str | None:
    """Why a report does not apply to the index as it is now, or None if it does.

    It is compared with the model that made the index, so that nothing has to be loaded or hashed.
    """
    made = store.get_meta("model")
    if isinstance(made, dict) and made.get("fingerprint") != report["fingerprint"]:
        return "another model than the index's"
    if report["generation"] != store.generation:
        return "the documents changed since"
    return None
