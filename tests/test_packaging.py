"""What is installed is what lies in the folders, and nothing is importable under a bare name."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPED = PROJECT["tool"]["setuptools"]["package-dir"]
NOT_INSTALLED = {ROOT / "benchmarks" / "mutation"}
"""Folders of scripts for those who have the repository."""


def test_packages_are_the_folders_with_an_init():
    found = set()
    for package, folder in MAPPED.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            below = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([package, *below]))
    assert sorted(found) == PROJECT["tool"]["setuptools"]["packages"]


def test_every_module_lies_in_a_package():
    for folder in MAPPED.values():
        for module in (ROOT / folder).rglob("*.py"):
            if module.parent in NOT_INSTALLED:
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
