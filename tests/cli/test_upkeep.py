"""The maintenance commands: output, effects and exit codes."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clichild import CliChild
from outcome import Terminal
from storekit import put_kv

from ragkv import RagKV
from ragkv.attention.kv import ChunkKV
from ragkv.store import KVIdentity, Store
from ragkv.store.tables import Transaction, digest
from ragkv.types import Encoding

QUESTION = "Who founded Halden Works?"
BEGAN = time.time()


def edit(index: Path, change: Callable[[Transaction], object]) -> None:
    """Modify rows without the store's knowledge."""
    with Store.open(index) as store:
        store._live().write(change)


def flip(txn: Transaction, table: str, prefix: bytes = b"") -> None:
    """Flip one bit of the first row's value."""
    key, found = next(txn.scan(table, prefix))
    value = bytearray(bytes(found))
    value[len(value) // 2] ^= 1
    txn.put(table, key, bytes(value))


def ask(ragkv: Any, index: Path, *more: str) -> dict[str, Any]:
    """An answer without values that differ between runs."""
    found = ragkv("query", QUESTION, "--index", index, "--max-new-tokens", 8, "--json", *more)
    assert found.code == 0, found.err
    answer = json.loads(found.out)
    del answer["timing_ms"]
    return answer


SUSPENDED = """
import sys
from ragkv.store import Store

def suspend(txn):
    print("inside", flush=True)
    sys.stdin.readline()

with Store.open(sys.argv[1]) as store, store.writing("ragkv ingest docs/"):
    store._live().write(suspend)
"""


def test_a_suspended_ingest_does_not_stop_reading(ragkv, index, monkeypatch):
    ingest = CliChild(index, program=SUSPENDED)
    try:
        assert ingest.line() == "inside\n"
        os.kill(ingest.process.pid, signal.SIGSTOP)
        for name in ("OPEN_SECONDS", "WRITE_SECONDS"):  # how long does not matter, only that it ends
            monkeypatch.setattr(f"ragkv.store.environment.{name}", 0.01)
        assert json.loads(ragkv("ls", "--index", index, "--json").out)["total"] == 2
        assert json.loads(ragkv("stats", "--index", index, "--json").out)["documents"] == 2
        result = ragkv("query", QUESTION, "--index", index, "--max-new-tokens", 2, "--json")
        assert result.code == 0
        assert json.loads(result.out)["sources"]
        kept = f"warning: what a question computed is not kept: {index / 'store'} cannot be written: "
        lines = [line for line in result.err.splitlines() if line.startswith(kept)]
        assert lines
        assert all(f"PID {ingest.process.pid} (ragkv ingest docs/" in line for line in lines)
    finally:
        ingest.end(signal.SIGKILL)


def test_verify_of_a_whole_index(ragkv, index, no_model):
    shutil.rmtree(index / "derived")
    plain = ragkv("verify", "--index", index)
    assert plain.code == 0
    assert plain.out == f"{index}: no damage ({plain.out.partition('(')[2]}"
    assert "2 documents, 2 chunks, 4 KV records" in plain.out
    result = json.loads(ragkv("verify", "--index", index, "--json").out)
    assert (result["ok"], result["findings"], result["checked"]["kv"]) == (True, [], 4)
    assert result["derived"] == {"bm25": "not built yet: the next question builds it"}
    quick = json.loads(ragkv("verify", "--index", index, "--quick", "--json").out)
    assert quick["checked"]["bytes"] < result["checked"]["bytes"]
    assert (result["unchecked"], len(quick["unchecked"])) == ([], 1)
    assert ragkv("verify", "--index", index, "--quick").err.count("not checked: ") == 1
    assert ragkv("verify", "--index", index, "--quiet").out == ""


def test_damage_is_told_repaired_and_answered_from(ragkv, index):
    before = ask(ragkv, index, "--engine", "pced")
    edit(index, lambda txn: flip(txn, "segments"))
    result = ragkv("verify", "--index", index)
    assert result.code == 1
    assert result.out.startswith("damaged: ")
    assert "run `ragkv repair`" in result.out
    assert "1 finding (" in result.out
    payload = json.loads(ragkv("verify", "--index", index, "--json").out)
    assert [set(finding) for finding in payload["findings"]] == [
        {"kind", "table", "where", "document", "what", "remedy"}
    ]
    dry = ragkv("repair", "--index", index, "--dry-run")
    assert dry.code == 0
    assert "would be: " in dry.out
    assert ragkv("verify", "--index", index).code == 1
    done = ragkv("repair", "--index", index, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["found"] == payload["findings"]
    assert ragkv("verify", "--index", index).code == 0
    assert ask(ragkv, index, "--engine", "pced") == before
    assert "nothing to repair" in ragkv("repair", "--index", index).out


def test_repaired_tensors_are_the_old_ones(ragkv, index):
    with RagKV.open(index, device="cpu") as rag:
        ids = [chunk.token_ids for chunk in rag.store.chunks()]
        kept = (Encoding.STANDALONE, Encoding.PREFIXED)
        identities = [rag.kv_source.identity(encoding, chunk) for encoding in kept for chunk in ids]
        before = [rag.store.get_kv(identity) for identity in identities]
    edit(index, lambda txn: [txn.put("kv", key, b"gone") for key in list(txn.keys("kv"))])
    assert json.loads(ragkv("repair", "--index", index, "--json").out)["encoded"] == 4
    with RagKV.open(index, device="cpu") as rag:
        for identity, old in zip(identities, before, strict=True):
            new = rag.store.get_kv(identity)
            assert old is not None
            assert new is not None
            assert new.encoded_at == old.encoded_at
            for a, b in zip((*new.keys, *new.values), (*old.keys, *old.values), strict=True):
                # other batch sizes sum in another order, which may change the codec's rounding
                torch.testing.assert_close(a, b, atol=1e-5, rtol=2**-10)


def test_kv_may_be_left_to_the_next_question(ragkv, index, no_model):
    edit(index, lambda txn: flip(txn, "kv"))
    assert ragkv("repair", "--index", index, "--no-encode").code == 0
    assert json.loads(ragkv("verify", "--index", index, "--json").out)["checked"]["kv"] == 3


@pytest.mark.parametrize(
    ("table", "reason"),
    [("documents", "its row is damaged"), ("texts", "its text is lost"), ("chunks", "its chunk 0 is lost")],
)
def test_a_lost_document_is_named_and_comes_back_without_encoding(ragkv, index, documents, table, reason):
    before = ask(ragkv, index, "--engine", "block")
    name = str(documents.resolve() / "halden.md")
    edit(index, lambda txn: flip(txn, table, name.encode() if table == "documents" else digest(name)))
    assert f"would be dropped: {name} ({reason})" in ragkv("repair", "--index", index, "--dry-run").out
    lost = ragkv("repair", "--index", index)
    assert lost.code == 1
    assert f"dropped: {name} ({reason}); ingest it again" in lost.out
    assert ragkv("verify", "--index", index).code == 0
    again = json.loads(ragkv("ingest", documents, "--index", index, "--json").out)
    assert (again["added"], again["kv_encoded"]) == ([name], 0)
    assert ask(ragkv, index, "--engine", "block") == before


def test_the_model_that_was_forgotten_is_the_one_that_made_the_kv(ragkv, index):
    with RagKV.open(index, readonly=True) as rag:
        before = rag.store.get_meta("model")
    edit(index, lambda txn: txn.put("meta", b"fact/model", b"{"))
    assert "damaged: fact 'model'" in ragkv("verify", "--index", index).out
    assert ragkv("repair", "--index", index).code == 0
    with RagKV.open(index, readonly=True) as rag:
        assert rag.store.get_meta("model") == before


def test_where_two_models_made_kv_nobody_knows_and_nothing_is_read(ragkv, index):
    with RagKV.open(index) as rag:
        chunk = next(rag.store.chunks())
        foreign = KVIdentity(model="another", encoding=Encoding.STANDALONE, chunk_ids=chunk.token_ids)
        tensor = torch.zeros(1, len(chunk.token_ids), 4)
        put_kv(rag.store, foreign, ChunkKV(keys=(tensor,), values=(tensor,)), chunk.chunk_id)
    edit(index, lambda txn: txn.put("meta", b"fact/model", b"{"))
    assert ragkv("repair", "--index", index).code == 0
    refused = ragkv("query", QUESTION, "--index", index)
    assert refused.code == 1
    assert "made by another version of model" in refused.sentence


def test_gc_drops_orphans_old_prefixes_and_stale_folders(ragkv, index):
    ask(ragkv, index, "--engine", "block")  # stores the prefix and builds the retrieval index
    text = (index / "ragkv.toml").read_text()
    (index / "ragkv.toml").write_text(text.replace("in one or two sentences", "briefly"))
    ask(ragkv, index, "--engine", "block")
    tensor = torch.zeros(1, 3, 4)
    with RagKV.open(index) as rag:
        staged = KVIdentity(model="m", encoding=Encoding.STANDALONE, chunk_ids=(1, 2, 3))
        rag.store.stage_kv([(staged, ChunkKV(keys=(tensor,), values=(tensor,)))])
    left = index / "derived" / "bm25" / "data-ofadeadsave"
    left.mkdir()
    (left / "x").write_bytes(b"12345")
    assert json.loads(ragkv("gc", "--index", index, "--dry-run", "--json").out)["derived"] == 0  # may be in use
    os.utime(left, (time.time() - 7200,) * 2)
    expected = {"records": 1, "segments": 0, "index_records": 1, "derived": 1, "derived_bytes": 5}
    dry = json.loads(ragkv("gc", "--index", index, "--dry-run", "--json").out)
    assert {name: dry[name] for name in expected} == expected
    assert left.exists()
    done = json.loads(ragkv("gc", "--index", index, "--json").out)
    assert done == {**dry, "dry_run": False}
    assert done["bytes"] > 2 * tensor.nbytes
    assert not left.exists()
    assert "0 orphan records" in ragkv("gc", "--index", index).out
    assert ragkv("verify", "--index", index).code == 0
    assert ask(ragkv, index, "--engine", "block")["kv"]["misses"] == 0


def test_gc_while_a_question_deletes_the_same(ragkv, index, monkeypatch):
    left = index / "derived" / "bm25" / "data-ofadeadsave"
    left.mkdir(parents=True)
    os.utime(left, (time.time() - 7200,) * 2)
    monkeypatch.setattr("ragkv.index.maintenance._weight", lambda path: shutil.rmtree(path) or 0)
    assert ragkv("gc", "--index", index).code == 0


@pytest.mark.parametrize("command", ["backup", "compact"])
def test_a_copy_answers_like_the_index(ragkv, index, tmp_path, command):
    before = ask(ragkv, index)
    copy = tmp_path / "new" / "copy"
    where = (copy,) if command == "backup" else ("--output", copy)
    payload = json.loads(ragkv(command, *where, "--index", index, "--verify", "--json").out)
    assert payload["path"] == str(copy)
    assert payload["verified"] is True
    assert payload["bytes_after"] == (copy / "store" / "data.mdb").stat().st_size
    assert sorted(path.name for path in copy.parent.iterdir()) == ["copy"]
    assert ask(ragkv, copy) == before
    empty = tmp_path / "empty"
    empty.mkdir()
    again = ragkv(command, *((empty,) if command == "backup" else ("--output", empty)), "--index", index)
    assert again.code == 0, again.err
    assert str(empty) in again.out


def test_a_copy_that_is_damaged_is_not_kept(ragkv, index, tmp_path):
    edit(index, lambda txn: flip(txn, "kv"))
    found = ragkv("backup", tmp_path / "copy", "--index", index, "--verify")
    assert found.code == 1
    assert "the copy has 1 fault" in found.sentence
    assert not [path for path in tmp_path.iterdir() if "copy" in path.name]
    assert ragkv("backup", tmp_path / "copy", "--index", index).code == 0


def test_a_copy_that_fails_leaves_nothing(ragkv, index, tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("ragkv.index.maintenance.write_plain", fail)
    result = ragkv("backup", tmp_path / "copy", "--index", index)
    assert result.code == 1
    assert "Input/output error" in result.sentence
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    for command in ("backup", "pack"):
        result = ragkv(command, tmp_path / "copy", "--index", index)
        assert str(tmp_path / "copy") in result.sentence  # not a folder that is gone
    assert not [path for path in tmp_path.iterdir() if "copy" in path.name]


def test_delete_by_name_path_id_and_pattern(ragkv, index, documents, no_model):
    with RagKV.open(index) as rag:
        rag.retrieve("valves", retrieval="bm25")
    assert (index / "derived").exists()
    bolt = str(documents.resolve() / "bolt.txt")
    for name in ("bolt.txt", bolt, "b*.txt", "*/documents/bolt.txt"):
        assert ragkv("delete", name, "--index", index, "--dry-run").out == f"would delete {bolt}\n"
    done = ragkv("delete", "bolt.txt", "--index", index, "--yes", "--json")
    assert json.loads(done.out) == {"deleted": [bolt], "dry_run": False}
    with RagKV.open(index) as rag:
        assert rag.retrieve("valves", retrieval="bm25") == []
    found = json.loads(ragkv("verify", "--index", index, "--json").out)
    assert (found["ok"], found["derived"]["bm25"]) == (True, "current")  # the delete hid it there too
    assert json.loads(ragkv("stats", "--index", index, "--json").out)["documents"] == 1
    gone = ragkv("delete", "bolt.txt", "--index", index, "--yes")
    assert (gone.code, gone.out) == (2, "")


def test_delete_asks_on_a_terminal(ragkv, index, monkeypatch, no_model):
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert ragkv("delete", "*", "--index", index).code == 1
    assert json.loads(ragkv("stats", "--index", index, "--json").out)["documents"] == 2
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert ragkv("delete", "*", "--index", index).code == 0
    assert json.loads(ragkv("stats", "--index", index, "--json").out)["documents"] == 0


def test_names_that_mean_none_or_several_are_refused(ragkv, index, documents, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(documents / "bolt.txt", other / "bolt.txt")
    ragkv("ingest", other, "--index", index)
    several = ragkv("delete", "bolt.txt", "--index", index, "--yes")
    assert several.code == 2
    assert f"{documents.resolve() / 'bolt.txt'}, {other.resolve() / 'bolt.txt'}" in several.sentence
    assert "names 2 documents" in several.sentence
    near = ragkv("delete", "haldn.md", "--index", index, "--yes")
    assert near.code == 2
    assert f"near it are {documents.resolve() / 'halden.md'}" in near.sentence
    assert "ragkv ls lists all" in ragkv("delete", "zzz", "--index", index, "--yes").sentence
    assert json.loads(ragkv("stats", "--index", index, "--json").out)["documents"] == 3
    shared = json.loads(ragkv("stats", "--index", index, "--per-document", "--json").out)["per_document"]
    assert [(one["kv_records"], one["kv_bytes_own"] > 0) for one in shared] == [(2, False), (2, True), (2, False)]
    assert ragkv("delete", "bolt*", "--index", index, "--yes").code == 0


def test_stats_per_document_add_up(ragkv, index, documents, no_model):
    result = json.loads(ragkv("stats", "--index", index, "--per-document", "--json").out)
    first, two = result["per_document"]
    assert [first["source"], two["source"]] == ["bolt.txt", "halden.md"]
    for key in ("chunks", "tokens", "kv_records", "kv_bytes"):
        assert first[key] + two[key] == result[key]
    assert first["kv_bytes_own"] == first["kv_bytes"]
    assert first["text_bytes"] > (documents / "bolt.txt").stat().st_size - 1
    assert BEGAN <= first["ingested_at"] <= time.time()
    shown = ragkv("stats", "--index", index, "--per-document").out
    assert "halden.md" in shown
    assert "KV of its own" in shown
    assert "per_document" not in json.loads(ragkv("stats", "--index", index, "--json").out)
