"""Checkpoints that see too: the part that writes text is what answers, and its answers are transformers' own."""

from __future__ import annotations

import pytest
import torch
import transformers
from asking import CHUNKS, PREFIX, SUFFIX, run
from transformers import AutoModelForImageTextToText

from ragkv.model import small
from ragkv.model.language import LanguageModel

FAMILIES = ("gemma3", "llava", "mistral3", "aya_vision")


@pytest.mark.filterwarnings("ignore")  # transformers' own about default configurations
@pytest.mark.parametrize("family", FAMILIES)
def test_its_text_model_answers(family, make_model, tmp_path):
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    torch.manual_seed(0)
    config = small.small_config(family, layers=4)
    whole = small.stir(AutoModelForImageTextToText.from_config(config, dtype=torch.float32), 0)
    whole.save_pretrained(tmp_path)
    make_model("llama").tokens._tokenizer.save_pretrained(tmp_path)
    model = LanguageModel.load(str(tmp_path), device="cpu")
    prompt = [*PREFIX, *(token for chunk in CHUNKS for token in chunk), *SUFFIX]
    for _ in range(4):
        logits = whole(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
        prompt.append(int(logits.argmax()))
    assert run(model, "full", steps=4)[0] == prompt[-4:]
    for engine in ("block", "ape", "pced"):
        assert len(run(model, engine, steps=2)[0]) == 2
