"""The wheel contains what the folders contain, and nothing is importable without the `ragkv` prefix."""

import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from clichild import CliChild

from ragkv.errors import install_hint
from ragkv.model.checkpoint import _NEEDS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPED = PROJECT["tool"]["setuptools"]["package-dir"]
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
NOT_INSTALLED = tuple(f"ragkv.benchmarks.{name}" for name in ("evaluation", "papers", "training"))
"""Only in the repository: quality on benchmarks, the papers' tables, and training."""
SCRIPTS = {ROOT / "benchmarks" / "mutation"}
"""A folder of scripts that is only in the repository."""


def test_packages_are_the_folders_with_an_init_but_for_what_is_not_installed():
    found = set()
    for package, folder in MAPPED.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            below = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([package, *below]))
    left_out = {name for name in found if name.startswith(NOT_INSTALLED)}
    assert set(NOT_INSTALLED) <= left_out
    assert sorted(found - left_out) == PACKAGES


def test_nothing_that_is_installed_imports_what_is_not():
    rooms = runpy.run_path(str(ROOT / "docs" / "site" / "pages.py"))
    modules = rooms["modules"]()
    installed = {name: path for name, path in modules.items() if not name.startswith(NOT_INSTALLED)}
    assert set(rooms["modules"](installed=True)) == set(installed)
    others = modules.keys() - installed.keys()
    assert len(others) > 10
    text = {name: path.read_text(encoding="utf-8") for name, path in installed.items()}  # also inside functions
    found = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(map(re.escape, NOT_INSTALLED))})\b", re.MULTILINE)
    assert [name for name, source in text.items() if found.search(source)] == []


def test_an_extra_is_installed_from_the_checkout_wherever_it_is_written_of():
    """ragkv is on no package index, so `pip install ragkv[…]` cannot work."""
    assert install_hint("mcp", "serve") == "run pip install -e '.[mcp,serve]' in ragkv's checkout"
    folders = ("ragkv", "store", "retrievers", "cli", "ingest", "benchmarks", "examples", "docs")
    texts = [path for name in folders for form in ("*.py", "*.md") for path in (ROOT / name).rglob(form)]
    extras = {*PROJECT["project"]["optional-dependencies"], "NAME"}
    result = set()
    for path in [*texts, *ROOT.glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"ragkv\[|pip install [\"']?ragkv", text), path
        named = [*re.findall(r"'\.\[([\w,-]+)\]'", text), *re.findall(r"install_hint\('([\w-]+)'\)", text)]
        result |= {name for names in named for name in names.split(",")}
    assert {"serve", "mcp", "llama-index", "finetune", "plots", "pdf", "split"} <= result <= extras
    assert {extra for extra, _ in _NEEDS.values()} <= extras


ABSENT = """
import sys

ABSENT = sys.argv.pop(1)
for name in [*sys.modules]:
    if name.partition(".")[0] in (ABSENT, "ragkv"):  # they are imported anew
        del sys.modules[name]

class Absent:
    def find_spec(self, name, *_):
        if name.split(".")[0] == ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from ragkv.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("absent", "command", "says"),
    [
        ("mcp", "mcp", "ragkv mcp needs mcp; run pip install -e '.[mcp]' in"),
        ("mcp", "mcp --http --port 0", "ragkv mcp needs mcp; run pip install -e '.[mcp,serve]' in"),
        ("uvicorn", "mcp --http --port 0", "ragkv mcp needs uvicorn; run pip install -e '.[mcp,serve]' in"),
        ("fastapi", "serve --port 0", "ragkv serve needs fastapi; run pip install -e '.[serve]' in"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, absent, command, says):
    (tmp_path / "ragkv.toml").write_text("")
    done = CliChild(absent, *command.split(), "--index", tmp_path, program=ABSENT).end()
    assert done == (1, "", f"ragkv: {says} ragkv's checkout.\n")


def test_every_module_lies_in_a_package():
    for folder in MAPPED.values():
        for module in (ROOT / folder).rglob("*.py"):
            if module.parent in SCRIPTS:
                continue
            assert (module.parent / "__init__.py").exists(), module


def test_no_bare_names(tmp_path):
    """Outside the checkout, `ragkv.store` can be imported, but not `store`; and an editable install has the rest."""
    names = sorted(set(MAPPED.values()) - {"ragkv"})
    code = f"""
from importlib.util import find_spec
for name in {names}:
    assert find_spec("ragkv." + name) is not None, name
    spec = find_spec(name)
    assert spec is None or not str(spec.origin).startswith({str(ROOT)!r}), spec
for name in {NOT_INSTALLED}:
    assert find_spec(name) is not None, name
"""
    subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, check=True)


def test_the_page_is_installed():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["ragkv.server"]
    files = {path.relative_to(ROOT / "ragkv" / "server") for path in (ROOT / "ragkv/server/page").rglob("*")}
    assert {"page/index.html", "page/main.js", "page/style.css"} <= {path.as_posix() for path in files}
    assert [path for path in files if not any(path.match(pattern) for pattern in patterns)] == []


@pytest.mark.parametrize("group", ["ragkv.engines", "ragkv.codecs"])
def test_entry_points_load(group):
    points = entry_points(group=group)
    assert points
    for point in points:
        assert point.load() is not None


def test_constraints_cover_every_dependency():
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    listed = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]
    listed += PROJECT["project"]["optional-dependencies"]["docs"]
    names = {re.split(r"[>\[]", requirement)[0].lower().replace("_", "-") for requirement in listed}
    assert names - pinned == {"pre-commit"}


def test_every_dependency_is_justified():
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]:
        assert f"| {requirement.partition('>=')[0]} |" in page, requirement


@pytest.mark.parametrize("extra", ["serve", "mcp"])
def test_the_tests_run_with_what_users_get(extra):
    """`.ci/run` tests the oldest versions of these two extras; each requirement is a minimum version."""
    extras = PROJECT["project"]["optional-dependencies"]
    assert [each for each in extras[extra] if each not in extras["dev"]] == []
    assert [each for each in extras[extra] if not re.fullmatch(r"[A-Za-z0-9_-]+>=[0-9.]+", each)] == []
