"""Untrusted indexes: every command ends with a result or an error sentence, and has no effect outside."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import KINDS, Attack, Change
from nightly import NIGHTLY
from outcome import Result

from ragkv import RagKV
from ragkv.store import record

Run = Callable[..., Result]
QUESTION = "Who founded Halden Works?"
MOST_MEMORY = 200 << 20


@pytest.fixture(scope="module")
def attack(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Attack:
    root = tmp_path_factory.mktemp("honest")
    (root / "halden.md").write_text("# Halden Works\n\nHalden Works was founded by Mira Oskel in 1907.\n")
    (root / "bolt.txt").write_text("Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.")
    settings = {"model": str(model_folder), "embedder": "mini", "retrieval": "bm25", "codec": "zstd"}
    with RagKV.create(root / "made", device="cpu", chunk_tokens=128, engines=("ape",), **settings) as rag:
        rag.ingest(root / "halden.md", root / "bolt.txt")
        rag.maintenance.compact(root / "index")
    return Attack(root / "index")


@pytest.fixture
def largest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the largest requests of memory for KV, which `tracemalloc` does not see."""
    asked: list[int] = [0]
    fresh = record.huge_memory

    def noted(nbytes: int) -> object:
        asked.append(nbytes)
        assert nbytes <= MOST_MEMORY
        return fresh(nbytes)

    monkeypatch.setattr(record, "huge_memory", noted)
    return asked


def commands(index: Path, copy: Path) -> list[tuple[object, ...]]:
    on = ("--index", index)
    return [
        ("stats", "--per-document", *on),
        ("ls", *on),
        ("verify", *on),
        ("verify", "--quick", "--json", *on),
        ("query", QUESTION, "--engine", "ape", "--max-new-tokens", "2", "--retrieval", "bm25", *on),
        ("query", QUESTION, "--engine", "full", "--max-new-tokens", "2", "--json", *on),
        ("show", "halden.md:0", *on),
        ("gc", *on),
        ("backup", copy, *on),
        ("compact", "--output", copy, *on),
        ("repair", "--dry-run", *on),
        ("delete", "bolt.txt", "--yes", *on),
        ("repair", *on),
    ]


def some(found: list[tuple[object, ...]], seed: str) -> list[tuple[object, ...]]:
    """Nightly all commands, otherwise four; the question that saves a retrieval index is always included."""
    return found if NIGHTLY else [*random.Random(seed).sample(found, 3), found[4]]


def outside(root: Path, index: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() if path.is_file() else b""
        for path in sorted(root.rglob("*"))
        if path != index and index not in path.parents and not path.name.startswith("copy")
    }


def require_told(found: Result, what: str) -> None:
    assert found.code in (0, 1, 2), what
    assert "Traceback" not in found.err + found.out, what
    assert found.code == 0 or (found.out + found.err).strip(), what


@pytest.mark.parametrize("kind", KINDS)
def test_changed_rows_end_as_answers_or_sentences(
    attack: Attack, ragkv: Run, tmp_path: Path, largest: list[int], kind: str
) -> None:
    rng = random.Random(kind)
    index = tmp_path / "inner" / "index"
    index.parent.mkdir()
    (tmp_path / "precious").write_text("precious")
    changes = list(attack.changes(kind, rng, 40 if NIGHTLY else 6))
    before = outside(tmp_path, index)
    for change in changes if NIGHTLY else rng.sample(changes, min(2, len(changes))):
        attack.write(index, change)
        everything = commands(index, tmp_path / "copy")
        for command in everything if NIGHTLY else rng.sample(everything, 3):
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            try:
                require_told(ragkv(*command), f"{change.what}: {command[0]}")
            except Exception as error:
                raise AssertionError(f"{change.what}: {' '.join(map(str, command[:3]))}") from error
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        assert before == outside(tmp_path, index), change.what


