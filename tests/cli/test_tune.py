"""`ragkv tune` as a user types it."""

import json

import pytest

from ragkv.config import CONFIG_FILE, load_config
from ragkv.evaluation.tune import APESetting, write_setting


@pytest.fixture(autouse=True)
def wide(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # a temporary folder's name may be long, and tables are cut to the width


def tune(ragkv, index, questions, *options):
    return ragkv("tune", questions, "--index", index, "--prefixes", "0,2", "--max-new-tokens", 1, *options)


def test_the_table_the_winner_and_the_config(ragkv, index, questions):
    write_setting(index, APESetting(prefix_newlines=0, temperature=0.9, scale=0.9))
    before = (index / CONFIG_FILE).read_text()
    dry = tune(ragkv, index, questions, "--dry-run")
    assert dry.code == 0, dry.err
    assert "Would write" in dry.out
    assert (index / CONFIG_FILE).read_text() == before
    assert not (index / "derived" / "tune-ape.jsonl").exists()
    ran = tune(ragkv, index, questions)
    assert "1 question without a gold answer left out" in ran.err
    for part in ("full", "as it was", "best", "prefix", "temperature", "scale", "0 of 1", "--holdout validates"):
        assert part in ran.out
    # nothing is right with a random model: a tie of all, and the setting that changes least
    assert "Wrote" in ran.out
    assert load_config(index).tuning["ape"] == {"temperature": 1.0, "scale": 1.0}
    again = tune(ragkv, index, questions)
    assert "already has the best setting" in again.out
    assert "tune: full" in again.err


def test_json_and_a_moved_prefix(ragkv, index, questions):
    config = (index / CONFIG_FILE).read_text().replace("prefix_newlines = 0", "prefix_newlines = 5")
    (index / CONFIG_FILE).write_text(config)
    ran = tune(ragkv, index, questions, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert (found["written"], found["ingest_again"], found["asked"]) == (True, True, 1)
    assert len(found["trials"]) == 1 + 2 + 9 + 9
    assert [t["setting"] for t in found["trials"] if t["winner"]] == [found["winner"]]
    assert load_config(index).prompt.prefix_newlines == 0
    (index / CONFIG_FILE).write_text(config)
    assert "run ragkv ingest on your documents again" in tune(ragkv, index, questions).out
