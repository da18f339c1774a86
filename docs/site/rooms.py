"""Draws the rooms of the package into docs/design.md, from the imports between them: `make rooms`."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- rooms -->\n", "<!-- /rooms -->\n"
WORDS = ("_moved", "config", "decoding", "errors", "types")
"""Modules that every room uses; drawn as one box, and without arrows to it."""


def modules(*, installed: bool = False) -> dict[str, Path]:
    """Every module by its dotted name; with `installed` those of the wheel alone."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {}
    for package, folder in folders["package-dir"].items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = [part for part in path.relative_to(ROOT / folder).with_suffix("").parts if part != "__init__"]
            name = ".".join([package, *parts])
            package_of = name if path.name == "__init__.py" else name.rpartition(".")[0]
            if package_of in folders["packages"] or (not installed and (path.parent / "__init__.py").exists()):
                found[name] = path
    return found


def imports(path: Path, known: set[str], *, in_functions: bool = False) -> set[str]:
    """The modules of `known` that `path` imports when it is read, those under TYPE_CHECKING included.

    With `in_functions`, also those that it imports later.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = set(_named(tree, skipped=() if in_functions else (ast.FunctionDef, ast.AsyncFunctionDef))) & known
    # `from package import module` is a tie to the module; to the package only where one of its own names is taken
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def _named(tree: ast.AST, *, skipped: tuple[type[ast.AST], ...]) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, skipped):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            yield from _named(node, skipped=skipped)


def room_graph() -> dict[str, set[str]]:
    """Each room of the wheel and the rooms that its modules import."""
    known = modules(installed=True)
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        room = _room(name)
        if room is not None:
            graph.setdefault(room, set()).update(
                other for each in imports(path, set(known)) if (other := _room(each)) not in (None, room)
            )
    return graph


def picture(graph: dict[str, set[str]]) -> str:
    """A Mermaid flowchart; an arrow that follows from two others is left out."""
    reach: dict[str, set[str]] = {}

    def below(room: str) -> set[str]:
        if room not in reach:
            reach[room] = set(graph[room]).union(*(below(other) for other in graph[room]))
        return reach[room]

    lines = ["```mermaid", "flowchart TD"]
    for room in sorted(graph):
        lines.append(f"    {room}")
        direct = {to for to in graph[room] if not any(to in below(other) for other in graph[room] - {to})}
        lines += [f"    {room} --> {to}" for to in sorted(direct)]
    return "\n".join([*lines, "```"]) + "\n"


def page(text: str) -> str:
    """The page `text` with the picture as the imports are now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + picture(room_graph()) + END + after


def _room(module: str) -> str | None:
    parts = module.split(".")
    return None if len(parts) == 1 or parts[1] in WORDS else parts[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