@pytest.mark.parametrize("kind", ["shapes", "segments", "codecs"])
def test_crafted_records_are_found_missed_and_mended(attack: Attack, ragkv: Run, tmp_path: Path, kind: str) -> None:
    """A record that its model does not produce: `verify` reports it, with `--quick` too if its manifest is wrong; a
    question encodes its chunk again with the usual answer; after `repair` nothing is reported.
    """
    index, asked = tmp_path / "index", ("query", QUESTION, "--engine", "ape", "--max-new-tokens", "4", "--quiet")
    attack.write(index, Change("none"))
    assert ragkv("verify", "--index", index).code == 0
    honest = ragkv(*asked, "--index", index).out
    rng = random.Random(7)
    found = list(attack.changes(kind, rng, 0))
    for change in found if NIGHTLY else found[:2]:
        attack.write(index, change)
        assert ragkv("verify", "--index", index).code == 1, change.what
        if kind != "segments" or "segments of" in change.what:
            assert ragkv("verify", "--quick", "--index", index).code == 1, change.what
        assert ragkv(*asked, "--index", index).out == honest, change.what
        attack.write(index, change)
        assert ragkv("repair", "--index", index, "--quiet").code == 0, change.what
        assert ragkv("verify", "--index", index).code == 0, change.what
        assert ragkv(*asked, "--index", index).out == honest, change.what


ODD = ("link", "dangling", "pipe", "device")


@pytest.mark.parametrize("name", ["store", "store/data.mdb", "store/lock.mdb", "store/writer.lock", "ragkv.toml"])
@pytest.mark.parametrize("kind", ODD)
def test_links_and_pipes_in_place_of_files_are_refused(
    attack: Attack, ragkv: Run, tmp_path: Path, name: str, kind: str
) -> None:
    index, moved = tmp_path / "inner" / "index", tmp_path / "precious"
    attack.write(index, Change("none"))
    path = index / name
    if path.exists():
        path.rename(moved)
    else:
        moved.write_text("precious")
    odd(path, kind, moved)
    before = outside(tmp_path, index)
    for command in some(commands(index, tmp_path / "copy"), name + kind):
        found = ragkv(*command)
        require_told(found, str(command))
        assert found.code, command
    assert outside(tmp_path, index) == before


@pytest.mark.parametrize("kind", ODD)
def test_nothing_is_written_or_deleted_through_links_beside_the_store(
    attack: Attack, ragkv: Run, tmp_path: Path, kind: str
) -> None:
    index, precious = tmp_path / "inner" / "index", tmp_path / "precious"
    (precious / "data-old").mkdir(parents=True)
    (precious / "data-old" / "file").write_text("precious")
    (precious / "bm25").mkdir()
    (precious / "tune-ape.jsonl").write_text("precious")
    os.utime(precious / "data-old", (0, 0))
    os.utime(precious, (0, 0))
    for name in ("derived", "derived/bm25", "derived/bm25/data-0123456789abcdef", "ragkv.toml.new"):
        attack.write(index, Change("none"))
        (index / name).parent.mkdir(parents=True, exist_ok=True)
        odd(index / name, kind, precious)
        before = outside(tmp_path, index)
        for command in some(commands(index, tmp_path / "copy"), name + kind):
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            require_told(ragkv(*command), f"{name}: {command}")
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        assert outside(tmp_path, index) == before


def test_an_index_may_be_reached_over_a_link(attack: Attack, ragkv: Run, tmp_path: Path) -> None:
    attack.write(tmp_path / "real", Change("none"))
    (tmp_path / "index").symlink_to(tmp_path / "real")
    assert ragkv("query", QUESTION, "--max-new-tokens", "2", "--index", tmp_path / "index").code == 0
    assert ragkv("verify", "--index", tmp_path / "index").code == 0


def test_a_journal_of_answers_is_a_file(ragkv: Run, attack: Attack, tmp_path: Path, questions: Path) -> None:
    attack.write(tmp_path / "index", Change("none"))
    for kind in ODD:
        odd(tmp_path / kind, kind, questions)
        found = ragkv("query", "--questions", questions, "--output", tmp_path / kind, "--index", tmp_path / "index")
        assert found.code == 2, kind
        assert "--output" in found.err


def odd(path: Path, kind: str, target: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"link": target, "dangling": target / "nothing", "device": Path("/dev/zero")}[kind])
