"""`python -m ragkv.benchmarks.training.mini`: what it measures and exports."""

import json

import pytest
import torch
from outcome import typed
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragkv.benchmarks.evaluation.worlds.world import World
from ragkv.benchmarks.training.mini.__main__ import export_mini, greedy_answers, main
from ragkv.benchmarks.training.mini.data import chunk_text, prefix_text, suffix_text
from ragkv.benchmarks.training.mini.train import build_model
from ragkv.finetune.block import METADATA


@pytest.fixture
def train(capsys, monkeypatch):
    return typed(main, capsys, monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "ragkv: Missing option '--output' ("),
        (
            ["embedder"],
            "ragkv: Missing option '--output' (",
        ),
        (["reranker", "--embedder", "none", "--output", "made"], "none holds no checkpoint.pt"),
    ],
)
def test_wrong_usage_is_one_sentence(train, arguments, message):
    done = train(*arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.sentence


def test_batched_greedy_answers_equal_generate(tokenizer, tiny):
    model = build_model(tiny, tokenizer).eval()
    world = World.generate(2, split="heldout", size=10)
    texts = [document.text for document in world.documents[:3]]
    questions = [question.question for question in world.questions[::25]][:4]
    expected = []
    for question in questions:
        parts = [prefix_text(), *map(chunk_text, texts), suffix_text(question)]
        ids = [token for part in parts for token in tokenizer(part, add_special_tokens=False)["input_ids"]]
        generated = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
        )
        expected.append(tokenizer.decode(generated[0, len(ids) :], skip_special_tokens=True))
    assert greedy_answers(model, tokenizer, texts, questions, max_new_tokens=12) == expected


def test_export_loads_with_transformers_alone(tokenizer, tiny, tmp_path):
    model = build_model(tiny, tokenizer).eval()
    destination = tmp_path / "lm"
    destination.mkdir()
    (destination / "stale.txt").write_text("left by an earlier export")
    row = {"layout": "full", "passages": 8, "kind": "one hop", "accuracy": 0.5, "n": 4}
    export_mini(model, tokenizer, destination, config=tiny, rows=[row])
    assert [path.name for path in tmp_path.iterdir()] == ["lm"]
    assert not (destination / "stale.txt").exists()
    loaded = AutoModelForCausalLM.from_pretrained(destination)
    assert loaded.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(loaded.dtype)), name
    assert loaded.generation_config.eos_token_id == AutoTokenizer.from_pretrained(destination).eos_token_id
    assert (loaded.config.bos_token_id, loaded.config.pad_token_id) == (tokenizer.bos_token_id, 0)
    metadata = json.loads((destination / METADATA).read_text())
    assert metadata["block_tuned"] is True
    assert (metadata["sink"], metadata["chunk_tokens"]) == ("prefix", 96)
    assert metadata["recipe"]["heldout_accuracy"] == [row]
