"""The reports of `ragkv doctor` that an index keeps, the newest of each model. No function here loads torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

import msgspec

if TYPE_CHECKING:
    from ragkv.store import Store

QUALITY = "quality"
"""The key in `meta` of the reports, newest first."""
Verdict = Literal["good", "fair", "poor", "not enough to tell"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
UNKNOWN: Verdict = "not enough to tell"
MOST_REPORTS = 8

_Share: TypeAlias = Annotated[float, msgspec.Meta(ge=-1, le=1)]
_Interval: TypeAlias = tuple[_Share, _Share]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Intervals(msgspec.Struct):
    top1: _Interval
    answers: _Interval
    loss: _Interval | None


class _Row(msgspec.Struct):
    engine: str
    verdict: Verdict
    top1: _Share
    answers: _Share
    accuracy: _Share | None
    ci95: _Intervals


class _Report(msgspec.Struct):
    """The fields that a reader needs, because an index may contain anything."""

    date: str
    model: str
    fingerprint: str
    generation: _Count
    questions: _Count
    gold: _Count
    full_accuracy: _Share | None
    engines: list[_Row]


def is_report(value: Any) -> bool:
    """Whether a value from an index has the form of a report."""
    try:
        report = msgspec.convert(value, _Report)
    except (msgspec.ValidationError, OverflowError):
        return False
    return report.full_accuracy is not None or all(row.accuracy is None for row in report.engines)


def are_reports(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_report, value))


def keep_quality(store: Store, report: dict[str, Any]) -> None:
    """Put a report first and drop the same model's earlier one. Raises StoreError if the index cannot be written."""
    others = [other for other in kept_quality(store) if other["fingerprint"] != report["fingerprint"]]
    store.put_meta(QUALITY, [report, *others][:MOST_REPORTS])


def kept_quality(store: Store) -> list[dict[str, Any]]:
    """All kept reports that can be read, newest first."""
    reports = store.get_meta(QUALITY)
    return [report for report in reports if is_report(report)] if isinstance(reports, list) else []


def unread_quality(store: Store) -> bool:
    """Whether the index keeps something that is not a report of `keep_quality`."""
    value = store.get_meta(QUALITY)
    return value is not None and not are_reports(value)


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
