"""Broken, foreign and hostile checkpoint folders: each gives a one-sentence error; no code runs, no weights are made
up.
"""

import copy
import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from asking import CHUNKS, PREFIX, SUFFIX, run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, PreTrainedModel

from ragkv.benchmarks.evaluation import families
from ragkv.errors import ModelLoadError, UnsupportedModelError
from ragkv.index.index import memory_of
from ragkv.model.checkpoint import Checkpoint, pick_device, pick_devices
from ragkv.model.language_model import LanguageModel
from ragkv.model.loading import module_map, refuse_by_name
from ragkv.model.self_check import check_model, load_model
from ragkv.store import Store
from ragkv.store.record import KVIdentity
from ragkv.types import Encoding


def change(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(folder: Path) -> str:
    with pytest.raises((ModelLoadError, UnsupportedModelError)) as caught:
        load_model(str(folder), dtype="float32", device="cpu")
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert repr(str(folder)) in message or str(folder) in message
    return message


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
        ("rope_parameters", {"rope_type": "spiral", "rope_theta": 1e4}, "RoPE is of an unknown kind"),
        ("rope_parameters", [1, 2], ""),
        ("layer_types", ["dreaming_attention"] * 9, ""),
        ("dtype", "float3", "cannot be loaded"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # from transformers, about odd configurations
def test_odd_configurations(folder, key, value, reason):
    change(folder, **{key: value})
    assert reason in refusal(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"llama"', "\xff\xfe", "[" * 100_000])
def test_a_config_that_is_no_object(folder, text):
    (folder / "config.json").write_text(text, encoding="latin-1")
    refusal(folder)


def rename(tensors):
    for name in list(tensors):
        tensors["backbone." + name] = tensors.pop(name)


K_PROJ = "model.layers.2.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda tensors: tensors.pop(K_PROJ), f"lacks weights ({K_PROJ})"),  # and they are not made up
        (rename, "more"),
        (lambda tensors: tensors.update({K_PROJ: tensors[K_PROJ][:-1].clone()}), f"than in config.json ({K_PROJ})"),
        (lambda tensors: tensors[K_PROJ].fill_(float("nan")), "keys in layer 2 are not finite numbers"),
    ],
    ids=["missing", "foreign names", "another shape", "not numbers"],
)
def test_weights_that_do_not_fit(folder, edit, reason):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert reason in refusal(folder)


def test_a_folder_with_tied_heads_lacks_nothing(make_folder):
    folder = make_folder("llama-mha-tied")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = load_model(str(folder), dtype="float32", device="cpu")
    assert model.config.tie_word_embeddings
    assert (model.eos_ids, model.revision) == ({1}, None)


def test_loads_of_several_threads_leave_transformers_as_it_was():
    """While loading, it replaces the default dtype, initialisers and weight tying; two loads at once used to break
    these.
    """
    before = (PreTrainedModel.tie_weights, torch.nn.init.normal_, torch.get_default_dtype())
    with ThreadPoolExecutor(2) as pool:
        loaded = list(pool.map(lambda dtype: load_model("mini", dtype=dtype), ("float32", "bfloat16")))
    assert [model.dtype for model in loaded] == [torch.float32, torch.bfloat16]
    assert (PreTrainedModel.tie_weights, torch.nn.init.normal_, torch.get_default_dtype()) == before


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
    """Unpickling this creates a file."""

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


REFUSED = {
    "sparse attention": ("DeepseekV32", {}, "sparse attention"),
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
@pytest.mark.filterwarnings("ignore")  # from transformers, about the configurations' defaults
def test_refused(kind):
    prefix, changes, reason = REFUSED[kind]
    config = getattr(transformers, f"{prefix}Config")(**changes).get_text_config(decoder=True)
    with pytest.raises(UnsupportedModelError, match=reason):
        refuse_by_name("some/model", config)


def test_a_checkpoint_is_refused_without_its_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        load_model(str(tmp_path))


SPLIT = ("llama", pytest.param("gemma3", marks=pytest.mark.nightly), "cohere2")  # the last two have tied matrices


@pytest.fixture(scope="module", params=SPLIT)
def pair(request, pretend_device, make_model):
    """The model on the CPU, and split over two devices."""
    accelerate = pytest.importorskip("accelerate", reason="what splits a model is not installed")
    whole = make_model(request.param)
    module = copy.deepcopy(whole.module)
    devices = [torch.device(pretend_device), torch.device("pretend:1")]
    places = module_map(module, devices, [0.45, 0.55])
    assert {str(places[name]) for name in places if ".layers." in name} == {"pretend:0", "pretend:1"}
    accelerate.dispatch_model(module, places, main_device=devices[0])
    split = LanguageModel(module, whole.tokens._tokenizer, Checkpoint(name="split", location="split", local=True))
    check_model(split)
    return whole, split


@pytest.mark.parametrize("engine", ["full", "block", "ape", "pced", "ippd"])
def test_answers_are_those_of_one_device(pair, engine):
    traces: list[list[torch.Tensor]] = [[], []]
    tuning = {"temperature": 0.7, "scale": 0.8} if engine == "ape" else {}
    answers = [run(m, engine, steps=3, tuning=tuning, trace=t) for m, t in zip(pair, traces, strict=True)]
    assert answers[0] == answers[1]
    for here, there in zip(*traces, strict=True):
        assert (there.cpu() - here).abs().max() < 1e-5 * here.abs().max()


def test_kv_lies_with_its_layer_and_comes_back_from_the_store(pair, tmp_path):
    whole, split = pair
    cut = [str(device) for device in split.place].index("pretend:1")
    assert [str(device) for device in split.place] == ["pretend:0"] * cut + ["pretend:1"] * (whole.layers - cut)
    [made], [expected] = (model.encode([[5, 6, 7, 8]]) for model in (split, whole))
    identity = KVIdentity(model="m", encoding=Encoding.STANDALONE, prefix_ids=(), chunk_ids=(5, 6, 7, 8))
    with Store.create(tmp_path / "store") as store:
        store.keep_kv(identity, made.to(torch.device("cpu")))
        found = store.get_many([identity], device=split.place)[identity]
        mixed = (torch.device("cpu"),) * cut + split.place[cut:]
        beside = store.get_many([identity], device=mixed)[identity]
    assert [key.device for key in found.keys] == list(split.place)
    assert [value.device for value in beside.values] == list(mixed)  # and not a view of the file, which is closed
    for kv in (found, beside):
        for key, right in zip(kv.keys, expected.keys, strict=True):
            assert (key.cpu() - right).abs().max() <= 1e-5 * right.abs().max()


def test_memory_is_what_fills_the_first_device(monkeypatch):
    sizes = {"cuda:0": 80, "cuda:1": 20}
    monkeypatch.setattr("ragkv.model.checkpoint.device_memory", lambda device: sizes[str(device)])
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    assert memory_of(first) == 80
    assert memory_of((first,) * 8 + (second,) * 2) == 100
    assert memory_of((first,) * 5 + (second,) * 5) == 40


def test_lists_of_devices(pretend_device):
    several = pick_devices(f"{pretend_device},pretend:1", int)
    assert [str(device) for device in several] == ["pretend:0", "pretend:1"]
    assert str(pick_device(f"{pretend_device},pretend:1")) == pretend_device  # for the embedder
    assert pick_devices("cpu,cpu", int) == (torch.device("cpu"),)
    assert len(pick_devices("auto", int)) == 1
    with pytest.raises(ModelLoadError, match="between the CPU and other devices"):
        pick_devices(f"{pretend_device},cpu", int)
    with pytest.raises(ModelLoadError, match="Device 'nowhere' is not available"):
        pick_devices("cpu,nowhere", int)
    with pytest.raises(ModelLoadError, match="Device '' is not available"):
        pick_devices("cpu,", int)
    for name in ("cuda:77", "abacus"):
        with pytest.raises(ModelLoadError, match="not available"):
            pick_device(name)


MULTIMODAL = ("gemma3", "llava", "mistral3", "aya_vision")


@pytest.mark.filterwarnings("ignore")  # from transformers, about default configurations
@pytest.mark.parametrize("family", MULTIMODAL)
def test_its_text_model_answers(family, make_model, tmp_path):
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    torch.manual_seed(0)
    config = families.small_config(family, layers=4)
    whole = families.randomise(AutoModelForImageTextToText.from_config(config, dtype=torch.float32), 0)
    whole.save_pretrained(tmp_path)
    make_model("llama").tokens._tokenizer.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu")
    prompt = [*PREFIX, *(token for chunk in CHUNKS for token in chunk), *SUFFIX]
    for _ in range(4):
        logits = whole(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
        prompt.append(int(logits.argmax()))
    assert run(model, "full", steps=4)[0] == prompt[-4:]
    for engine in ("block", "ape", "pced"):
        assert len(run(model, engine, steps=2)[0]) == 2


def test_a_process_that_was_forked_after_a_load_computes_on_one_thread():
    """torch's threads do not exist in the child: its next operation on two of them would never end, or crash."""
    program = textwrap.dedent(
        """
        import os, signal, torch
        torch.set_num_threads(2)
        from ragkv.model.self_check import load_model
        numbers = torch.ones(1 << 22)
        load_model("mini", dtype="float32", device="cpu")
        torch.nn.functional.gelu(numbers)  # starts torch's threads
        child = os.fork()
        if child:
            raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        signal.alarm(500)  # a child that hangs does not outlive the test
        torch.nn.functional.gelu(numbers)
        for _ in range(2):  # warned of once
            load_model("mini", dtype="float32", device="cpu")
        print(torch.get_num_threads(), flush=True)
        os._exit(0)
        """
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, env=environment, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
    assert ended.stderr.count("'spawn'") == 1, ended.stderr
