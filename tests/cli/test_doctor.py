"""`ragkv doctor` as a user types it, and what `ragkv stats` says afterwards."""

import json

import pytest

from ragkv.index.index import Index
from ragkv.store import Store


@pytest.fixture(autouse=True)
def wide(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # a temporary folder's name may be long, and tables are cut to the width


def test_a_report_for_people(ragkv, index):
    assert "not measured: ragkv doctor" in ragkv("stats", "--index", index).out
    ran = ragkv("doctor", "--index", index, "--quick", "--max-new-tokens", 2, "--limit", 1)
    assert ran.code == 0, ran.err
    for part in ("ragkv 0", "torch 2", "cpu: ", "2 chunks", "the one that made the index", "to do", "nothing"):
        assert part in ran.out
    for part in ("1 question (made from the index's own chunks)", "ape", "block", "pced", "half"):
        assert part in ran.out
    assert "not enough to tell" in ran.out
    assert "ask more (--limit N" in ran.out
    assert "95 % intervals" in ran.err
    assert "zstd" not in ran.out.split("codec", 1)[1]
    stats = ragkv("stats", "--index", index).out
    assert "quality of block  " in stats
    for part in ("not enough to tell", "1 question", " to 100.0)"):
        assert part in " ".join(stats.split())


@pytest.mark.parametrize("odd", [7, [{"engines": [{}]}], ["x"]])
def test_stats_of_an_index_with_odd_verdicts(ragkv, index, odd):
    with Store.open(index) as store:
        store.put_meta("quality", odd)
        store.put_meta("model", {})
    ran = ragkv("stats", "--index", index)
    assert (ran.code, "kept in a form that this version does not read" in ran.out) == (0, True)
    assert json.loads(ragkv("stats", "--index", index, "--json").out)["quality"] == []


def test_json_holds_what_is_kept_and_stats_tell_when_it_is_old(ragkv, index, documents, questions):
    asked = ("doctor", "--index", index, "--questions", questions, "--max-new-tokens", 2, "--json")
    found = ragkv(*asked, "--engines", "block", "--codecs", "none")
    assert found.code == 0, found.err
    assert set(json.loads(found.out)) == {"environment", "index", "model", "todo", "quality", "kept"}
    quality = json.loads(found.out)["quality"]
    assert (quality["questions"], quality["gold"], quality["source"]) == (2, 1, str(questions))
    assert [row["engine"] for row in quality["engines"]] == ["block"]
    assert quality["engines"][0]["verdict"] in ("good", "fair", "poor", "not enough to tell")
    assert quality["codecs"] == []
    [kept] = json.loads(ragkv("stats", "--index", index, "--json").out)["quality"]
    assert kept == {**quality, "outdated": None}
    (documents / "new.txt").write_text("Dorn Mill was founded by Karl Dorn.")
    assert ragkv("ingest", documents, "--index", index).code == 0
    assert "the documents changed since; run ragkv doctor again" in ragkv("stats", "--index", index).out


def test_without_an_index_it_tells_what_there_is_and_what_to_do(ragkv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = ragkv("doctor")
    assert ran.code == 0, ran.err
    for part in ("torch 2", "cpu: ", "model mini: here (bundled", "to do", "ragkv ingest PATH makes ragkv-index"):
        assert part in ran.out
    found = json.loads(ragkv("doctor", "--json").out)
    assert (found["index"], found["model"], found["quality"]) == (None, None, None)
    assert {one["role"] for one in found["environment"]["models"]} == {"model", "embedder", "reranker"}
    assert list(tmp_path.iterdir()) == []


def test_health_alone_loads_no_model(ragkv, index, model_folder, monkeypatch):
    def load(_):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(Index, "model", property(load))
    ran = ragkv("doctor", "--index", index, "--health")
    assert ran.code == 0, ran.err
    for part in (f"model {model_folder}: here", "no damage", "bm25 index: current", "to do", "nothing"):
        assert part in ran.out
    assert "verdict" not in ran.out
    found = json.loads(ragkv("doctor", "--index", index, "--health", "--json").out)
    assert found["index"]["health"]["ok"] is True
    assert found["todo"] == []


def test_damage_and_missing_models_are_things_to_do(ragkv, index, tmp_path):
    with Store.open(index) as store:
        store._live().write(lambda txn: [txn.put("kv", key, b"gone") for key in list(txn.keys("kv"))[:1]])
    text = (index / "ragkv.toml").read_text().replace('reranker = "none"', 'reranker = "/no/reranker"')
    (index / "ragkv.toml").write_text(text.replace('embedder = "none"', 'embedder = "nobody/has-this"'))
    found = json.loads(ragkv("doctor", "--index", index, "--health", "--json").out)
    todo = " ".join(found["todo"])
    for message in ("ragkv repair", "No model folder at '/no/reranker'"):
        assert message in todo
    states = {(one["role"], one["name"]): one["state"] for one in found["environment"]["models"]}
    assert states["reranker", "/no/reranker"] == "missing"
    assert states["embedder", "nobody/has-this"] == "to be fetched"
