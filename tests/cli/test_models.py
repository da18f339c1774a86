"""`ragkv models`: the description of one model."""

import json


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
