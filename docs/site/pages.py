"""Writes the parts of the documentation that are made from code.

Run by `python docs/site/pages.py`, `make cli-docs` or `make rooms`. It makes the page of every command, from the typer
application; the table of families, from `make models`; the table of GB per million tokens, from models'
published configs; and the picture of the rooms, from the imports between modules.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import typer.main
from typer.cli import get_docs_for_click

from ragkv.benchmarks.evaluation.families import COLUMNS, ENGINES, EXACT, Survey
from ragkv.cli.main import app
from ragkv.cli.options import typer_option
from ragkv.question import question_options
from ragkv.store import Int4, Int8
from ragkv.types import SCALE_BYTES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HEAD = "<!-- Made by `make cli-docs` from the commands themselves; tests/test_docs.py compares. -->\n\n"
WORDS = ("config", "decoding", "errors", "question", "types")
"""Modules that every room uses; drawn as one box, and without arrows to it."""
ALSO = {"chat": "chat", "file": "file", "mcp": "MCP"}


def placed(text: str, name: str, made: str) -> str:
    """A page's text with `made` placed between `<!-- name -->` and `<!-- /name -->`."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, rest = text.split(begin)
    return before + begin + made + end + rest.split(end)[1]


def commands() -> str:
    """The page of all commands as they are now."""
    command = typer.main.get_command(app)
    with typer.Context(command, info_name="ragkv") as context:
        text = get_docs_for_click(obj=command, ctx=context, name="ragkv", title="Commands")
    return HEAD + "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def families(survey: Survey) -> str:
    """The table of a survey."""
    counts = ", ".join(f"`{name}` {survey.exact(name)}" for name in ENGINES)
    lines = [
        f"Exact, of the {len(survey.verdicts)} decoder families of transformers {survey.transformers}: {counts}.",
        f"*error* is the largest difference of scores over the largest score in float32; up to {EXACT:.0e} is exact.",
        "",
    ]
    for cells in (COLUMNS, ["---"] * len(COLUMNS), *(verdict.cells() for verdict in survey.verdicts)):
        escaped = (cell.replace("|", r"\|").replace("<", r"\<") for cell in cells)
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines) + "\n"


def options() -> str:
    """The table of a question's options."""
    lines = ["| option | command line | meaning | also |", "| --- | --- | --- | --- |"]
    for field in question_options().values():
        flag = typer_option(field).param_decls
        command = flag[0] if flag else f"--{field.name.replace('_', '-')}"
        more = ", ".join(shown for door, shown in ALSO.items() if door in field.option.doors)
        command += " FILE" if field.option.in_file else ""
        lines.append(f"| `{field.name}` | `{command}` | {field.option.help} | {more} |")
    return "\n".join(lines) + "\n"


class Model(NamedTuple):
    """Facts of a model's config.json."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def bytes_per_token(self) -> int:
        """In bf16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


MODELS = (
    Model("Qwen3 4B", 36, 8, 128),
    Model("Gemma 3 4B", 34, 4, 256),
    Model("Llama 3.1 8B", 32, 8, 128),
    Model("Qwen3 8B", 36, 8, 128),
    Model("Mistral Nemo 12B", 40, 8, 128),
    Model("Phi-4 14B", 40, 10, 128),
)


def sizing() -> str:
    """GB (1e9 bytes) for a million tokens.

    Bytes per token of one encoding are 2 · layers · KV heads · head dim · 2 bytes (bf16); `q8` has a byte for each
    number and two for each head; `int8` and `int4` use at most the bits per number that the codecs promise.
    """
    shares = {codec.id: (codec.key_bits + codec.value_bits) / 32 for codec in (Int8(), Int4())}
    lines = [
        "| model | layers x KV heads x head dim | KiB per token | `raw` | `q8` | `int8` | `int4` |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model in MODELS:
        million = model.bytes_per_token / 1000  # bytes per token times a million tokens, in GB
        eight = (model.head_dim + SCALE_BYTES) / (2 * model.head_dim)
        sizes = [million * share for share in (1, eight, shares["int8"], shares["int4"])]
        shape = f"{model.layers} x {model.kv_heads} x {model.head_dim}"
        cells = [model.name, shape, f"{model.bytes_per_token / 1024:.0f}", *(f"{size:.0f} GB" for size in sizes)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


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
    """The modules of `known` that `path` imports at its top level, those under TYPE_CHECKING included.

    With `in_functions`, also those that its functions import.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = set(_named(tree, skipped=() if in_functions else (ast.FunctionDef, ast.AsyncFunctionDef))) & known
    # `from package import module` depends on the module, and on the package only if one of its own names is imported
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
    """A Mermaid flowchart; arrows that follow from others are left out."""
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


def _room(module: str) -> str | None:
    parts = module.split(".")
    return None if len(parts) == 1 or parts[1] in ("__main__", *WORDS) else parts[1]


if __name__ == "__main__":
    (DOCS / "cli.md").write_text(commands(), encoding="utf-8")
    for page, name, made in (
        ("models.md", "families", families(Survey.recorded())),
        ("operations.md", "sizing", sizing()),
        ("design.md", "rooms", picture(room_graph())),
        ("questions.md", "options", options()),
    ):
        path = DOCS / page
        path.write_text(placed(path.read_text(encoding="utf-8"), name, made), encoding="utf-8")
