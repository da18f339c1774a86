"""What is installed is what lies in the folders, and nothing is importable under a bare name."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPED = PROJECT["tool"]["setuptools"]["package-dir"]
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
NOT_INSTALLED = ("ragkv.benchmarks.mini", "ragkv.benchmarks.papers")
"""In the repository alone: how the bundled model is trained, and the papers' tables."""
SCRIPTS = {ROOT / "benchmarks" / "mutation"}
"""Folders of scripts for those who have the repository."""


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
    rooms = runpy.run_path(str(ROOT / "docs" / "site" / "rooms.py"))
    modules = rooms["modules"]()
    installed = {name: path for name, path in modules.items() if not name.startswith(NOT_INSTALLED)}
    assert set(rooms["modules"](installed=True)) == set(installed)
    others = modules.keys() - installed.keys()
    assert len(others) > 20
    text = {name: path.read_text(encoding="utf-8") for name, path in installed.items()}  # also inside functions
    found = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(map(re.escape, NOT_INSTALLED))})\b", re.MULTILINE)
    assert [name for name, source in text.items() if found.search(source)] == []


@pytest.mark.parametrize("name", NOT_INSTALLED)
def test_what_is_not_installed_runs_in_an_editable_install(name, tmp_path):
    done = subprocess.run([sys.executable, "-m", name, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python -m {name}" in done.stdout


def test_every_module_lies_in_a_package():
    for folder in MAPPED.values():
        for module in (ROOT / folder).rglob("*.py"):
            if module.parent in SCRIPTS:
                continue
            assert (module.parent / "__init__.py").exists(), module


def test_no_bare_names(tmp_path):
    """Outside the checkout only `ragkv.store`, never `store`, can be imported."""
    names = sorted(set(MAPPED.values()) - {"ragkv"})
    code = f"""
from importlib.util import find_spec
for name in {names}:
    assert find_spec("ragkv." + name) is not None, name
    spec = find_spec(name)
    assert spec is None or not str(spec.origin).startswith({str(ROOT)!r}), spec
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
