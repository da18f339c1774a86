"""Checkpoints with packed weights: read as they come, never moved, and known apart by the fingerprint."""

from __future__ import annotations

import json
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

import gguffile
import pytest
import torch
from asking import run
from safetensors.torch import load_file, save_file

from ragkv.errors import MissingExtraError, ModelLoadError
from ragkv.model import quantised
from ragkv.model.checkpoint import resolve
from ragkv.model.language import LanguageModel
from ragkv.model.quantised import Quantised


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def say(folder: Path, **told: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | told))


def in_blocks(weight: torch.Tensor, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in float8 and the inverse scale of each of its blocks."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows // size, size, columns // size, size)
    scale = blocks.abs().amax((1, 3)) / 448.0
    return (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(rows, columns), scale


@pytest.fixture
def fp8(folder: Path) -> Path:
    pytest.importorskip("accelerate", reason="transformers needs it for FP8")
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "layers" in name and weight.ndim == 2:
            tensors[name], tensors[f"{name}_scale_inv"] = in_blocks(weight)
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    say(
        folder,
        quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
    )
    return folder


@pytest.mark.filterwarnings("ignore")  # transformers' own about a machine without a GPU
def test_fp8_is_unpacked_where_nothing_computes_with_it(fp8, model_folder):
    model = LanguageModel.load(str(fp8), device="cpu")
    plain = LanguageModel.load(str(model_folder), device="cpu")
    assert model.dtype == torch.float32
    found, expected = (m.encode([[5, 6, 7]])[0].keys[0] for m in (model, plain))
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()  # what three bits of mantissa leave
    assert run(model, "block", steps=3)[0]


def test_packed_weights_of_one_method_run_in_two_ways_are_two_models(fp8, model_folder, monkeypatch):
    packed, plain = resolve(str(fp8)), resolve(str(model_folder))
    keys = {packed.fingerprint("auto", device="cpu"), plain.fingerprint("auto", device="cpu")}
    monkeypatch.setattr(quantised, "_native", lambda method, device: True)
    keys |= {packed.fingerprint("auto", device="cpu")}
    assert len(keys) == 3
    assert plain.fingerprint("auto", device="cpu") in keys


@pytest.mark.parametrize(
    ("method", "modules", "extra"),
    [
        ("bitsandbytes", "bitsandbytes", "bitsandbytes"),
        ("gptq", "optimum and gptqmodel", "gptq"),
        ("awq", "gptqmodel", "gptq"),
        ("compressed-tensors", "compressed_tensors", "compressed-tensors"),
        ("torchao", "torchao", "torchao"),
        ("fp8", "accelerate", "split"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_its_extra(folder, monkeypatch, method, modules, extra):
    absent = modules.split(" and ")
    monkeypatch.setattr(quantised, "find_spec", lambda name: None if name in absent else name)
    say(folder, quantization_config={"quant_method": method})
    with pytest.raises(MissingExtraError) as caught:
        LanguageModel.load(str(folder), device="cpu")
    assert str(caught.value) == (
        f"Model {str(folder)!r} is quantised ({method}), which needs {modules}; install it with: "
        f'pip install "ragkv[{extra}]"'
    )


def test_what_a_method_without_an_extra_lacks_is_said_by_transformers(folder):
    say(folder, quantization_config={"quant_method": "aqlm"})
    with pytest.raises(MissingExtraError, match=r"is quantised \(aqlm\): .*pip install aqlm"):
        LanguageModel.load(str(folder), device="cpu")


@pytest.mark.parametrize("told", [[1], "int8", {"quant_method": 3}, {"bits": "few", "quant_method": "torchao"}])
@pytest.mark.filterwarnings("ignore")
def test_an_odd_description_ends_in_no_traceback(folder, told):
    say(folder, quantization_config=told)
    with suppress(ModelLoadError, MissingExtraError):
        LanguageModel.load(str(folder), device="cpu")


@pytest.mark.filterwarnings("ignore")  # torchao's own
def test_torchao_int8_weights(model_folder, make_model, tmp_path):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed", exc_type=ImportError)
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    made = AutoModelForCausalLM.from_pretrained(model_folder, quantization_config=config, device_map="cpu")
    made.save_pretrained(tmp_path)
    make_model("llama").tokens._tokenizer.save_pretrained(tmp_path)
    model = LanguageModel.load(str(tmp_path), device="cpu")
    assert "Int8" in type(model.module.model.layers[0].self_attn.q_proj.weight).__name__
    for engine in ("full", "block", "ape", "pced"):
        assert run(model, engine, steps=3)[0]
    assert resolve(str(tmp_path)).fingerprint("auto") != resolve(str(model_folder)).fingerprint("auto")


class TestGGUF:
    @pytest.fixture(autouse=True)
    def quiet(self):
        pytest.importorskip("gguf", reason="gguf is not installed")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield

    @pytest.fixture
    def file(self, tmp_path, make_model):
        gguffile.write(tmp_path / "model.gguf", make_model("qwen2"), packed=False)
        return tmp_path / "model.gguf"

    def test_it_holds_everything(self, file, make_model):
        model = LanguageModel.load(str(file), device="cpu")
        for engine in ("full", "block", "ape", "pced"):
            assert run(model, engine) == run(make_model("qwen2"), engine)
        assert model.tokens._tokenizer.chat_template == make_model("qwen2").tokens._tokenizer.chat_template

    def test_two_packings_of_one_model_are_two_models(self, file, make_model, tmp_path):
        gguffile.write(tmp_path / "q8.gguf", make_model("qwen2"), packed=True)
        model = LanguageModel.load(str(tmp_path / "q8.gguf"), device="cpu")
        assert run(model, "block", steps=3)[0]
        packed, plain = resolve(str(tmp_path / "q8.gguf")), resolve(str(file))
        assert packed.fingerprint("auto") != plain.fingerprint("auto") != plain.fingerprint("bfloat16")

    @pytest.mark.parametrize("keep", [0, 3, 20, 1000, 0.5])
    def test_a_file_that_ends_early(self, file, keep):
        data = file.read_bytes()
        file.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
        with pytest.raises(ModelLoadError) as caught:
            LanguageModel.load(str(file), device="cpu")
        assert "\n" not in str(caught.value)

    def test_sizes_that_its_tensors_contradict(self, file):
        data = bytearray(file.read_bytes())
        at = data.index(b"qwen2.block_count") + len(b"qwen2.block_count") + 4
        data[at : at + 4] = (10**9).to_bytes(4, "little")
        file.write_bytes(data)
        with pytest.raises(ModelLoadError, match=r"block_count\) = 1000000000"):
            LanguageModel.load(str(file), device="cpu")


def test_a_gguf_file_without_the_package(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(quantised, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(MissingExtraError, match=r"needs gguf; install it with: pip install .ragkv\[gguf\]"):
        LanguageModel.load(str(tmp_path / "model.gguf"))


def test_where_packed_weights_are_unpacked():
    cpu = torch.device("cpu")
    assert Quantised.of({"quantization_config": {"quant_method": "fp8"}}, cpu) == Quantised(method="fp8", unpacked=True)
    assert Quantised.of({"quantization_config": {"load_in_4bit": True}}, cpu) == Quantised(
        method="bitsandbytes", unpacked=False
    )
    assert Quantised.of({}, cpu) is None
