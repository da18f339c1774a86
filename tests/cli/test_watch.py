"""`ragkv ingest --watch` and `[[watch]]` of `ragkv serve`: an index follows its folders."""

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import watchfiles
from clichild import CliChild
from indexed import write_texts
from live import live
from nightly import NIGHTLY

from ragkv import RagKV
from ragkv.errors import StoreFullError
from ragkv.ingest import SourceFile, watch
from ragkv.server.jobs import JobManager
from ragkv.server.metrics import ConcurrencyLimiter
from ragkv.server.schemas import ServedIndexes

CHANGES = 1000 if NIGHTLY else 120
PATIENCE = 600


def content(rag: RagKV) -> list[object]:
    """The documents with their texts, and the store's KV, to compare two indexes of the same files."""
    documents = [(each.document, each.source, each.chunks, each.kv_bytes) for each in rag.store.document_stats()]
    texts = [(chunk.chunk_id, chunk.text, chunk.token_ids) for chunk in rag.store.chunks()]
    return [documents, texts, rag.store.stats().kv_records, rag.store.stats().orphans]


def until(holds) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def hurried(monkeypatch) -> None:
    """Scan and settle delays are a twentieth of the defaults."""
    whole, soon = watchfiles.watch, {"rust_timeout": 50}
    monkeypatch.setattr(watchfiles, "watch", lambda *folders, **settings: whole(*folders, **settings | soon))
    monkeypatch.setattr(watch, "SETTLE_MILLISECONDS", watch.SETTLE_MILLISECONDS // 20)
    monkeypatch.setattr(watch, "WALK_TICKS", 20 * watch.WALK_TICKS)


HURRIED = """
from ragkv.cli.main import main
from ragkv.ingest import watch

watch.SETTLE_MILLISECONDS //= 20
main()
"""
"""The command in a new process, with the same short delays."""


class Soon(threading.Event):
    """Also waits for a twentieth of the time."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout and timeout / 20)


def save(path: Path, text: str) -> None:
    """Save atomically, as an editor does."""
    (path.parent / ".saved").write_text(text)
    (path.parent / ".saved").replace(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_texts(tmp_path / "notes", {f"{number}.txt": f"Mill {number} makes flour." for number in range(8)})


@pytest.fixture
def rag(tmp_path, model_folder):
    with RagKV.create(tmp_path / "own", model=str(model_folder), device="cpu", engines=("ape",)) as made:
        yield made


def test_a_walk_reads_a_file_once_and_a_huge_one_never(rag, folder, monkeypatch):
    """A change to an unreadable file counts: the ingest reports why it is skipped."""
    (folder / "huge.txt").write_text("x" * 4096)
    (folder / "shut.txt").write_text("Nobody reads this.")
    hashed, digest = [], SourceFile.digest

    def counted(source):
        hashed.append(source.name)
        if source.name == "shut.txt":
            raise PermissionError(13, "Permission denied")
        return digest(source)

    monkeypatch.setattr(SourceFile, "digest", counted)
    watcher = rag.watcher([folder], notify=pytest.fail)
    monkeypatch.setattr(watcher, "_largest", 1024)
    seen, stop = [], threading.Event()

    def apply(changes):
        seen.extend(source.name for source in changes.sources)
        stop.set()
        return True

    watcher.follow(apply, stop)
    assert sorted(seen) == sorted([*(f"{number}.txt" for number in range(8)), "huge.txt", "shut.txt"])
    assert sorted(hashed) == sorted({*seen} - {"huge.txt"})


def test_a_file_that_is_dated_far_ahead_is_not_read_at_each_walk(rag, folder, monkeypatch):
    """One that is dated a little ahead is, because the file system's clock may be ahead."""
    hashed, digest, later = [], SourceFile.digest, time.time_ns() + 3600 * 10**9
    monkeypatch.setattr(watch, "time", SimpleNamespace(time_ns=lambda: later))
    monkeypatch.setattr(SourceFile, "digest", lambda source: hashed.append(source.name) or digest(source))
    for name, seconds in (("0.txt", 1), ("1.txt", 400 * 86_400)):
        os.utime(folder / name, ns=(later + seconds * 10**9,) * 2)
    watcher = rag.watcher([folder], notify=pytest.fail)
    _, watcher._last, _ = watcher._walk()
    hashed.clear()
    watcher._walk()
    assert hashed == ["0.txt"]


@pytest.mark.parametrize("moved", ["file", "folder"])
def test_what_is_as_before_after_an_ingest_that_saw_something_else_is_ingested_again(rag, tmp_path, moved):
    """The first ingest reads other content, or finds no file; the next scan sees the original state again."""
    (folder := tmp_path / "notes" / "mills").mkdir(parents=True)
    (file := folder / "0.txt").write_text("Mill 0 makes flour.")
    os.utime(file, (0, 0))
    stop, rounds = threading.Event(), []

    def apply(changes):
        rounds.append([source.name for source in changes.sources])
        if len(rounds) == 1 and moved == "file":
            file.write_text("Mill 0 makes oats.")
            rag.follow(changes)
            file.write_text("Mill 0 makes flour.")
        elif len(rounds) == 1:
            away = folder.rename(tmp_path / "away")
            rag.follow(changes)
            away.rename(folder)
        else:
            rag.follow(changes)
            stop.set()
        return True

    rag.watcher([tmp_path / "notes"], notify=rounds.append).follow(apply, stop)
    assert rounds == [["mills/0.txt"]] * 2
    assert [chunk.text for chunk in rag.store.chunks()] == ["Mill 0 makes flour."]


@pytest.fixture
def followed(rag):
    """`followed(folder, prune=True)` follows the folder in a thread; returns the list of reports."""
    stop, threads, reports = Soon(), [], []

    def begin(*folders, prune=True, notify=reports.append):
        watcher = rag.watcher(folders, prune=prune, notify=notify)

        def apply(changes):
            reports.append(rag.follow(changes))
            reports[-1].skipped += changes.skipped
            return True

        threads.append(threading.Thread(target=watcher.follow, args=(apply, stop)))
        threads[-1].start()
        return reports

    yield begin
    stop.set()
    for thread in threads:
        thread.join()


def changed(folder: Path, draw: random.Random) -> None:
    """One change of the kinds that people and programs make."""
    files, folders = sorted(folder.rglob("*.txt")), [folder, *sorted(p for p in folder.rglob("*") if p.is_dir())]
    place = draw.choice(folders) / f"{draw.randrange(40)}.txt"
    kind = draw.choice(["write", "write", "edit", "replace", "delete", "move", "folder", "moved folder", "empty"])
    text = f"Mill {draw.randrange(1000)} makes flour of sort {draw.randrange(5)}."
    if kind == "write" or not files:
        place.write_text(text)
    elif kind == "edit":
        with draw.choice(files).open("a") as file:
            file.write(f" {text}")
    elif kind == "replace":
        save(draw.choice(files), text)
    elif kind == "delete":
        draw.choice(files).unlink()
    elif kind == "move":
        draw.choice(files).replace(place)
    elif kind == "empty":
        draw.choice(files).write_text("")
    elif kind == "folder":
        (draw.choice(folders[:3]) / f"f{draw.randrange(6)}").mkdir(exist_ok=True)
    elif folders[1:]:
        old, new = draw.choice(folders[1:]), folder / f"f{draw.randrange(6, 12)}"
        if not new.exists():
            old.rename(new)


@pytest.mark.slow
@pytest.mark.parametrize("notified", [True, False])
def test_after_many_changes_the_index_equals_a_new_one(folder, rag, followed, tmp_path, monkeypatch, notified):
    if not notified:
        monkeypatch.setitem(sys.modules, "watchfiles", None)
        monkeypatch.setattr(watch, "POLL_SECONDS", 2)
    reports = followed(folder)
    draw = random.Random(7)
    for number in range(CHANGES):
        changed(folder, draw)
        if number % 40 == 39:  # earlier changes are ingested before the next
            (folder / "mark.txt").write_text(f"Mark {number}.")
            until(lambda: f"Mark {number}." in [chunk.text for chunk in rag.store.chunks()])  # noqa: B023
    (folder / "last.txt").write_text("The last one.")
    with RagKV.create(tmp_path / "new", model=rag.config.model, device="cpu", engines=("ape",)) as new:
        new.ingest(folder)
        expected = content(new)
        until(lambda: content(rag) == expected)
    assert any("checking every" in str(each) for each in reports) != notified


def test_deletions_need_prune_and_unreadable_files_are_named(folder, rag, followed):
    reports = followed(folder, prune=False)
    until(lambda: rag.store.stats().documents == 8)
    (folder / "0.txt").unlink()
    (folder / "1.txt").write_bytes(b"\0\1\2")
    (folder / "sheet.xyz").write_text("a")
    until(lambda: len([skip for report in reports for skip in report.skipped]) == 2)
    skipped = {skip.path.name: skip.reason for report in reports for skip in report.skipped}
    assert skipped == {"1.txt": "binary file", "sheet.xyz": "unsupported type .xyz"}
    (folder / "2.txt").write_text("Mill 2 makes oats.")
    until(lambda: any(report.updated for report in reports))
    assert rag.store.stats().documents == 8
    assert sum(len(report.skipped) for report in reports) == 2  # once each


@pytest.mark.parametrize("gone", ["emptied", "removed"])
def test_a_folder_that_is_gone_as_a_whole_keeps_its_documents(folder, rag, followed, gone):
    reports = followed(folder)
    until(lambda: rag.store.stats().documents == 8)
    away = folder.rename(folder.parent / "away")
    if gone == "emptied":
        folder.mkdir()
    until(lambda: any("its documents stay" in str(each) for each in reports))
    assert rag.store.stats().documents == 8
    shutil.rmtree(folder, ignore_errors=True)
    away.rename(folder)  # mounted again
    (folder / "0.txt").unlink()
    until(lambda: rag.store.stats().documents == 7)


def test_a_folder_that_may_not_be_looked_into_is_gone_and_what_is_in_it_matters(folder, rag, monkeypatch):
    said, real = [], os.stat
    watcher = rag.watcher([folder], notify=said.append)

    def refuse(path, **options):
        if isinstance(path, (str, Path)) and Path(path).is_relative_to(folder):
            raise PermissionError
        return real(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert watcher._matters(folder / "sub" / "a.txt")
    assert watcher._walk()[0].sources == []
    assert said == [f"{folder} does not exist; its files are ingested once it does."]


def test_a_folder_that_is_not_there_yet_is_named_and_followed_later(folder, rag, followed):
    away = folder.rename(folder.parent / "away")
    reports = followed(folder, prune=False)
    until(lambda: [str(each) for each in reports] == [f"{folder} does not exist; its files are ingested once it does."])
    away.rename(folder)
    until(lambda: rag.store.stats().documents == 8)


def test_what_could_not_be_stored_is_tried_again(folder, rag, monkeypatch):
    monkeypatch.setattr(watch, "WALK_TICKS", 1)
    stop, calls = threading.Event(), []

    def apply(changes):
        calls.append(sorted(source.name for source in changes.sources))
        if len(calls) == 3:
            stop.set()
        return False

    rag.watcher([folder], notify=calls.append).follow(apply, stop)
    assert calls == [[f"{number}.txt" for number in range(8)]] * 3


def test_the_command_follows_until_it_is_ended(folder, tmp_path, model_folder):
    index = tmp_path / "index"
    chosen = ("--model", model_folder, "--device", "cpu", "--engines", "ape")
    child = CliChild("ingest", folder, "--index", index, "--watch", "--prune", "--json", *chosen, program=HURRIED)
    assert len(json.loads(child.line())["added"]) == 8
    save(folder / "new.txt", "New.")
    assert json.loads(child.line())["added"] == [str(folder / "new.txt")]
    (folder / "new.txt").rename(folder / "newer.txt")
    assert json.loads(child.line())["added"] == [str(folder / "newer.txt")]
    assert json.loads(child.line())["pruned"] == [str(folder / "new.txt")]
    code, out, err = child.end(signal.SIGINT)
    assert (code, out) == (0, "")
    assert "No longer watching" in err


def test_it_follows_beside_a_server(folder, rag):
    rag.ingest(folder)
    with live({"own": rag}, resident=True):
        chosen = ("--index", rag.folder, "--device", "cpu")
        child = CliChild("ingest", folder, "--watch", "--prune", "--json", *chosen, program=HURRIED)
        save(folder / "new.txt", "New.")
        assert json.loads(child.line())["added"] == [str(folder / "new.txt")]
        save(folder / "0.txt", "\0\1")
        assert json.loads(child.line())["skipped"] == [{"path": str(folder / "0.txt"), "reason": "binary file"}]
    (folder / "1.txt").unlink()
    assert json.loads(child.line())["pruned"] == [str(folder / "1.txt")]
    assert child.end(signal.SIGINT)[0] == 0


def test_the_server_follows_folders_of_the_user_file(folder, rag, caplog):
    manager = JobManager(ServedIndexes({"own": rag}), ConcurrencyLimiter(8))
    try:
        manager.follow("own", folder, prune=True)
        until(lambda: rag.store.stats().documents == 8)
        (folder / "0.txt").unlink()
        (folder / "1.txt").write_bytes(b"\0\1")
        until(lambda: rag.store.stats().documents == 7 and "1.txt is not in index own: binary file" in caplog.text)
        until(lambda: all(job.ended.is_set() for job in manager.jobs("own")))
        assert {job.facts.state for job in manager.jobs("own")} == {"done"}
    finally:
        manager.close()


def test_a_full_disk_does_not_end_it(folder, index, monkeypatch, ragkv):
    outcomes = iter([StoreFullError("The disk is full."), KeyboardInterrupt()])

    def follow(*_, **more):
        raise next(outcomes)

    monkeypatch.setattr(RagKV, "follow", follow)
    monkeypatch.setattr(watch, "WALK_TICKS", 1)
    shown = ragkv("ingest", folder, "--index", index, "--watch", "--device", "cpu")
    assert shown.code == 0
    assert "The disk is full. The next check of the folders tries again." in shown.err
