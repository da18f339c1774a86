"""Pages of earlier runs, judged by today's rule without measuring again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragkv.benchmarks.papers import revise_table
from ragkv.errors import ConfigError

RESULTS = Path(__file__).parents[3] / "docs" / "results"
PAGE = """# T

| figures |

## Order

1 of 3 statements of order hold here (2 tied).

| old |

## What differs, and why

Old notes.
"""


def told(low, high, *, relation=">", within=0.0, value=None):
    """A statement as it was written when the sign of the difference decided."""
    value = (low + high) / 2 if value is None else value
    return {
        "left": {"line": "a", "column": "x"},
        "relation": relation,
        "right": {"line": "b", "column": "x"},
        "within": within,
        "source": "X 3 to 2",
        "verdict": "holds",
        "certain": False,
        "difference": {"value": value, "ci95": [low, high], "paired": True},
    }


@pytest.fixture
def write(tmp_path):
    def make(*orders, rows=(("a", 24), ("b", 24))):
        found = [{"line": line, "column": "x", "n": n} for line, n in rows]
        (tmp_path / "t.json").write_text(json.dumps({"table": "t", "rows": found, "orders": orders, "kept": 1}))
        (tmp_path / "t.md").write_text(PAGE)
        return tmp_path

    return make


def test_a_page_of_the_earlier_form_gets_todays_verdicts(write):
    folder = write(
        told(0.0, 0.125, value=0.04),
        told(0.1, 0.3),
        told(0.0, 0.0),
        told(0.0, 0.0, relation="~"),
        told(0.0, 0.0, relation="~", within=2),
        {**told(0, 0), "difference": None},
    )
    words = [verdict.word for verdict in revise_table("t", folder)]
    assert words == ["not shown", "holds", "not shown", "holds", "not shown", "not measured"]
    report = json.loads((folder / "t.json").read_text())
    assert [order["verdict"] for order in report["orders"]] == words
    assert report["orders"][2]["difference"]["ci95"] == pytest.approx([-0.1425, 0.1425], abs=1e-4)
    assert (report["kept"], report["orders"][2]["difference"]["n"]) == (1, 24)
    page = (folder / "t.md").read_text()
    assert page.startswith("# T\n\n| figures |\n\n## Order\n\n2 of 6 statements of order hold here, 3 are not shown")
    assert "| old |" not in page
    assert "Old notes" not in page
    (folder / "t.notes.md").write_text("New notes.")
    assert [verdict.word for verdict in revise_table("t", folder)] == words
    assert (folder / "t.md").read_text() == f"{page}\n## What differs, and why\n\nNew notes.\n"


@pytest.mark.parametrize(
    "damage", ["[]", "{", '{"rows": [], "orders": [3]}', '{"rows": [{}], "orders": []}', '{"rows": 1, "orders": []}']
)
def test_what_is_no_table_is_told(write, damage):
    folder = write()
    (folder / "t.json").write_text(damage)
    with pytest.raises(ConfigError, match="make it anew"):
        revise_table("t", folder)
    with pytest.raises(ConfigError, match=r"no .*u\.json; python -m ragkv\.benchmarks\.papers u makes it"):
        revise_table("u", folder)


def test_a_cell_without_questions_is_told(write):
    with pytest.raises(ConfigError, match="make it anew"):
        revise_table("t", write(told(0.0, 0.0), rows=()))
    with pytest.raises(ConfigError, match="make it anew"):
        revise_table("t", write(told(0.0, 0.0), rows=(("a", 0), ("b", 0))))


@pytest.mark.parametrize("name", [path.stem for path in sorted(RESULTS.glob("*.json"))])
def test_the_pages_of_the_documentation_are_judged_by_todays_rule(name, tmp_path):
    written = [path for path in RESULTS.iterdir() if path.name in (f"{name}.json", f"{name}.md", f"{name}.notes.md")]
    for path in written:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    revise_table(name, tmp_path)
    changed = [path.name for path in written if (tmp_path / path.name).read_bytes() != path.read_bytes()]
    assert changed == [], "run: python -m ragkv.benchmarks.papers all --rejudge"
