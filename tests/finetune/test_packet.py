"""Training of packets: rows as the engine reads them, stopping, resuming and learning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import teacher_forced

from ragkv.config import PromptConfig
from ragkv.errors import ConfigError, UsageError
from ragkv.finetune.data import lay_out, parse_example, tokenise
from ragkv.finetune.packet import PacketConfig, PacketTraining, train_packet
from ragkv.model.language_model import weights_digest
from ragkv.model.packet import load_packet, make_packet

LINE = {"prompt": "Who?", "blocks": ["Ann made it.", "Bo did not, he said.", "x"], "response": "Ann."}


@pytest.fixture
def config(tmp_path: Path, small_folder: Path) -> PacketConfig:
    lines = [{"prompt": f"Who {n}?", "blocks": [f"Ann made {n}.", "Bo."], "response": "?"} for n in range(9)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return PacketConfig(
        model=str(small_folder),
        data=tmp_path / "data.jsonl",
        output=tmp_path / "packet.safetensors",
        header=3,
        trailer=2,
        answer_tokens=4,
        steps=4,
        batch=2,
        gradient_accumulation=2,
        checkpoint_every=2,
        device="cpu",
    )


@pytest.mark.parametrize(
    ("family", "sink", "over"),
    [
        ("llama", "prefix", "standalone"),
        ("llama", "prefix", "prefixed"),
        ("qwen2", "none", "standalone"),
        ("mistral-sliding", "prefix", "standalone"),
        ("gemma2", "bos", "standalone"),
        ("gemma3", "prefix", "prefixed"),
    ],
)
def test_rows_are_what_the_engine_reads(make_model: Any, tmp_path: Path, family: str, sink: Any, over: Any) -> None:
    model = make_model(family)
    config = PacketConfig(
        model=family, data=tmp_path, output=tmp_path / "p", header=3, trailer=2, sink=sink, over=over, seed=1
    )
    training = PacketTraining(config, model)
    with torch.no_grad():
        training.vectors.normal_(0, 0.3)
    name = model.companion(weights_digest, lambda it: it.checkpoint.name)
    path = tmp_path / "packet.safetensors"
    make_packet(*training.vectors.detach().split([3, 2]), name, sink=sink, over=over).save(path)
    prompt = PromptConfig(system="Be.", context="D:\n")
    [parts, longer] = tokenise(
        model, [parse_example(json.dumps(LINE | {"prompt": q}), "f", prompt) for q in ("Who?", "Who made it, and why?")]
    )
    rows = [training._row(each) for each in (parts, longer)]  # two lengths, so one is padded
    expected = torch.cat([teacher_forced(model, each, "block", {"packet": str(path)})[:-1] for each in (parts, longer)])
    torch.testing.assert_close(training.logits(rows).detach(), expected, atol=1e-4, rtol=0)
    assert not torch.allclose(training.logits([training._row(parts, plain=True)]), expected[: len(parts.response)])
    full = training.logits([lay_out(parts, block=False)]).detach()
    torch.testing.assert_close(full, teacher_forced(model, parts, "full")[:-1], atol=1e-4, rtol=0)


def test_answers_are_what_the_model_writes_under_full_attention(make_model: Any, tmp_path: Path) -> None:
    model = make_model("llama")
    training = PacketTraining(
        PacketConfig(model="llama", data=tmp_path, output=tmp_path / "p", answer_tokens=6, batch=2), model
    )
    lines = [json.dumps(LINE | {"prompt": question}) for question in ("Who?", "Who made it?", "Why, and when?")]
    parts = tokenise(model, [parse_example(line, "f", PromptConfig()) for line in lines])
    for asked, answer in zip(parts, training.answers(parts), strict=True):
        scores = teacher_forced(model, asked._replace(response=answer), "full")[:-1]
        assert scores.argmax(-1).tolist() == answer
        assert len(answer) == 6 or answer[-1] in model.eos_ids


def test_gradients_reach_the_vectors_alone(make_model: Any, tmp_path: Path) -> None:
    model = make_model("llama-long")
    training = PacketTraining(PacketConfig(model="llama", data=tmp_path, output=tmp_path / "p"), model)
    divergence, _ = training._compare(tokenise(model, [parse_example(json.dumps(LINE), "f", PromptConfig())]))
    assert bool((divergence > -1e-6).all())
    divergence.sum().backward()
    assert training.vectors.grad is not None
    assert bool(training.vectors.grad.any(-1).all())
    assert all(weight.grad is None for weight in model.module.parameters())


def test_a_stopped_training_goes_on_to_the_same_packet(config: PacketConfig, tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def stop(payload: Any) -> None:
        if payload["step"] == 3:
            raise StoppedError

    whole, broken = tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    done = train_packet(replace(config, output=whole))
    with pytest.raises(StoppedError):
        train_packet(replace(config, output=broken), on_progress=stop)
    assert not broken.exists()
    with pytest.raises(UsageError, match="other settings"):
        train_packet(replace(config, output=broken, lr=1.0))
    steps: list[Any] = []
    again = train_packet(replace(config, output=broken), on_progress=lambda payload: steps.append(payload["step"]))
    assert steps == [3, 4]
    assert again | {"output": ""} == done | {"output": ""}
    assert whole.read_bytes() == broken.read_bytes()
    assert not broken.with_suffix(".training").exists()
    other = train_packet(replace(config, output=broken, seed=1))
    assert other["digest"] != done["digest"]


def test_a_training_lowers_the_divergence_on_questions_it_has_not_seen(config: PacketConfig) -> None:
    untrained = train_packet(replace(config, lr=1e-9))
    trained = train_packet(replace(config, steps=40, lr=2e-2))
    assert (trained["questions"], trained["heldout"], trained["steps"]) == (7, 2, 40)
    assert trained["kl_block"] == untrained["kl_block"] > 0
    assert trained["kl_packet"] < 0.8 * untrained["kl_packet"]
    assert trained["loss_last"] < trained["loss_first"]
    assert 0 <= trained["agreement_packet"] <= 1
    packet = load_packet(trained["output"])
    assert (packet.digest.hex(), len(packet.header), len(packet.trailer)) == (trained["digest"], 3, 2)


def test_what_cannot_be_trained_is_said_in_one_sentence(config: PacketConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep the sink"):
        train_packet(replace(config, over="prefixed", sink="bos"))
    with pytest.raises(ConfigError, match="needs a header or a trailer"):
        replace(config, header=0, trailer=0)
    with pytest.raises(UsageError, match="name a file in a folder"):
        train_packet(replace(config, output=tmp_path))
    with pytest.raises(UsageError, match="name a file in a folder"):
        train_packet(replace(config, output=tmp_path / "no" / "file"))
    config.data.write_text(json.dumps(LINE))
    with pytest.raises(UsageError, match="one line, which is held out"):
        train_packet(config)
    config.output.with_suffix(".training").write_bytes(b"no")
    with pytest.raises(UsageError, match="damaged"):
        train_packet(replace(config, eval_data=config.data))


@pytest.mark.parametrize(
    "changes",
    [{"header": -1}, {"trailer": 257}, {"lr": 0.0}, {"epochs": float("nan")}, {"batch": 0}, {"sink": "drain"}],
)
def test_a_wrong_setting_is_named(config: PacketConfig, changes: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        replace(config, **changes)
