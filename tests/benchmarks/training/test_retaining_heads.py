"""Retaining heads: labels and loss by their formulas, and a training that stops, resumes and learns."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from ragkv.benchmarks.training.retaining_heads import (
    RetainingConfig,
    app,
    retaining_example,
    train_retaining_heads,
)
from ragkv.errors import ModelLoadError, UsageError
from ragkv.model.apb.compressors import highest_logits, load_heads, widths_of
from ragkv.model.apb.document import AnchorAttention
from ragkv.model.self_check import load_model


@pytest.fixture
def folder(small_folder, tmp_path):
    return shutil.copytree(small_folder, tmp_path / "model")


@pytest.fixture
def config(folder, tmp_path):
    lines = [{"prompt": "Who?", "blocks": [f"Ann made {n}.", "Bo."], "response": "Ann."} for n in range(3)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RetainingConfig(
        model=str(folder), data=tmp_path / "data.jsonl", inner=8, steps=4, warmup=2, checkpoint_every=2, device="cpu"
    )


def test_a_lesson_is_of_the_response_alone(make_model):
    """Labels come from the queries after the prompt, and the heads get the inputs that they get when blocks are
    encoded.
    """
    model = make_model("llama")
    seen: dict[int, Any] = {}

    class Looking(AnchorAttention):
        def layer_known(self, call):
            seen[call.layer] = call.query[0], call.key[0], call.value[0], call.scale

    ids = list(range(20, 34))
    model.through(ids, 0, Looking(model, [], 0))
    lessons = retaining_example(model, ids[:10], ids[10:])
    assert sorted(lessons) == sorted(seen) == sorted(widths_of(model))
    for layer, (query, key, value, scale) in seen.items():
        torch.testing.assert_close(lessons[layer].labels, highest_logits(query[:, 10:], key[:, :10], scale))
        there = torch.arange(10)[None]
        rotated = model.rotary.rotate(lessons[layer].key[None], layer, there)[0]
        torch.testing.assert_close(rotated, key[:, :10], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(lessons[layer].value, value[:, :10])


def test_a_stopped_training_goes_on_to_the_same_heads(config, tmp_path):
    class StoppedError(Exception):
        pass

    def stop(payload):
        if payload["step"] == 3:
            raise StoppedError

    whole, broken = tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    train_retaining_heads(replace(config, output=whole))
    with pytest.raises(StoppedError):
        train_retaining_heads(replace(config, output=broken), on_progress=stop)
    assert not broken.exists()
    with pytest.raises(UsageError, match="other settings"):
        train_retaining_heads(replace(config, output=broken, lr=1.0))
    steps: list[Any] = []
    train_retaining_heads(replace(config, output=broken), on_progress=lambda payload: steps.append(payload["step"]))
    assert steps == [3, 4]
    before, after = load_file(whole), load_file(broken)
    assert all(torch.equal(before[name], after[name]) for name in before)
    broken.with_suffix(".training").write_bytes(b"no")
    with pytest.raises(UsageError, match="damaged"):
        train_retaining_heads(replace(config, output=broken))


def test_a_training_lowers_the_loss_and_its_heads_are_the_models_own(config, folder):
    fingerprint = load_model(str(folder), device="cpu").checkpoint.digest(None)
    done = train_retaining_heads(replace(config, steps=60, lr=1e-2))
    assert done["loss_last"] < 0.7 * done["loss_first"]
    model = load_model(str(folder), device="cpu")
    assert model.checkpoint.digest(None) == fingerprint
    path = Path(done["output"])
    assert path.parent == folder
    load_heads(path, model)
    payload = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(payload | {"rms_norm_eps": 2e-5}))
    with pytest.raises(ModelLoadError, match="trained for another model"):
        load_heads(path, load_model(str(folder), device="cpu"))


def test_the_program_runs(config, folder, tmp_path):
    output = tmp_path / "heads.safetensors"
    command = ["--model", str(folder), "--data", str(config.data), "--output", str(output), "--device", "cpu"]
    done = CliRunner().invoke(app, [*command, "--steps", "2", "--inner", "8", "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    payload = json.loads(done.stdout)
    assert (payload["steps"], payload["examples"], payload["output"]) == (2, 3, str(output))
    assert output.stat().st_size == payload["bytes"]
    long = CliRunner().invoke(app, [*command, "--max-tokens", "3"])
    assert "longer than 3 tokens" in str(long.exception)
