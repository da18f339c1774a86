"""Block fine-tuning of a small random model: it learns, resumes to the same weights, and writes a valid `--model`
folder.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from asking import teacher_forced
from safetensors.torch import load_file

import ragkv.finetune.block
from ragkv.benchmarks.training.mini.data import layout
from ragkv.engines import make_engine
from ragkv.errors import ConfigError, MissingExtraError, RagkvError, UsageError
from ragkv.finetune.block import BlockTuneConfig, finetune_block, visible
from ragkv.finetune.data import read_examples, tokenise
from ragkv.mini import smollm2_adapter_path
from ragkv.model.self_check import load_model


@pytest.fixture
def config(tmp_path, small_folder):
    data = tmp_path / "data.jsonl"
    lines = [{"prompt": f"Who {n}?", "blocks": [f"Ann made {n}.", "Bo."], "response": "Ann."} for n in range(6)]
    data.write_text("\n".join(map(json.dumps, lines)))
    return BlockTuneConfig(
        model=str(small_folder),
        data=data,
        output=tmp_path / "tuned",
        steps=4,
        batch=2,
        gradient_accumulation=2,
        lora_rank=4,
        learning_rate=5e-3,
        device="cpu",
    )


def weights(folder):
    return load_file(folder / "model.safetensors")


def first_scores(model, config):
    """The scores of the first example's first token by the engine `block`, with the checkpoint's settings."""
    [parts, *_] = tokenise(model, read_examples(config.data, config.prompt))
    return teacher_forced(model, parts._replace(response=()), "block")[0]


@pytest.mark.parametrize(
    "family", ["llama-long", "deepseek3", "deepseek3-experts"]
)  # and one whose adapter changes how latents are expanded
def test_a_tuned_model_is_an_ordinary_one_that_says_how_it_is_read(config, make_folder, family):
    folder = make_folder(family)
    config = replace(config, model=str(folder), sink="none", eval_data=config.data)
    result, seen = [], {}
    done = finetune_block(
        config, on_progress=result.append, on_step=lambda step, model: seen.update({step: first_scores(model, config)})
    )
    assert done["eval_block_loss_last"] < done["eval_block_loss_first"] - 0.5
    assert done["eval_full_loss_last"] < done["eval_full_loss_first"] - 0.5
    assert [entry["step"] for entry in result if "loss" in entry] == [1, 2, 3, 4]
    assert sorted(seen) == [0, 1, 2, 3, 4]

    found = json.loads((config.output / "ragkv.json").read_text())
    assert (found["block_tuned"], found["sink"], found["positions"]) == (True, "none", "reencoded")
    assert found["recipe"]["rows"] == 16
    assert found["recipe"]["lora_rank"] == 4
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, config.output))
    assert after == before

    tuned = load_model(str(config.output), device="cpu")
    engine = make_engine("block", {})
    assert engine.warning(tuned) is None
    # the merged weights give the last scores of `on_step`, when the adapter was separate
    torch.testing.assert_close(first_scores(tuned, config), seen[4], atol=1e-4, rtol=0)
    assert (seen[4] - seen[0]).abs().max() > 0.1
    assert (config.output / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("lora_rank", [4, pytest.param(None, marks=pytest.mark.nightly)])
def test_an_interrupted_run_ends_at_the_same_weights(config, lora_rank):
    config = replace(config, lora_rank=lora_rank, learning_rate=1e-3, gradient_checkpointing=True)
    finetune_block(config)
    cut = replace(config, output=config.output.with_name("cut"))

    def interrupt(step, model):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        finetune_block(cut, on_step=interrupt)
    assert signal.getsignal(signal.SIGINT) is handler
    assert (cut.output / "checkpoints" / "checkpoint-2" / "trainer_state.json").exists()
    assert not (cut.output / "model.safetensors").exists()

    with pytest.raises(UsageError, match=r"other settings \(learning_rate, seed\)"):
        finetune_block(replace(cut, learning_rate=1e-4, seed=1))
    steps: list[int] = []
    done = finetune_block(cut, on_step=lambda step, model: steps.append(step))
    assert (steps, done["steps_done"]) == ([3, 4], 4)
    whole, resumed = weights(config.output), weights(cut.output)
    assert whole.keys() == resumed.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(resumed[name], weight, atol=0, rtol=0, msg=name)
    if lora_rank is not None:
        assert finetune_block(cut)["loss_last"] == done["loss_last"]  # finished: it is only written again
        assert finetune_block(replace(cut, steps=1, resume=False))["steps_done"] == 1


def test_the_layouts_teach_different_things_and_epochs_count_examples(config):
    weight_of = {}
    for name, changes in {
        "full": {"full_share": 1.0},
        "block": {"full_share": 0.0},
        "kept": {"reencode": False, "lora_rank": None},
    }.items():
        one = replace(config, output=config.output / name, steps=None, epochs=1, **changes)
        assert finetune_block(one)["steps_done"] == 2  # 6 examples, 4 rows a step
        weight_of[name] = weights(one.output)["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(weight_of["full"], weight_of["block"])
    kept = load_model(str(config.output / "kept"), device="cpu")
    assert 'preset = "no-positions"' in str(make_engine("block", {}).warning(kept))
    assert make_engine("block", {"block": {"preset": "no-positions"}}).warning(kept) is None


def test_what_lies_in_the_output_is_not_overwritten(config, tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="holds other files"):
        finetune_block(replace(config, output=tmp_path))
    with pytest.raises(UsageError, match="is a file"):
        finetune_block(replace(config, output=tmp_path / "mine.txt"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "mine.txt"]


def test_a_run_goes_on_from_an_adapter(config, tmp_path):
    scores = {}
    finetune_block(config, on_step=lambda step, model: scores.update({step: first_scores(model, config)}))
    more = replace(config, output=tmp_path / "more", adapter=config.output / "adapter", steps=1)
    finetune_block(more, on_step=lambda step, model: scores.update({step + 10: first_scores(model, config)}))
    torch.testing.assert_close(scores[10], scores[4])
    assert (scores[11] - scores[10]).abs().max() > 1e-3
    for changes, message in (
        ({"adapter": tmp_path}, "holds no adapter_model.safetensors"),
        ({"lora_rank": 8}, "has the rank 4 and the alpha 8; 8 and 16 would be trained"),
        ({"adapter": smollm2_adapter_path(), "lora_rank": 16}, "an adapter of another model"),
    ):
        with pytest.raises(RagkvError, match=message):
            finetune_block(replace(more, output=tmp_path / "refused", **changes))


@pytest.mark.parametrize("missing", ["accelerate", "peft"])
def test_a_missing_package_names_the_extra(config, monkeypatch, missing):
    monkeypatch.setattr(ragkv.finetune.block, "find_spec", lambda name: None if name == missing else True)
    with pytest.raises(MissingExtraError, match=f"needs {missing}; run pip install -e '.\\[finetune\\]'"):
        finetune_block(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0},
        {"batch": 0},
        {"lora_rank": 0},
        {"full_share": 1.5},
        {"epochs": 0.0},
        {"learning_rate": float("nan")},
        {"warmup": -1},
        {"sink": "all"},
        {"dtype": "float16"},
        {"adapter": Path("a"), "lora_rank": None},
    ],
)
def test_a_wrong_setting_is_named(config, changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        replace(config, **changes)


def test_bad_data_is_found_before_anything_is_made(config):
    config.data.write_text('{"prompt": "Who?"}\n')
    with pytest.raises(RagkvError, match=r"data\.jsonl, line 1: "):
        finetune_block(replace(config, model="/nowhere"))
    assert not config.output.exists()


def test_block_chunks_see_neither_prefix_nor_each_other():
    row = layout(2, [2, 1], [2, 1])
    assert row.positions == [0, 1, 2, 3, 4, 5, 6, 5]
    segments, asks = torch.tensor([row.segments] * 2), torch.tensor([row.asks] * 2)
    full, block = visible(segments, asks, torch.tensor([False, True]))[:, 0].int().tolist()
    assert block == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 0, 0, 1],
    ]
    assert full[:5] == [[1] * (index + 1) + [0] * (7 - index) for index in range(5)]
    assert full[5:] == block[5:]
