"""`ragkv ingest --kv`, `ragkv warm` and `ragkv config set kv_budget=…`."""

import json

import pytest

TEXT = "Halden Works was founded by Mira Oskel in 1907. " * 12


@pytest.fixture
def lazy(ragkv, tmp_path):
    folder, documents = tmp_path / "lazy", tmp_path / "documents"
    documents.mkdir()
    for name in ("halden", "bolt"):
        (documents / f"{name}.txt").write_text(TEXT.replace("Halden", name.title()))
    message = ragkv("ingest", documents, "--index", folder, "--kv", "on-demand", "--embedder", "none")
    assert message.code == 0, message.err
    assert "left to the first question that reads it (on demand)" in message.out
    return folder


def read(ragkv, *arguments):
    """The JSON output of a successful command."""
    message = ragkv(*arguments, "--json")
    assert message.code == 0, message.err
    return json.loads(message.out)


def test_kv_is_made_ahead_and_kept_within_a_budget(ragkv, lazy, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"question": "Who founded Halden Works?"}\nno json\n')
    assert read(ragkv, "stats", "--index", lazy)["kv_records"] == 0
    warm = ("warm", "--index", lazy, "--questions", log, "--engine", "block", "--top-k", "1")
    assert "no question has read a chunk yet" in ragkv("warm", "--most", 1, "--index", lazy).out
    assert "log.jsonl, line 2" in ragkv(*warm).err
    made = read(ragkv, *warm)
    assert "no question finds a chunk whose KV" in ragkv(*warm, "--engine", "full").out
    assert (made["wanted"], made["present"], made["made"], made["refused"]) == (1, 1, 0, 0)
    assert "of 2 chunk KVs, 1 was there and 1 was made" in ragkv("warm", "halden*", "--index", lazy).out
    found = read(ragkv, "stats", "--index", lazy)
    assert (found["kv"], found["kv_budget_bytes"]) == ("on-demand", None)
    assert read(ragkv, "config", "set", f"kv_budget={found['kv_bytes'] // 2}", "--index", lazy)["evicted"] > 0
    found = read(ragkv, "stats", "--index", lazy)
    assert found["kv_bytes"] <= found["kv_budget_bytes"]
    assert 0 < found["kv_budget_used"] <= 1
    assert found["kv_evictions"] > 0
    assert ragkv("verify", "--index", lazy).code == 0
