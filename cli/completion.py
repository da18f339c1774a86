"""Shell completion for options whose values have names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ragkv.boundary.visible import one_line
from ragkv.config import CONFIG_FILE, MODES

__all__ = ["codec_lists", "codecs", "engine_lists", "engines", "indexes", "modes"]


def engines(incomplete: str) -> list[str]:
    """Names of engines."""
    from ragkv.engines import engine_names

    return [name for name in engine_names() if name.startswith(incomplete)]


def engine_lists(incomplete: str) -> list[str]:
    """Names of engines for the last part of a list with commas."""
    return _listed(incomplete, engines)


def codecs(incomplete: str) -> list[str]:
    """Names of codecs."""
    from ragkv.store import codec_names

    return [name for name in codec_names() if name.startswith(incomplete)]


def codec_lists(incomplete: str) -> list[str]:
    """Names of codecs for the last part of a list with commas."""
    return _listed(incomplete, codecs)


def modes(incomplete: str) -> list[str]:
    """Modes of retrieval."""
    return [name for name in MODES if name.startswith(incomplete)]


def indexes(incomplete: str) -> list[str]:
    """Folders that are indexes, then other folders, which may contain one (with a slash at the end)."""
    before = incomplete[: incomplete.rfind("/") + 1]
    folder = Path(before or ".").expanduser()
    try:
        inside = sorted(
            path
            for path in folder.iterdir()
            if path.is_dir()
            and not path.name.startswith(".")
            and path.name == one_line(path.name)  # nobody types a name with control characters
        )
    except OSError:
        return []
    names = {path: f"{before}{path.name}" for path in inside}
    found = [name for path, name in names.items() if (path / CONFIG_FILE).is_file()]
    leading = [f"{name}/" for path, name in names.items() if not (path / CONFIG_FILE).is_file()]
    return [name for name in [*found, *leading] if name.startswith(incomplete)]


def _listed(incomplete: str, names: Callable[[str], list[str]]) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in names(last) if name not in before.split(",")]
