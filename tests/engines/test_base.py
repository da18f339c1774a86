"""An engine that a model cannot run exactly is refused, with the reason and the name of one that works."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from clichild import CliChild

from ragkv.engines import make_engine, require_supported, supported_engines, unsupported_reason
from ragkv.engines.base import require_reach, supported_or
from ragkv.errors import PromptTooLongError, UnsupportedModelError
from ragkv.types import Capability

FIXED = {Capability.MOVE: "its positions are fixed"}
APART = FIXED | {Capability.MERGE: "it has a state"}


def facts(missing_capabilities, within=None):
    return SimpleNamespace(
        missing_capabilities=missing_capabilities, moves_within=within, checkpoint=SimpleNamespace(name="m")
    )


def test_a_model_that_lacks_nothing_runs_every_engine():
    assert {"ape", "block", "full", "ippd", "pced"} <= set(supported_engines(facts({})))


def test_chunks_that_cannot_be_moved_leave_every_engine_that_reads_them_in_place():
    able = supported_engines(facts(FIXED))
    assert "block" not in able
    assert {"ape", "full", "pced", "single"} <= set(able)
    kept = make_engine("block", {"block": {"preset": "no-positions"}})
    assert unsupported_reason(kept, facts(FIXED)) is None


def test_a_state_leaves_the_engines_whose_rows_are_sequences_of_their_own():
    able = supported_engines(facts(APART))
    assert not {"ape", "block"} & set(able)
    assert {"full", "pced", "single"} <= set(able)


@pytest.mark.parametrize(("missing_capabilities", "instead"), [(FIXED, "ape"), (APART, "pced")])
def test_the_refusal_names_an_engine_that_works(missing_capabilities, instead):
    with pytest.raises(UnsupportedModelError, match=f"'block' cannot run on model 'm': .*; use engine '{instead}'"):
        require_supported(make_engine("block", {}), facts(missing_capabilities))
    assert supported_or(["block"], facts(missing_capabilities)) == instead


def test_chunks_are_moved_only_as_far_as_the_model_bears():
    block = make_engine("block", {})
    require_reach(block, facts({}, within=64), 64)
    require_reach(make_engine("ape", {}), facts({}, within=64), 65)
    with pytest.raises(PromptTooLongError, match="up to 64 positions, not 65; lower --top-k, or use engine 'ape'"):
        require_reach(block, facts({}, within=64), 65)


ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from ragkv import RagKV
from ragkv.engines import engine_class, engine_names
folder = Path(sys.argv[1])
(folder / "a.md").write_text("# Halden\\n\\nHalden Works was founded by Mira Vance.\\n")
(folder / "b.md").write_text("# Oslen\\n\\nOslen Works sells pumps.\\n")
found = {"names": engine_names(), "module": engine_class("focus").__module__}
settings = {"model": "mini", "engines": ("focus",), "tuning": {"focus": {"share": 1.0}}}
with RagKV.create(folder / "index", device="cpu", **settings) as rag:
    rag.ingest(folder / "a.md", folder / "b.md")
    question = "Who founded Halden Works?"
    answer = rag.query(question, engine="focus", max_new_tokens=12)
    alone = rag.query(question, engine="full", top_k=1, max_new_tokens=12)
    found |= {"answer": answer.text, "alone": alone.text, "misses": answer.kv.misses, "hits": answer.kv.hits}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the installed package and its metadata."""
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "ragkv_focus.py"):  # a build writes files next to its sources
        (source / name).write_bytes((ROOT / "examples" / "engine" / name).read_bytes())
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet"]
    command += ["--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", str(folder), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_an_engine_in_a_package_of_its_own(site, tmp_path):
    """Found by entry point; its encoding is stored at ingest, its settings are read, its answer is the best chunk's."""
    code, out, errors = CliChild(tmp_path, site, program=SCRIPT).end()
    assert code == 0, errors
    results = json.loads(out.splitlines()[-1])
    assert "focus" in results["names"]
    assert results["module"] == "ragkv_focus"
    assert results["answer"] == results["alone"]
    assert (results["misses"], results["hits"]) == (0, 2)


def test_it_is_as_short_as_promised():
    files = [ROOT / "examples" / "engine" / name for name in ("pyproject.toml", "ragkv_focus.py")]
    assert sum(len(f.read_text(encoding="utf-8").splitlines()) for f in files) < 60
