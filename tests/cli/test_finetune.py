"""`ragkv finetune`."""

import json
import tomllib

import pytest

QUICK = ("--steps", 1, "--gradient-accumulation", 1, "--lora-rank", 2, "--device", "cpu")


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "Who?", "blocks": ["Ann made it.", "Bo."], "response": "Ann."}\n')
    return path


def test_a_model_is_tuned_and_answers(ragkv, tmp_path, model_folder, documents, lines):
    tuned = tmp_path / "tuned"
    command = ("finetune", "block", "--model", model_folder, "--data", lines, "--output", tuned, *QUICK)
    done = ragkv(*command, "--sink", "bos", "--eval-data", lines, "--json")
    assert (done.code, done.err) == (0, "")
    payload = json.loads(done.out)
    assert (payload["steps_done"], payload["rows"], payload["lessons"], payload["output"]) == (1, 1, 1, str(tuned))
    assert json.loads((tuned / "ragkv.json").read_text())["sink"] == "bos"

    index = ("--index", tmp_path / "index")
    made = ragkv("ingest", documents, "--model", tuned, "--engines", "block", "--device", "cpu", *index, "--quiet")
    assert made.code == 0
    answer = ragkv("query", "Who founded Bolt Ltd?", "--engine", "block", "--device", "cpu", "--json", *index)
    assert answer.code == 0
    assert "was not trained for Block-Attention" not in answer.err

    changed = ragkv(*command)
    assert changed.code == 2
    assert changed.sentence.startswith(f"ragkv: {tuned} holds a run of other settings (eval_data, eval_data_sha256")


def test_the_prompt_of_an_index_is_what_is_tuned_for(ragkv, tmp_path, model_folder, lines):
    (tmp_path / "ragkv.toml").write_text('[prompt]\nsystem = "Obey."\n')
    done = ragkv(
        *("finetune", "block", "--model", model_folder, "--data", lines, "--output", tmp_path / "tuned", *QUICK),
        *("--prompt-of", tmp_path),
    )
    assert done.code == 0
    assert "step 1 of 1: loss " in done.err
    found = json.loads((tmp_path / "tuned" / "ragkv.json").read_text())
    assert (found["recipe"]["prompt"]["system"], found["bos"]) == ("Obey.", "auto")


def test_a_model_that_is_tuned_without_a_bos_is_read_without_one(ragkv, tmp_path, model_folder, documents, lines):
    tuned, index = tmp_path / "tuned", tmp_path / "index"
    command = ("finetune", "block", "--data", lines, *QUICK, "--quiet")
    assert ragkv(*command, "--model", model_folder, "--output", tuned, "--bos", "none").code == 0
    assert json.loads((tuned / "ragkv.json").read_text())["bos"] == "none"
    assert ragkv("ingest", documents, "--model", tuned, "--index", index, "--device", "cpu", "--quiet").code == 0
    assert tomllib.loads((index / "ragkv.toml").read_text())["prompt"]["bos"] == "none"
    done = ragkv("query", "Who founded Bolt Ltd?", "--engine", "block", "--index", index, "--device", "cpu", "--json")
    assert (done.code, json.loads(done.out)["kv"]["misses"]) == (0, 0)
    assert ragkv(*command, "--model", tuned, "--output", tmp_path / "again").code == 0
    assert json.loads((tmp_path / "again" / "ragkv.json").read_text())["bos"] == "none"
