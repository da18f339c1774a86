from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ragkv.ingest.loader import media_type_of

PLUGIN = """
from ragkv.errors import MissingExtraError
from ragkv.ingest import Parsed, Unreadable, decode, sections_under


def read_recipe(data: bytes) -> Parsed:
    text = decode(data)
    if not text.startswith("recipe"):
        raise Unreadable("no recipe")
    return Parsed(text=text, title="Soup", sections=sections_under(text, [(0, 1, "Soup")]), left_out=["step 2: burnt"])


def read_html(data):
    return Parsed(text="theirs")


def read_extra(data):
    raise MissingExtraError("It needs the boiler; pip install boiler.")


def read_late(data):
    import their_missing_module


def read_crash(data):
    return {}["key"]


def read_wrong(data):
    return "a string"


def read_gap(data):
    return Parsed(text="abc", sections=sections_under("ab", []))
"""

ENTRY_POINTS = """[ragkv.loaders]
.recipe = their_loader:read_recipe
text/html = their_loader:read_html
log = their_loader:read_recipe
.extra = their_loader:read_extra
.late = their_loader:read_late
.absent = their_missing_module:read
.crash = their_loader:read_crash
.wrong = their_loader:read_wrong
.gap = their_loader:read_gap
"""

SCRIPT = """
import json, sys
from pathlib import Path
from ragkv.ingest.reader import UnreadableSource, read_source
from ragkv.ingest.source import find_sources

sources, skipped = find_sources([Path(sys.argv[1])])
assert "their_loader" not in sys.modules  # a walk imports no loader
found = {}
for source in sources:
    try:
        text = read_source(source)
        found[source.name] = [source.media_type, text.text, text.title, text.sections[0].heading, list(text.left_out)]
    except UnreadableSource as error:
        found[source.name] = error.reason
print(json.dumps([found, [skip.path.name for skip in skipped]]))
"""


def test_another_package_adds_loaders(tmp_path: Path) -> None:
    """Found by its installed metadata, in a fresh process; whatever is wrong with it costs its own files only."""
    (tmp_path / "their_loader.py").write_text(PLUGIN)
    metadata = tmp_path / "their_loader-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-loader\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    documents = tmp_path / "documents"
    documents.mkdir()
    for name in ("a.recipe", "b.log", "c.htm", "d.extra", "e.late", "f.absent", "g.crash", "h.wrong", "i.gap", "j.txt"):
        (documents / name).write_text("recipe" if name != "b.log" else "no soup")
    (documents / "k.unknown").write_text("x")
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(documents)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    found, skipped = json.loads(run.stdout)
    lacks = "lacks something (No module named 'their_missing_module'); install it"
    assert found == {
        "a.recipe": ["application/x-recipe", "recipe", "Soup", "Soup", ["step 2: burnt"]],
        "b.log": "no recipe",  # and not for .txt, whatever the system calls the type of .log
        "c.htm": ["text/html", "theirs", None, None, []],  # theirs, not ours
        "d.extra": "It needs the boiler; pip install boiler",
        "e.late": f"its loader their_loader:read_late {lacks}",
        "f.absent": f"its loader their_missing_module:read {lacks}",
        "g.crash": "its loader their_loader:read_crash failed (KeyError: 'key')",
        "h.wrong": "its loader their_loader:read_wrong failed (TypeError: it gave str, not ragkv.ingest.Parsed)",
        "i.gap": "its loader their_loader:read_gap failed (ValueError: its sections do not tile the text)",
        "j.txt": ["text/plain", "recipe", None, None, []],
    }
    assert skipped == ["k.unknown"]


def test_types_by_suffix_and_by_name() -> None:
    assert media_type_of("MD") == media_type_of(".markdown") == media_type_of("text/markdown") == "text/markdown"
    assert [media_type_of(name) for name in ("exe", "a/b", ".")] == [None, None, None]


def test_the_example_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ingest.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    made: dict[str, Any] = {}
    exec(code, made)
    parsed = made["read_org"]("intro\n* Guide\nhello\n** Install\npip\n".encode("utf-16"))
    assert [(section.heading, parsed.text[section.start : section.end]) for section in parsed.sections] == [
        (None, "intro\n"),
        ("Guide", "* Guide\nhello\n"),
        ("Guide > Install", "** Install\npip\n"),
    ]
