"""Names of classes, functions, variables and attributes use the field's terms (CONTRIBUTING.md, "How we write")."""

import ast
import re
import runpy
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = runpy.run_path(str(ROOT / "docs" / "site" / "pages.py"))["modules"]()
FILES = sorted({*MODULES.values(), *(ROOT / "benchmarks").rglob("*.py")})
WITHDRAWN = (
    "book census contender crowd doorway errand everybody exam footprint ground jobdesk keeper knock knows "
    "lockstep lodger mender mininote portrait proof recall roster said settling shardground slab stopwatch "
    "talker tell teller telling told untold"
)
ALLOWED = {
    "MINI_NOTE",  # a note about mini
    "recall",  # the metric
    "recall_5",
    "recall_at",
    "tell",  # the method of files
}
FILLERS = {"at", "each", "found", "given", "kept", "made", "one"}
"""They say nothing about a value that is used for more than three lines."""
WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+")


def words(identifier: str) -> set[str]:
    """The words of a name in snake_case or CamelCase, also in the singular, and the name without underscores."""
    found = {word.lower() for word in WORD.findall(identifier)} | {identifier.replace("_", "").lower()}
    return found | {word.removesuffix("s") for word in found}


def identifiers(file: Path) -> Iterator[tuple[int, str]]:
    with file.open("rb") as stream:
        for token in tokenize.tokenize(stream.readline):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string


def test_no_name_has_a_withdrawn_word():
    assert len(FILES) > 150
    withdrawn = set(WITHDRAWN.split())
    suspected = [  # no need to tokenise the others
        file
        for file in FILES
        if any(words(name) & withdrawn for name in set(re.findall(r"\w+", file.read_text("utf-8"))))
    ]
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in suspected
        for line, name in identifiers(file)
        if name not in ALLOWED and words(name) & withdrawn
    ]
    assert found == []


SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def fillers(scope: ast.AST) -> Iterator[tuple[int, str]]:
    """The variables, parameters and fields of a scope that have a name of FILLERS for more than three lines."""
    nodes = list(ast.iter_child_nodes(scope))
    for node in nodes:  # it grows
        if not isinstance(node, SCOPES):
            nodes += ast.iter_child_nodes(node)
    bound = [(node.lineno, node.arg) for node in nodes if isinstance(node, ast.arg)]
    bound += [
        (node.lineno, node.id) for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    for name in FILLERS.intersection(name for _, name in bound):
        first = min(line for line, other in bound if other == name)
        last = max(
            node.lineno
            for node in ast.walk(scope)
            if isinstance(node, ast.Name | ast.arg) and name in vars(node).values()
        )
        if last - first > 3 or isinstance(scope, ast.ClassDef):  # a field is used elsewhere
            yield first, name


def test_no_filler_names_what_is_used_for_long():
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in FILES
        for tree in [ast.parse(file.read_text("utf-8"))]
        for scope in (tree, *(node for node in ast.walk(tree) if isinstance(node, SCOPES)))
        for line, name in fillers(scope)
    ]
    assert found == []


def test_no_public_class_name_occurs_twice():
    found = defaultdict(list)
    for name, file in MODULES.items():
        if name in ("ragkv.integrations.haystack", "ragkv.integrations.langchain"):
            continue  # each framework's retriever has the name that its users expect
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}
