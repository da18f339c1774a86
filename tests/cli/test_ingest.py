"""`ragkv ingest` from a pipe, dry runs, reported skips, and interruptions."""

import hashlib
import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from clichild import CliChild

from ragkv.errors import KVMismatchError
from ragkv.model import self_check


@pytest.fixture
def pipe(ragkv, monkeypatch):
    """Run the command with these bytes on stdin."""

    def run(data: bytes, *arguments: object):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return ragkv(*arguments)

    return run


def state(folder: Path) -> dict[str, str]:
    """Every file of the index except LMDB's reader table, which reading changes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock.mdb"
    }


def test_chunks_that_saw_their_document(ragkv, tmp_path, model_folder):
    """Enabled at an ingest, kept by the index, and shown by the commands that count."""
    text = "".join(f"Part {n}. It is made by company number {n}.\n\n" for n in range(8))
    (tmp_path / "parts.txt").write_text(text)
    index = tmp_path / "index"
    chosen = ("--model", model_folder, "--device", "cpu", "--engines", "ape", "--chunk-tokens", 64)
    made = ("ingest", tmp_path / "parts.txt", "--index", index, *chosen)
    assert ragkv(*made, "--context-tokens", 40).code == 0
    assert "[encoding]\ncontext = 40\n" in (index / "ragkv.toml").read_text()
    assert json.loads(ragkv(*made, "--json").out)["unchanged"] == [str(tmp_path / "parts.txt")]
    settings = json.loads(ragkv("config", "show", "--index", index, "--json").out)["settings"]
    [shown] = [one for one in settings if one["name"] == "encoding.context"]
    assert (shown["value"], shown["origin"]) == (40, "index")
    stats = json.loads(ragkv("stats", "--index", index, "--json").out)
    encodings = stats["kv_bytes_by_encoding"]
    assert stats["context_cost"] == round(1 + 40 * stats["chunks"] / stats["tokens"], 1) > 1
    shown = ragkv("stats", "--index", index).out
    assert f"at most {stats['context_cost']} times the tokens to encode" in shown
    assert encodings.keys() == {"context", "prefixed"}  # the first chunk sees only the prefix
    assert ragkv("query", "Who makes it?", "--index", index, "--engine", "pced", "--max-new-tokens", 1).code == 0
    plan = ragkv("plan", tmp_path / "parts.txt", *chosen, "--context-tokens", 40, "--seconds", 1).out
    assert "KV in context encoding" in plan


# ---- stdin


def test_stdin_is_a_document_that_its_name_updates(ragkv, pipe, index):
    text = b"# Corvo Mills\n\nCorvo Mills was founded by Ida Brandt.\n"
    command = ("ingest", "-", "--name", "corvo.md", "--index", index, "--json")
    assert json.loads(pipe(text, *command).out)["added"] == ["stdin:corvo.md"]
    assert json.loads(pipe(text, *command).out)["unchanged"] == ["stdin:corvo.md"]
    newer = text.replace(b"Ida", b"Ann")
    assert json.loads(pipe(newer, *command).out)["updated"] == ["stdin:corvo.md"]
    retyped = json.loads(pipe(newer, *command, "--type", "txt").out)  # the same bytes, read as another type
    assert retyped["updated"] == ["stdin:corvo.md"]
    pipe(newer, *command)
    asked = ragkv("query", "Who founded Corvo Mills?", "--index", index, "--max-new-tokens", 1, "--json")
    [source] = [s for s in json.loads(asked.out)["sources"] if s["document"] == "corvo.md"]
    assert "founded by Ann Brandt" in source["text"]
    assert source["heading"] == "Corvo Mills"
    assert ragkv("delete", "corvo.md", "--yes", "--index", index).out == "deleted stdin:corvo.md\n"


def test_stdin_has_a_name_of_its_own_and_stands_beside_files(pipe, index, documents):
    result = pipe(b"Of a pipe.", "ingest", documents, "-", "--index", index, "--json")
    assert json.loads(result.out)["added"] == ["stdin:stdin"]
    assert len(json.loads(result.out)["unchanged"]) == 2


def test_a_prune_leaves_what_came_by_stdin(ragkv, pipe, index, documents):
    pipe(b"Of a pipe.", "ingest", "-", "--index", index)
    (documents / "bolt.txt").unlink()
    pruned = json.loads(ragkv("ingest", documents, "--prune", "--index", index, "--json").out)["pruned"]
    assert pruned == [str(documents / "bolt.txt")]


# ---- --dry-run


@pytest.mark.usefixtures("read_here")
def test_dry_run_makes_no_index(ragkv, documents, tmp_path):
    (documents / "gone.pdf").write_bytes(b"%PDF-1.4\nno")
    new = tmp_path / "new"
    result = ragkv("ingest", documents, "--index", new, "--dry-run", "--prune")
    assert result.code == 0
    assert result.out.splitlines() == [
        f"would add {documents / 'bolt.txt'}",
        f"would add {documents / 'halden.md'}",
        f"{new}: 2 to add, 1 skipped; nothing was written.",
    ]
    assert "gone.pdf: PDF cannot be read" in result.err
    assert not new.exists()
    assert ragkv("ingest", documents, "--index", new, "--dry-run", "--codec", "brotli").code == 2


def test_long_reasons_are_one_line_of_the_list(ragkv, tmp_path):
    for number in range(3):
        menu = " ".join(f"w{number}x{word}" for word in range(90))
        (tmp_path / f"{number}.html").write_text(f"<nav>{menu}</nav><main><p>Kesk makes flour {number}.</p></main>")
    shown = ragkv("ingest", tmp_path, "--index", tmp_path / "new", "--dry-run").err
    assert "left out 3 parts of 3 documents; --json lists all:\n  3 files: outside of the main text (…) (" in shown


def test_verbose_prints_the_text_that_would_be_ingested(ragkv, tmp_path):
    page = "<html><head><title>Mills</title></head><body><nav>Shop</nav><main><h1>Oats</h1><p>CO<sub>2</sub></p>"
    (tmp_path / "a.html").write_text(page)
    (tmp_path / "b.csv").write_text("id,name\n1,Kesk\n2,Varn\n")
    (tmp_path / "c.txt").write_bytes(bytes(99))
    words = [
        "ingest",
        *(tmp_path / name for name in ("a.html", "b.csv", "c.txt")),
        "--index",
        tmp_path / "new",
        "--verbose",
    ]
    result = ragkv(*words, "--dry-run")
    assert result.out.startswith(
        f"=== {tmp_path}/a.html: Mills\n--- Oats\n# Oats\n\nCO2\n"
        "--- left out: outside of the main text (Shop)\n"
        f"=== {tmp_path}/b.csv\n--- row 2 (id 1)\nid: 1\nname: Kesk\n--- row 3 (id 2)\nid: 2\nname: Varn\n"
    )
    assert "2 to add" in result.out
    assert "binary file" in result.err
    assert ragkv(*words).code == ragkv(*words, "--dry-run", "--json").code == 2


def test_dry_run_is_what_then_happens(ragkv, documents, index, monkeypatch):
    (documents / "bolt.txt").write_text("Bolt Ltd makes bolts now.")
    (documents / "new.jsonl").write_text('{"text": "a"}\nx\n{"text": "b"}\n')
    (documents / "empty.md").write_text("")
    (documents / "halden.md").rename(documents / "moved.md")
    before = state(index)
    command = ("ingest", documents, "--prune", "--index", index, "--json")
    with monkeypatch.context() as patch:
        patch.setattr(self_check, "load_model", lambda *_, **__: pytest.fail("the model is not needed"))
        payload = json.loads(ragkv(*command, "--dry-run").out)
        again = json.loads(ragkv(*command, "--dry-run").out)
    assert state(index) == before
    done = json.loads(ragkv(*command).out)
    assert (payload["dry_run"], done["dry_run"]) == (True, False)
    for key in ("added", "updated", "unchanged", "pruned", "skipped", "left_out"):
        assert payload[key] == again[key] == done[key], key
    assert [Path(name).name for name in done["added"]] == ["moved.md", "new.jsonl"]
    assert [Path(name).name for name in done["updated"]] == ["bolt.txt"]
    assert [Path(name).name for name in done["pruned"]] == ["halden.md"]
    assert [line["reason"] for line in done["left_out"]] == ["line 2: no JSON (expecting value at column 1)"]
    assert len(json.loads(ragkv(*command, "--dry-run").out)["unchanged"]) == 3


@pytest.mark.parametrize(("look", "at"), [("iterdir", "sub"), ("is_dir", "bolt.txt")])
def test_a_folder_that_cannot_be_listed_or_looked_into_is_not_pruned(ragkv, documents, index, monkeypatch, look, at):
    (documents / "sub").mkdir()
    shutil.move(documents / "bolt.txt", documents / "sub" / "bolt.txt")
    command = ("ingest", documents, "--prune", "--index", index, "--json")
    assert len(json.loads(ragkv(*command).out)["pruned"]) == 1
    real = getattr(Path, look)

    def refuse(self: Path):
        if self.name == at:
            raise PermissionError
        return real(self)

    monkeypatch.setattr(Path, look, refuse)
    report = json.loads(ragkv(*command).out)
    assert report["pruned"] == []
    assert [skip["reason"] for skip in report["skipped"]] == ["permission denied"]


# ---- what was left out


def test_what_is_skipped_is_grouped_and_short(ragkv, documents, index):
    for n in range(9):
        (documents / f"{n}.png").write_bytes(b"x")
        (documents / f"{n}.odd{n}").write_bytes(b"x")
        (documents / f"kind{n}.sort{n}").write_bytes(b"x")
    (documents / "rows.jsonl").write_text('{"text": "a"}\n' * 9 + "x\n" * 5)
    result = ragkv("ingest", documents, "--index", index)
    assert result.code == 0
    lines = result.err.splitlines()
    assert lines[0] == "skipped 27 files; --json lists all:"
    assert lines[1].startswith("  9 files: unsupported type .png (")
    assert lines[1].endswith("2.png and 6 more)")
    assert lines[2].endswith("0.odd0: unsupported type .odd0")
    assert lines[13] == "  and 7 more reasons"
    assert lines[14] == "left out 5 parts of 1 document; --json lists all:"
    assert lines[15].endswith(
        "rows.jsonl: line 10: no JSON (expecting value at column 1); line 11: no JSON (expecting value at column 1); "
        "line 12: no JSON (expecting value at column 1) and 2 more"
    )
    report = json.loads(ragkv("ingest", documents, "--index", index, "--json").out)
    assert len(report["skipped"]) == 27
    assert ragkv("ingest", documents, "--index", index, "--quiet").err == ""


def test_rows_and_headings_are_shown_as_places(ragkv, documents, index):
    (documents / "staff.csv").write_text("name,works\nIda Brandt,Corvo Mills\nAnn Lee,Bolt Ltd\n")
    ragkv("ingest", documents, "--index", index)
    asked = ("query", "Where does Ida Brandt work?", "--index", index, "--max-new-tokens", 1)
    assert "staff.csv, row 2 (score" in ragkv(*asked).err
    assert json.loads(ragkv(*asked, "--json").out)["sources"][0]["heading"] == "row 2"
    assert "halden.md, Halden Works (score" in ragkv("query", "Mira Oskel", *asked[2:]).err


# ---- real processes

CHILD = """
import sys, time
import ragkv.ingest.ingester
from ragkv.cli.main import main
from ragkv.store import Store

