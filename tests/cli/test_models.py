"""`ragkv models`: the recorded table, families tried again, and the description of one model."""

import json
import os
import re
import signal

import pytest
from clichild import forkserver

from ragkv.errors import ConfigError
from ragkv.evaluation import families as surveys
from ragkv.evaluation.families import ENGINES, EXACT, FamilyVerdict, Survey, choose, families


def test_the_table_is_that_of_the_release(ragkv):
    table = json.loads(ragkv("models", "--json").out)
    assert Survey.from_json(table).to_json() == table
    assert {row["family"] for row in table["families"]} >= {"llama", "qwen3", "gpt_oss", "mamba2"}
    for row in table["families"]:
        assert set(row["engines"]) == set(ENGINES)
        assert set(row["engines"].values()) <= {"exact", "refused"}
        assert ("refused" in row["engines"].values()) == (row["reason"] is not None)
        assert ("exact" in row["engines"].values()) == (row["error"] is not None)
        assert row["error"] is None or (row["error"] <= EXACT and row["models"] >= 3)
        assert not re.search(r"Error\b|Exception|Traceback", row["reason"] or ""), row["reason"]
    llama = next(row for row in table["families"] if row["family"] == "llama")
    assert set(llama["engines"].values()) == {"exact"}
    shown = ragkv("models").out
    assert "llama" in shown
    assert f"full {Survey.recorded().exact('full')}," in shown
    phi3 = next(line for line in shown.splitlines() if line.startswith("phi3 "))
    assert phi3.split() == ["phi3", *["exact"] * 4, phi3.split()[5], "3", "default,", "longrope"]


@pytest.mark.slow
def test_families_are_tried_anew_in_a_process_of_their_own(ragkv, monkeypatch):
    monkeypatch.setattr(surveys.multiprocessing, "get_context", lambda method: forkserver())
    found = json.loads(ragkv("models", "--families", "opt,opt", "--json").out)
    recorded = {row["family"]: row["engines"] for row in Survey.recorded().to_json()["families"]}
    assert {row["family"]: row["engines"] for row in found["families"]} == {name: recorded[name] for name in ("opt",)}


def test_what_goes_wrong_with_a_family_is_its_row(monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("no heads")

    monkeypatch.setattr(surveys, "examine", fails)
    row = surveys.judge("llama").to_json()
    assert set(row["engines"].values()) == {"refused"}
    assert row["reason"] == "Not judged: no heads."
    monkeypatch.setattr(surveys, "parameters", fails)
    assert "no small model of it can be built (no heads)" in surveys.judge("llama").reason


@pytest.mark.slow
def test_a_process_that_hangs_or_ends_is_a_row(monkeypatch):
    monkeypatch.setattr(surveys.multiprocessing, "get_context", lambda method: forkserver())
    worker = surveys._Worker()
    os.kill(worker._process.pid, signal.SIGSTOP)
    assert worker.ask(("llama", 0), 0) == "Not judged: it came to no end within 0 s."
    worker._process.kill()
    worker._process.join()
    assert worker.ask(("llama", 0), 600) == "Not judged: the process that tried it ended (code -9)."
    worker.end()


def test_a_family_that_transformers_does_not_have():
    assert choose("all") == families()
    assert choose("llama,qwen2,llama") == ["llama", "qwen2"]
    with pytest.raises(ConfigError, match="no decoder family 'nosuch'"):
        choose("llama,nosuch")


def test_a_wrong_answer_is_shown_as_such_and_ends_with_1(ragkv, monkeypatch):
    wrong = FamilyVerdict(family="llama", errors=dict.fromkeys(ENGINES, 0.5))
    monkeypatch.setattr(surveys, "survey", lambda names: iter([wrong]))
    assert wrong.to_json()["engines"]["full"] == "wrong"
    done = ragkv("models", "--families", "llama")
    assert (done.code, "wrong" in done.out) == (1, True)


def test_one_model(ragkv, model_folder):
    found = json.loads(ragkv("models", model_folder, "--device", "cpu", "--json").out)
    assert found["family"] == "llama"
    assert set(found["engines"].values()) == {"exact"}
    assert found["positions"] == 512
    assert found["state_bytes"] == 0
    raw = 3 * 2 * (16 + 16) * 4  # layers, heads, widths, float32
    assert raw <= found["kv_bytes"]["raw"] < raw + 16  # the record's manifest
    assert found["kv_bytes"]["int4"] < found["kv_bytes"]["int8"] < found["kv_bytes"]["raw"]
    shown = ragkv("models", model_folder, "--device", "cpu").out
    assert "bytes/token" in shown
    assert "for 1,000 tokens of context" in shown
