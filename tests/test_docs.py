"""The docs match the code: generated pages are up to date, links resolve, and the menu has every page."""

import re
import runpy
from pathlib import Path

import pytest

from ragkv.benchmarks.evaluation.families import Survey

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MADE = runpy.run_path(str(DOCS / "site" / "pages.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+(?:\([^()]*\))?[^()\s]*)\)")
SOURCES = [
    path
    for folder in ("ragkv", "store", "retrievers", "cli", "ingest", "benchmarks", "examples", "docs/site")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
PATH = re.compile(r"(?<![\w./-])(?:ragkv|store|retrievers|cli|ingest|benchmarks|docs|tests)/[\w/-]+\.(?:py|md)\b")
NAME = re.compile(r"(?<![\w./-])ragkv((?:\.[A-Za-z_]\w*)+)")
NO_MODULES = {
    "ragkv.toml",
    "ragkv.json",
    *(f"ragkv.{group}" for group in ("codecs", "embedders", "loaders", "rerankers")),
}
"""File names, and groups of entry points."""
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """The page without code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings on which GitHub and the site agree."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    heads = [re.sub(r"[^\w\s-]", "", head.lower()).strip() for head in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"\s", "-", head) for head in heads} & {re.sub(r"[\s-]+", "-", head) for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    broken = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        if not file.exists() or (anchor and (file.suffix != ".md" or anchor not in anchors(file))):
            broken.append(target)
    assert broken == []


def test_the_page_of_commands_is_up_to_date():
    made = MADE["commands"]()
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == made, "run: make cli-docs"


@pytest.mark.parametrize(
    ("page", "name", "arguments"),
    [("models", "families", (Survey.recorded(),)), ("operations", "sizing", ()), ("questions", "options", ())],
)
def test_a_table_is_up_to_date(page, name, arguments):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert MADE["placed"](text, name, MADE[name](*arguments)) == text, "run: make cli-docs"


def test_every_page_is_in_the_menu():
    menu = re.findall(r"[\w-]+\.md", (DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(menu) == sorted(page.name for page in DOCS.glob("*.md"))


def test_the_python_page_names_what_there_is():
    for name in re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        found = __import__(name if attribute.islower() and module == "ragkv" else module, fromlist=["_"])
        assert found.__name__ == name or hasattr(found, attribute), name


def named_file(words: list[str]) -> tuple[Path, list[str]]:
    """The source file of a dotted name after `ragkv.`, and the rest of the name inside it."""
    for count in range(len(words), 0, -1):
        for base in (ROOT / "ragkv", ROOT):  # store, ingest, … are next to the package
            path = base.joinpath(*words[:count])
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file.exists():
                    return file, words[count:]
    return ROOT / "ragkv" / "__init__.py", words


def missing_names(file: Path) -> list[str]:
    """Names in a page, or in a source file's prose, that do not exist."""
    text = file.read_text(encoding="utf-8")
    missing = [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    for found in NAME.finditer(text):
        if found[0] in NO_MODULES or (file.suffix == ".py" and text[found.start() - 1] != "`"):  # mypy checks code
            continue
        source, rest = named_file(found[1][1:].split("."))
        if rest and not re.search(rf"\b{rest[0]}\b", source.read_text(encoding="utf-8")):
            missing.append(found[0])
    return missing


def test_files_and_names_that_are_written_of_exist():
    found = {str(file.relative_to(ROOT)): missing for file in [*PAGES, *SOURCES] if (missing := missing_names(file))}
    assert found == {}
