"""The package's structure: its folders, no import cycles, and an up-to-date diagram."""

import graphlib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DRAWING = runpy.run_path(str(ROOT / "docs" / "site" / "pages.py"))
MODULES = {"config", "decoding", "errors", "pipeline", "plan", "question", "ranks", "types"}
"""Modules in `ragkv/` besides the packages: the facade, and names that users import."""


@pytest.fixture(scope="module")
def rooms() -> dict[str, set[str]]:
    """The packages that each package imports."""
    graph: dict[str, set[str]] = DRAWING["room_graph"]()
    return graph


def test_no_circle_of_imports_not_even_for_types_or_in_functions():
    modules = DRAWING["modules"]()
    graph = {
        name: {
            other
            for other in DRAWING["imports"](path, set(modules), in_functions=True)
            if not name.startswith(f"{other}.")
        }
        - {name}
        for name, path in modules.items()
    }
    assert len(graph) > 100
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names the modules of a cycle


def test_the_package_is_rooms_and_little_else():
    assert {path.stem for path in (ROOT / "ragkv").glob("*.py")} == {"__init__", "__main__"} | MODULES


def test_a_module_outside_of_the_rooms_is_one_for_users():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert {module for module in MODULES if f"::: ragkv.{module}" in page} == MODULES


def test_every_room_is_explained(rooms):
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for room in rooms:
        row = rf"^\| `[^`]*\b{room}(/|\.py)[^`]*` \|"
        assert re.search(row, text, re.MULTILINE), f"docs/design.md does not say what {room} is for"


def test_the_picture_of_the_rooms_is_up_to_date(rooms):
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert DRAWING["placed"](text, "rooms", DRAWING["picture"](rooms)) == text, "run: make rooms"
