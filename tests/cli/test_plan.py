"""`ragkv plan`."""

import inspect
import json

import pytest

from ragkv import plan
from ragkv.cli.plan import plan as plan_command
from ragkv.errors import UsageError


def test_the_default_time_is_the_plans():
    assert inspect.signature(plan_command).parameters["seconds"].default == plan.SECONDS


def test_without_a_model_it_is_that_of_an_ingest(ragkv, documents, index, model_folder, tmp_path, monkeypatch):
    asked = []

    def plan_ingest(*paths, **settings):
        asked.append(settings)
        raise UsageError("enough")

    monkeypatch.setattr("ragkv.plan.plan_ingest", plan_ingest)
    monkeypatch.chdir(tmp_path)
    assert "Planning for mini, which `ragkv ingest` takes" in ragkv("plan", documents).err
    user_file = tmp_path / "xdg" / "ragkv" / "config.toml"
    user_file.parent.mkdir(parents=True)
    user_file.write_text(f'model = "{model_folder}"\ncodec = "zstd"\n')
    assert f"Planning for {model_folder}, as {user_file} says; for another" in ragkv("plan", documents).err
    index.rename("ragkv-index")
    assert f"Planning for {model_folder}, the model of ragkv-index;" in ragkv("plan", documents, "--codec", "int8").err
    monkeypatch.setenv("RAGKV_MODEL", "mini")
    assert "Planning" not in ragkv("plan", documents).err
    assert "Planning" not in ragkv("plan", documents, "--model", "smollm2").err
    assert [each.get("codec") for each in asked] == [None, "zstd", "int8", "zstd", "zstd"]
    assert [each["model"] for each in asked[3:]] == ["mini", "smollm2"]
    assert asked[2]["chunk_tokens"] == 128


def test_text_and_json_say_the_same(ragkv, documents, model_folder, monkeypatch):
    monkeypatch.setattr(plan, "busy", list)
    monkeypatch.setattr(plan, "disagreement", lambda what, repeats: "")
    words = ("plan", documents, "--model", model_folder, "--device", "cpu", "--engines", "block", "--seconds", 10**6)
    result = ragkv(*words)
    assert result.code == 0
    for stage in ("starting", "loading the model", "reading", "encoding", "answering"):
        assert f"plan: {stage} …" in result.err
    assert ragkv(*words, "--quiet").err == ""
    shown = json.loads(ragkv(*words, "--json").out)
    assert (shown["corpus"]["documents"], shown["encodings"]) == (2, ["prefixed"])
    assert f"2 documents, {shown['corpus']['chunks']:,.0f} chunks" in result.out
    assert [*shown["kv_bytes"]] == ["half", "raw", "zstd", "q8", "int8", "int4"]
    assert sum(shown["seconds"].values()) == pytest.approx(shown["total_seconds"])
    assert "Stored KV " in result.out
    monkeypatch.setattr(plan, "busy", lambda: ["the machine is busy"])
    out = ragkv(*words).out
    assert "No verdict on speed: the machine is busy. Run it again on a quiet machine" in out
    assert "first token" not in out
