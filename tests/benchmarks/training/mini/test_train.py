"""Training: attention of packed rows, and resuming an interrupted run."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from ragkv.benchmarks.training.mini.data import additive_mask, collate, qa_sample
from ragkv.benchmarks.training.mini.train import (
    build_model,
    train_mini,
)
from ragkv.errors import UsageError
from ragkv.finetune.block import visible


class KilledError(Exception):
    """Simulates kill -9 in the middle of a run."""


def test_resumes_bit_for_bit(tokenizer, tiny, tmp_path):
    seen: list[tuple[float, float]] = []

    def record(progress):
        seen.append((float(progress["loss"]), float(progress["lr"])))

    whole = train_mini(tiny, tokenizer, tmp_path / "whole", on_progress=record)
    straight = list(seen)
    seen.clear()

    def die(progress):
        record(progress)
        if progress["step"] == 2:
            raise KilledError

    with pytest.raises(KilledError):
        train_mini(tiny, tokenizer, tmp_path / "cut", on_progress=die)
    resumed = train_mini(tiny, tokenizer, tmp_path / "cut", on_progress=record)
    assert seen == straight
    train_mini(tiny, tokenizer, tmp_path / "cut", on_progress=die)  # already at its end
    with pytest.raises(UsageError, match="other settings"):
        train_mini(replace(tiny, hidden=32), tokenizer, tmp_path / "cut")
    before = build_model(tiny, tokenizer).state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
        assert not torch.equal(value, before[name]), name  # every weight changes
    assert not list(tmp_path.rglob("*.tmp"))


def packed_batch(tokenizer, block):
    rng = random.Random(5)
    samples = [qa_sample(rng, tokenizer, passage_range=(count, count), questions=4, block=block) for count in (3, 1, 5)]
    return samples, collate(samples, pad=int(tokenizer.pad_token_id), multiple=16)


def packed_logits(model, batch, **seen):
    with torch.inference_mode():
        output = model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, **seen)
    logits: torch.Tensor = output.logits  # (rows, tokens, vocab)
    return logits


def alone(model, sample, segment):
    """Logits of one question by forward passes without a 4-D mask, (question tokens, vocab)."""
    segments, tokens = torch.tensor(sample.segments), torch.tensor(sample.tokens)
    context = ~torch.tensor(sample.asks)
    question = tokens[segments == segment]
    with torch.inference_mode():
        if not sample.block:
            ids = torch.cat([tokens[context], question])[None]
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
            return logits[0, -len(question) :]
        cache = DynamicCache(config=model.config)
        start, parts = 0, []
        for part in range(int(segments[context].max()) + 1):  # the prefix and every chunk, each alone at its position
            ids = tokens[segments == part][None]
            own = DynamicCache(config=model.config)
            model(input_ids=ids, position_ids=torch.arange(start, start + ids.shape[1])[None], past_key_values=own)
            parts.append(own)
            start += ids.shape[1]
        for layer in range(model.config.num_hidden_layers):
            keys = torch.cat([part.layers[layer].keys for part in parts], dim=2)
            values = torch.cat([part.layers[layer].values for part in parts], dim=2)
            cache.update(keys, values, layer)
        logits = model(input_ids=question[None], past_key_values=cache).logits
    return logits[0]


@pytest.mark.parametrize("block", [False, True])
def test_packed_logits_equal_separate_forwards(tokenizer, tiny, block):
    model = build_model(tiny, tokenizer).eval()
    samples, batch = packed_batch(tokenizer, block)
    mask = additive_mask(visible(batch.segments, batch.asks, batch.block), torch.float32)
    logits = packed_logits(model, batch, attention_mask=mask)
    for row, sample in enumerate(samples):
        for segment in {segment for segment, asks in zip(sample.segments, sample.asks, strict=True) if asks}:
            here = batch.segments[row] == segment
            torch.testing.assert_close(logits[row][here], alone(model, sample, segment), atol=1e-4, rtol=1e-4)
