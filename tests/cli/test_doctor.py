"""`ragkv doctor`, what `ragkv stats` shows afterwards, and `ragkv tune`."""

import json
import re

import pytest

from ragkv.config import CONFIG_FILE, load_config
from ragkv.doctor.tune import APESetting, write_setting
from ragkv.store import Store


@pytest.fixture(autouse=True)
def wide(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # wide enough for the path of a temporary folder, because tables are cut


def test_a_report_for_people(ragkv, index):
    assert "not measured: ragkv doctor" in ragkv("stats", "--index", index).out
    ran = ragkv("doctor", "--index", index, "--quick", "--max-new-tokens", 2, "--limit", 1)
    assert ran.code == 0, ran.err
    for part in ("ragkv 0", "torch 2", "cpu: ", "2 chunks", "the one that made the index", "to do", "nothing"):
        assert part in ran.out
    for part in ("1 question (made from the index's own chunks)", "ape", "block", "pced", "half"):
        assert part in ran.out
    assert re.search(r"cores?, 1 thread\b", ran.out)
    assert "not enough to tell" in ran.out
    assert "ask more (--limit N" in ran.out
    assert "95 % intervals" in ran.err
    assert "zstd" not in ran.out.split("codec", 1)[1]
    stats = ragkv("stats", "--index", index).out
    assert "quality of block  " in stats
    for part in ("not enough to tell", "1 question", " to 100.0)"):
        assert part in " ".join(stats.split())


def test_stats_of_an_index_with_odd_verdicts(ragkv, index):
    for odd in (7, [{"engines": [{}]}], ["x"]):
        with Store.open(index) as store:
            store.put_meta("quality", odd)
            store.put_meta("model", {})
        ran = ragkv("stats", "--index", index)
        assert (ran.code, "damaged: run ragkv doctor again" in ran.out) == (0, True), odd
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


def test_health_alone_loads_no_model(ragkv, index, model_folder, no_model):
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


def tune(ragkv, index, questions, *options):
    return ragkv("tune", questions, "--index", index, "--max-new-tokens", 1, *options)


def test_the_table_the_winner_and_the_config(ragkv, index, questions):
    write_setting(index, APESetting(temperature=0.9, scale=0.9))
    before = (index / CONFIG_FILE).read_text()
    dry = tune(ragkv, index, questions, "--dry-run")
    assert dry.code == 0, dry.err
    assert "Would write" in dry.out
    assert (index / CONFIG_FILE).read_text() == before
    ran = tune(ragkv, index, questions)
    assert "1 question without a gold answer left out" in ran.err
    for part in ("full", "as it was", "best", "temperature", "scale", "0 of 1", "--holdout validates"):
        assert part in ran.out
    # a random model gets nothing right: all tie, and the setting with the fewest changes wins
    assert "Wrote" in ran.out
    assert load_config(index).tuning["ape"] == {"temperature": 1.0, "scale": 1.0}
    again = tune(ragkv, index, questions)
    assert "already has the best setting" in again.out
    assert "tune: full" in again.err


def test_tune_prints_json(ragkv, index, questions):
    ran = tune(ragkv, index, questions, "--json")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert (result["written"], result["asked"]) == (False, 1)
    assert len(result["trials"]) == 1 + 9 + 9
    assert [t["setting"] for t in result["trials"] if t["winner"]] == [result["winner"]]


def test_modes_of_retrieval_are_compared_where_gold_passages_are_named(ragkv, index, tmp_path):
    path = tmp_path / "gold.jsonl"
    lines = [
        {"question": "Who founded Halden Works?", "answer": "Mira", "sources": ["halden.md"]},
        {"question": "What does Bolt Ltd make?", "evidence": "Bolt Ltd makes"},
        {"question": "Who founded Nix Mills?", "answer": "Otto Nix"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    options = ("--index", index, "--questions", path, "--quick")
    shown = ragkv("doctor", *options)
    assert shown.code == 0, shown.err
    assert "retrieval  recall@1" in shown.out
    assert "retrieval: 2 questions with a gold passage in the index." in shown.out
    rows = json.loads(ragkv("doctor", *options, "--json").out)["quality"]["retrieval"]
    assert {row["metric"] for row in rows} == {"recall@1", "recall@5", "recall@10", "mrr@10"}
    assert [(row["engine"], row["value"], row["n"]) for row in rows] == [("bm25", 1.0, 2)] * 4

    path.write_text(json.dumps({"question": "Who founded Halden Works?", "answer": "Mira", "sources": ["gone.md"]}))
    nothing = ragkv("doctor", *options)
    assert (nothing.code, "retrieval  recall@1" in nothing.out) == (0, False)
    assert "No chunk of the index is relevant" in nothing.err
