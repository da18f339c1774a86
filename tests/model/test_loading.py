"""Broken, foreign and hostile checkpoint folders: one sentence each, nothing run, made up or huge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragkv.errors import ModelLoadError, UnsupportedModelError
from ragkv.model.language import LanguageModel


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def change(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(folder: Path) -> str:
    with pytest.raises((ModelLoadError, UnsupportedModelError)) as caught:
        LanguageModel.load(str(folder), dtype="float32", device="cpu")
    said = str(caught.value)
    assert "\n" not in said
    assert said.endswith(".")
    assert repr(str(folder)) in said or str(folder) in said
    return said


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers = 1000000000"),
        ("num_key_value_heads", 10**9, "num_key_value_heads"),
        ("vocab_size", 10**9, "describes"),
        ("hidden_size", 10**6, "describes"),
        ("intermediate_size", 10**8, "describes"),
        ("num_hidden_layers", "many", "cannot be loaded"),
        ("num_attention_heads", 0, "cannot be loaded"),
        ("num_hidden_layers", -1, ""),
        ("rms_norm_eps", "small", "cannot be loaded"),
        ("model_type", "no-such-family", "cannot be loaded"),
        ("model_type", None, "cannot be loaded"),
        ("model_type", ["llama"], "cannot be loaded"),
        ("hidden_act", "no-such-function", "cannot be loaded"),
        ("rope_parameters", {"rope_type": "spiral", "rope_theta": 1e4}, "RoPE is of a kind"),
        ("rope_parameters", [1, 2], ""),
        ("layer_types", ["dreaming_attention"] * 9, ""),
        ("dtype", "float3", "cannot be loaded"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # transformers' own about odd configurations
def test_odd_configurations(folder, key, value, reason):
    change(folder, **{key: value})
    assert reason in refusal(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"llama"', "\xff\xfe", "[" * 100_000])
def test_a_config_that_is_no_object(folder, text):
    (folder / "config.json").write_text(text, encoding="latin-1")
    refusal(folder)


def test_missing_weights_are_named_and_never_made_up(folder):
    weights(folder, lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"))
    assert "lacks weights (model.layers.3.mlp.up_proj.weight)" in refusal(folder)


def test_weights_under_foreign_names_are_missing_ones(folder):
    def rename(tensors):
        for name in list(tensors):
            tensors["backbone." + name] = tensors.pop(name)

    weights(folder, rename)
    assert "more" in refusal(folder)


def test_weights_of_another_shape(folder):
    name = "model.layers.2.self_attn.k_proj.weight"
    weights(folder, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    assert f"another shape than its config.json says ({name})" in refusal(folder)


def test_weights_that_are_not_numbers(folder):
    name = "model.layers.2.self_attn.k_proj.weight"
    weights(folder, lambda tensors: tensors[name].fill_(float("nan")))
    assert "layer 2 that are no finite numbers" in refusal(folder)


def test_tied_heads_are_not_missed(make_model, tmp_path):
    model = make_model("llama-mha-tied")
    model.module.save_pretrained(tmp_path)
    model.tokens._tokenizer.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert LanguageModel.load(str(tmp_path), device="cpu").config.tie_word_embeddings


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("size", [0, 7, 0.5])
def test_files_that_end_early(folder, file, size):
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: int(size * len(data)) if isinstance(size, float) else size])
    refusal(folder)


def test_an_index_that_names_other_folders(folder):
    (folder / "model.safetensors").rename(folder.parent / "away.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "../away.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "outside" in refusal(folder)


def test_an_adapter_is_not_taken_for_a_model(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/elsewhere"}))
    assert "adapter" in refusal(folder)


class Marker:
    """Pickled, this creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pickle_is_not_executed(folder, tmp_path):
    mark = tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Marker(mark)}, folder / "pytorch_model.bin")
    refusal(folder)
    assert not mark.exists()
