"""What cannot be exact is refused by name, before any weight is read: transformers' own configurations of each kind."""

from __future__ import annotations

import json

import pytest
import transformers

from ragkv.errors import UnsupportedModelError
from ragkv.model.language import LanguageModel
from ragkv.model.refusal import refuse_by_name

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
REFUSED = {
    "sparse attention": ("DeepseekV32", {}, "index"),
    "Mamba": ("Mamba", {}, "recurrent"),
    "Jamba": ("Jamba", {}, "recurrent"),
    "gated delta net": ("Qwen3Next", {}, "recurrent"),
    "parallel Mamba heads": ("FalconH1", {}, "recurrent"),
    "convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "recurrent"),
    "encoder-decoder": ("T5", {}, "encoder-decoder"),
    "chunked attention": ("Llama4Text", {}, "fixed positions"),
    "several rotary axes": (
        "Qwen2VLText",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
        "several axes",
    ),
    "ALiBi beside RoPE": ("Falcon", {"alibi": True}, "ALiBi"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore")  # transformers' about the configurations' own defaults
def test_refused(kind):
    prefix, changes, reason = REFUSED[kind]
    config = getattr(transformers, f"{prefix}Config")(**changes).get_text_config(decoder=True)
    with pytest.raises(UnsupportedModelError, match=reason):
        refuse_by_name("some/model", config)


@pytest.mark.parametrize(("prefix", "changes"), [("Llama", {}), ("Llama", {"rope_parameters": YARN}), ("SmolLM3", {})])
def test_not_refused(prefix, changes):
    refuse_by_name("some/model", getattr(transformers, f"{prefix}Config")(**changes))


def test_a_checkpoint_is_refused_without_its_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        LanguageModel.load(str(tmp_path))
