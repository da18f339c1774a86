"""`ragkv plan`."""

import inspect
import json

import pytest
from steady import steady

from ragkv.cli.plan import plan as plan_command
from ragkv.config import byte_count
from ragkv.errors import UsageError
from ragkv.planning import calibration
from ragkv.planning.plan import SAMPLE_BYTES, SECONDS


@pytest.fixture
def plan(ragkv, documents, model_folder, monkeypatch):
    monkeypatch.setattr(calibration, "ROUNDS", 3)
    monkeypatch.setattr("ragkv.planning.plan.perf_counter", steady())
    given = ("--model", model_folder, "--device", "cpu", "--engines", "block")
    return lambda *arguments: ragkv("plan", documents, *given, *arguments)


def test_the_default_sample_is_the_plans():
    default = inspect.signature(plan_command).parameters["sample"].default
    assert byte_count("--sample", default) == SAMPLE_BYTES
    assert inspect.signature(plan_command).parameters["seconds"].default == SECONDS


def test_without_a_model_it_is_that_of_an_ingest(ragkv, documents, index, model_folder, tmp_path, monkeypatch):
    asked = []

    def plan_ingest(*paths, **settings):
        asked.append(settings)
        raise UsageError("enough")

    monkeypatch.setattr("ragkv.planning.plan.plan_ingest", plan_ingest)
    monkeypatch.chdir(tmp_path)
    assert "Planning for mini, which `ragkv ingest` takes" in ragkv("plan", documents).err
    user_file = tmp_path / "xdg" / "ragkv" / "config.toml"
    user_file.parent.mkdir(parents=True)
    user_file.write_text(f'model = "{model_folder}"\ncodec = "zstd"\n')
    assert f"Planning for {model_folder}, as {user_file} says; for another" in ragkv("plan", documents).err
    index.rename("ragkv-index")
    assert f"Planning for {model_folder}, the model of ragkv-index;" in ragkv("plan", documents, "--codec", "int8").err
    monkeypatch.setenv("RAGKV_MODEL", "mini")
    assert "Planning for mini, as RAGKV_MODEL says" in ragkv("plan", documents).err
    assert "Planning" not in ragkv("plan", documents, "--model", "smollm2").err
    assert [each.get("codec") for each in asked] == [None, "zstd", "int8", "zstd", None]
    assert asked[2]["chunk_tokens"] == 128


def test_text_and_json_say_the_same(plan):
    result = plan()
    assert result.code == 0
    found = json.loads(plan("--json").out)
    assert (found["documents"]["value"], found["sample"]["whole"], found["encodings"]) == (2, True, ["prefixed"])
    assert f"2 documents, {found['chunks']['value']:,.0f} chunks" in result.out
    assert [codec["codec"] for codec in found["codecs"]] == ["raw", "zstd", "half", "q8", "int8", "int4"]
    parts = [value for name, value in found["seconds"].items() if name != "total"]
    assert sum(parts) == pytest.approx(found["seconds"]["total"], abs=0.01)
    # the tests' random Llama: 3 layers, 2 KV heads of 16, float32
    assert found["codecs"][0]["bytes_per_million_tokens"] == 2 * 3 * 2 * 16 * 4 * 1_000_000


def test_another_runtime_overtakes(plan):
    [found] = json.loads(plan("--json", "--beside", 50, 500).out)["first_token"]
    assert (found["ms"], found["second_token_ms"], found["token_ms"]) == (10, 10, 10)
    assert f"overtakes in an answer: block with token {found['overtaken_after']:,}." in plan("--beside", 50, 500).out
    assert "overtakes in an answer: block never." in plan("--beside", 50, 100).out
    assert plan("--beside", 0, 1).code == 2


def test_a_steady_machine_an_uneven_one_and_one_without_time(plan, monkeypatch):
    result = plan()
    assert "in 3 repeats" in result.out
    assert "Do not trust" not in result.out
    for stage in ("starting", "loading the model", "reading", "encoding", "first token"):
        assert f"plan: {stage} …" in result.err
    assert plan("--quiet").err == ""
    monkeypatch.setattr("ragkv.planning.plan.perf_counter", steady(0.001, 0.002, 0.005, 0.007, 0.011, 0.013, 0.017))
    assert "Do not trust these times." in plan().out
    found = json.loads(plan("--json").out)
    assert (found["trust"]["trusted"], found["left_out"]) == (False, [])
    monkeypatch.setattr("ragkv.planning.plan.perf_counter", steady(100.0))
    assert "Left out for lack of time (--seconds 2): Parts of 1 of 2 files were read" in plan("--seconds", 2).out