ragkv.ingest.ingester.TOGETHER_BYTES = 1  # each document in a transaction of its own
write, written = Store.write_changes, []

def write_changes(self, changes, **more):
    write(self, changes, **more)
    written.extend(changes)
    if len(written) == 3:
        print("three", flush=True)
        time.sleep(600)  # until the signal comes

Store.write_changes = write_changes
main()
"""


@pytest.mark.slow
def test_a_model_folder_that_was_named_from_here_is_found_from_elsewhere(
    ragkv, tmp_path, documents, model_folder, monkeypatch
):
    index, elsewhere = tmp_path / "new", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(model_folder.parent)
    command = ("ingest", documents, "--index", index, "--model")
    assert ragkv(*command, f"./{model_folder.name}").code == 0
    shown = json.loads(ragkv("config", "show", "--index", index, "--json").out)
    assert [each["value"] for each in shown["settings"] if each["name"] == "model"] == [str(model_folder)]
    monkeypatch.chdir(elsewhere)
    assert ragkv("query", "Who founded Halden Works?", "--index", index, "--max-new-tokens", 1).code == 0
    for same in (os.path.relpath(model_folder), model_folder):
        assert ragkv(*command, same).code == 0
    other = shutil.copytree(model_folder, elsewhere / "other")
    refused = ragkv(*command, other.name)
    assert refused.code == KVMismatchError.exit_code
    assert str(model_folder) in refused.err


def test_ctrl_c_says_what_is_done_and_the_next_run_goes_on(ragkv, tmp_path, model_folder):
    documents, index = tmp_path / "many", tmp_path / "new"
    documents.mkdir()
    for n in range(8):
        (documents / f"{n}.txt").write_text(f"Company {n} makes valves.")
    (documents / "00.txt").write_bytes(bytes(range(256)))  # not a document, and not counted
    arguments = ["ingest", documents, "--index", index, "--model", model_folder, "--quiet"]
    child = CliChild(*arguments, program=CHILD)
    assert child.line() == "three\n"
    code, _, err = child.end(signal.SIGINT)
    assert code == 130
    assert err == "ragkv: interrupted; 3 of 8 documents are in the index; run the same command to continue.\n"
    assert ragkv("verify", "--index", index).code == 0
    report = json.loads(ragkv(*arguments, "--json").out)
    assert (len(report["unchanged"]), len(report["added"])) == (3, 5)


def test_ctrl_c_at_the_search_indexes_says_that_nothing_is_missing(
    ragkv, tmp_path, documents, model_folder, monkeypatch
):
    index = tmp_path / "new"
    (documents / "00.txt").write_bytes(bytes(range(256)))  # not a document
    arguments = ["ingest", documents, "--index", index, "--model", model_folder, "--quiet"]

    def interrupted(text):
        raise KeyboardInterrupt

    with monkeypatch.context() as pressed:
        pressed.setattr("ragkv.retrievers.bm25.tokenise", interrupted)
        result = ragkv(*arguments)
    assert result.code == 130
    assert result.err == (
        "ragkv: interrupted; all 2 documents are in the index, and the next question makes what it searches by.\n"
    )
    assert ragkv("verify", "--index", index).code == 0
    assert len(json.loads(ragkv(*arguments, "--json").out)["unchanged"]) == 2


def test_a_real_pipe(tmp_path):
    child = CliChild("ingest", "-", "--name", "t", "--index", tmp_path / "new", "--dry-run", "--json")
    child.say("a,b,c\nHalden,Varn,x\nBolt,Oskel,y")
    code, out, err = child.end()
    assert (code, json.loads(out)["added"], err) == (0, ["stdin:t"], "")
