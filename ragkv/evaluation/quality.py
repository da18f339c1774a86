"""The quality reports kept in an index: the newest of each model, read without loading torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

from ragkv.errors import MissingExtraError, UsageError, install_hint
from ragkv.evaluation.io import write_whole
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


def check_plot(path: Path) -> None:
    """Refuse, before hours of work, a picture that could not be drawn: UsageError or MissingExtraError."""
    if path.suffix not in (".svg", ".png"):
        raise UsageError(f"--plot writes .svg or .png, not {path.name!r}.")
    if find_spec("matplotlib") is None:
        raise MissingExtraError(f"--plot needs matplotlib; {install_hint('plots')}.")


def plot_quality(report: dict[str, Any], path: Path) -> None:
    """Draw a report's engines into `path`: quality with its interval over the median time to the first token.

    Quality is the share of right answers if there are gold answers, else of tokens on which the engine agrees with
    full attention. Raises RagkvError if the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    gold, full = report["full_accuracy"], report["full_first_token"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    points: list[tuple[str, Any, Any, list[float] | None]] = [("full", full, 1.0 if gold is None else gold, None)]
    for row in report["engines"]:
        ends = row["ci95"]["top1"] if gold is None else [gold - end for end in reversed(row["ci95"]["loss"])]
        points.append((row["label"], row["first_token"], row["top1"] if gold is None else row["accuracy"], ends))
    for number, (label, seconds, value, ends) in enumerate(points):
        axes.plot(seconds * 1000, 100 * value, "o", color=f"C{number % 10}")
        axes.annotate(label, (seconds * 1000, 100 * value), xytext=(6, 4), textcoords="offset points", fontsize=8)
        if ends is not None:
            axes.plot([seconds * 1000] * 2, [100 * end for end in ends], color=f"C{number % 10}", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("first token, ms, with KV in memory")
    axes.set_ylabel("same first choice as full attention, %" if gold is None else "right answers, %")
    axes.set_title(f"{report['model']}: {report['questions']} questions, top {report['top_k']}", loc="left")
    held = BytesIO()
    figure.savefig(held, format=path.suffix[1:], dpi=150)
    write_whole(path, held.getvalue(), instead="give another --plot")


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
