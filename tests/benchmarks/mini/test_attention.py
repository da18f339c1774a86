"""A packed row must give every question exactly the logits of asking it alone, in both layouts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from ragkv.benchmarks.mini.attention import packings, register
from ragkv.benchmarks.mini.layout import additive_mask
from ragkv.benchmarks.mini.recipe import MiniTrainConfig
from ragkv.benchmarks.mini.sample import Batch, Sample, collate, qa_sample
from ragkv.benchmarks.mini.training import build_model
from ragkv.finetune.mask import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def packed_batch(tokenizer: PreTrainedTokenizerFast, block: bool) -> tuple[list[Sample], Batch]:
    rng = random.Random(5)
    samples = [qa_sample(rng, tokenizer, passage_range=(count, count), questions=4, block=block) for count in (3, 1, 5)]
    return samples, collate(samples, pad=int(tokenizer.pad_token_id), multiple=16)


def packed_logits(model: LlamaForCausalLM, batch: Batch, **seen: object) -> torch.Tensor:
    with torch.inference_mode():
        output = model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, **seen)
    logits: torch.Tensor = output.logits  # (rows, tokens, vocab)
    return logits


def alone(model: LlamaForCausalLM, sample: Sample, segment: int) -> torch.Tensor:
    """Logits of one question by forwards without any 4-D mask, (question tokens, vocab)."""
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
        for part in range(int(segments[context].max()) + 1):  # the prefix and every chunk, each alone in its place
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
@pytest.mark.parametrize("kernel", ["sdpa", "packed"])
def test_packed_logits_equal_separate_forwards(
    tokenizer: PreTrainedTokenizerFast, tiny: MiniTrainConfig, block: bool, kernel: str
) -> None:
    model = build_model(tiny, tokenizer).eval()
    samples, batch = packed_batch(tokenizer, block)
    columns = (batch.segments, batch.asks, batch.block)
    if kernel == "packed":
        model.set_attn_implementation(register())
        logits = packed_logits(model, batch, packing=packings(*columns))
    else:
        logits = packed_logits(model, batch, attention_mask=additive_mask(visible(*columns), torch.float32))
    model.set_attn_implementation("sdpa")
    for row, sample in enumerate(samples):
        for segment in {segment for segment, asks in zip(sample.segments, sample.asks, strict=True) if asks}:
            here = batch.segments[row] == segment
            torch.testing.assert_close(logits[row][here], alone(model, sample, segment), atol=1e-4, rtol=1e-4)
