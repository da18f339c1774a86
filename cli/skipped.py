"""What an ingest left out, grouped by reason so that the list stays short."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.cli.console import count, note

if TYPE_CHECKING:
    from ragkv.ingest import Skipped

__all__ = ["tell_skipped"]

_REASONS = 12  # lines of a list
_NAMES = 3  # of each reason


def tell_skipped(skipped: Sequence[Skipped], left_out: Sequence[Skipped]) -> None:
    """Print two short lists on stderr: files that were skipped, and parts of files that were left out."""
    _list(skipped, f"skipped {count(len(skipped), 'file')}")
    _list(left_out, f"left out {count(len(left_out), 'part')} of {count(len({s.path for s in left_out}), 'document')}")


def _list(skipped: Sequence[Skipped], head: str) -> None:
    """Group by reason if many files share one; group by file if one file has many reasons (its lines or pages)."""
    if not skipped:
        return
    by_reason: dict[str, list[str]] = {}
    by_path: dict[str, list[str]] = {}
    for skip in skipped:
        name = _short(skip.path)
        by_reason.setdefault(skip.reason, []).append(name)
        by_path.setdefault(name, []).append(skip.reason)
    files_first = len(by_path) <= len(by_reason)
    groups = by_path if files_first else by_reason
    ranked = sorted(groups.items(), key=lambda group: -len(group[1]))  # stable: otherwise as they came
    lines = []
    for first, rest in ranked[:_REASONS]:
        more = f" and {len(rest) - _NAMES:,} more" if len(rest) > _NAMES else ""
        listed = ("; " if files_first else ", ").join(rest[:_NAMES]) + more
        if files_first or len(rest) == 1:
            lines.append(f"{first}: {listed}" if files_first else f"{listed}: {first}")
        else:
            lines.append(f"{len(rest):,} files: {first} ({listed})")
    if len(ranked) > _REASONS:
        lines.append(f"and {len(ranked) - _REASONS:,} more {'files' if files_first else 'reasons'}")
    cut = len(ranked) > _REASONS or any(len(rest) > _NAMES for _, rest in ranked)
    note(f"{head}{'; --json lists all' if cut else ''}:")
    for line in lines:
        note(f"  {line}")


def _short(path: Path) -> str:
    """The path relative to the working directory, if it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
