"""The rooms: what lies in the package, that imports make no circle, and that the picture of them is up to date."""

from __future__ import annotations

import graphlib
import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent
DRAWING = runpy.run_path(str(ROOT / "docs" / "site" / "rooms.py"))
MODULES = {"__init__", "config", "decoding", "errors", "pipeline", "types", "visible"}
"""What lies in `ragkv/` beside the rooms: words that every room uses, and the facade."""
MOST_ROOMS = 12


def test_no_circle_of_imports_not_even_for_types():
    modules = DRAWING["modules"]()
    graph = {
        name: {other for other in DRAWING["imports"](path, set(modules)) if not name.startswith(f"{other}.")} - {name}
        for name, path in modules.items()
    }
    assert len(graph) > 100
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the modules of a circle


def test_the_package_is_rooms_and_little_else():
    rooms = {path.parent.name for path in (ROOT / "ragkv").glob("*/__init__.py")}
    assert {path.stem for path in (ROOT / "ragkv").glob("*.py")} == MODULES
    assert len(rooms) <= MOST_ROOMS, sorted(rooms)


def test_the_picture_of_the_rooms_is_up_to_date():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert DRAWING["page"](text) == text, "run: make rooms"
