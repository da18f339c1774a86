"""A checkpoint with Python code: never run, never prompted for, and one sentence in the error; `y` waits on stdin."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from outcome import Result

from ragkv.errors import ModelLoadError
from ragkv.mini import embedder_path, lm_path, reranker_path
from ragkv.model.self_check import load_model
from ragkv.retrievers import load_embedder, load_reranker

CODE = """
from pathlib import Path

Path({mark!r}).touch()

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


class Config(PretrainedConfig):
    model_type = "hostile"


class Model(PreTrainedModel):
    config_class = Config


class Tokenizer(PreTrainedTokenizerFast):
    pass
"""

PACKAGE = "sentence_transformers"
AUTO_MAP = {
    "AutoConfig": "hostile.Config",
    "AutoModel": "hostile.Model",
    "AutoModelForCausalLM": "hostile.Model",
    "AutoModelForSequenceClassification": "hostile.Model",
}


class Trap:
    """Copies of the mini models with `hostile.py`, and the file that running it would create."""

    def __init__(self, folder: Path, ragkv: Callable[..., Result]) -> None:
        self.folder = folder
        self._ragkv = ragkv
        self.mark = folder / "ran"
        self.index = folder / "index"
        self.document = folder / "note.md"
        self.document.write_text("Halden Works was founded by Ann.")

    def model(self, source: Path, *, known: bool) -> Path:
        """`known`: transformers has code for its model_type."""
        copy = self.folder / f"{source.name}-{known}"
        shutil.copytree(source, copy)
        self.edit(copy / "config.json", auto_map=AUTO_MAP, **({} if known else {"model_type": "hostile"}))
        tokenizer = {"auto_map": {"AutoTokenizer": ["hostile.Tokenizer", "hostile.Tokenizer"]}}
        self.edit(copy / "tokenizer_config.json", **tokenizer, **({} if known else {"tokenizer_class": "Tokenizer"}))
        self.code(copy)
        return copy

    def code(self, folder: Path) -> None:
        (folder / "hostile.py").write_text(CODE.format(mark=str(self.mark)))

    @staticmethod
    def edit(path: Path, **changes: object) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def run(self, *arguments: object) -> Result:
        done = self._ragkv(*arguments)
        assert not self.mark.exists(), "the checkpoint's code was run"
        assert "[y/N]" not in done.out + done.err
        assert "Traceback" not in done.err
        return done

    def refused(self, *arguments: object) -> str:
        done = self.run(*arguments)
        assert done.code == 1, done.err
        [message] = [line for line in done.err.splitlines() if "code of its own" in line]
        return message


@pytest.fixture
def trap(tmp_path: Path, ragkv: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> Trap:
    """Prompting on stdin fails the test; the answer would be yes."""

    def asked(*_: object) -> str:
        raise AssertionError("a question on stdin")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    return Trap(tmp_path, ragkv)


def test_a_model_of_no_known_kind_is_refused(trap):
    model = trap.model(lm_path(), known=False)
    assert str(model) in trap.refused("ingest", trap.document, "--index", trap.index, "--model", model)
    assert str(model) in trap.refused("plan", trap.document, "--model", model)


def test_an_index_whose_model_turned_hostile_is_refused(trap):
    model = trap.folder / "model"
    shutil.copytree(lm_path(), model)
    assert trap.run("ingest", trap.document, "--index", trap.index, "--model", model).code == 0
    trap.edit(model / "config.json", auto_map=AUTO_MAP, model_type="hostile")
    trap.code(model)
    asked = trap.run("query", "Who founded Halden Works?", "--index", trap.index)
    assert asked.code == 1
    assert "made by another version of model" in asked.err  # noticed before any of its files is loaded
    assert trap.run("doctor", "--index", trap.index).code != 0


def test_a_known_model_runs_on_transformers_own_code(trap):
    model = trap.model(lm_path(), known=True)
    assert load_model(str(model), device="cpu").config.model_type == "llama"
    assert not trap.mark.exists()


@pytest.mark.parametrize("known", [True, False])
def test_embedders_and_rerankers(trap, known):
    loaders = {
        trap.model(embedder_path(), known=known): lambda name: load_embedder(name, device="cpu"),
        trap.model(reranker_path(), known=known): lambda name: load_reranker(name, device="cpu"),
    }
    for folder, load in loaders.items():
        if known:
            assert load(str(folder)) is not None
        else:
            with pytest.raises(ModelLoadError, match="code of its own"):
                load(str(folder))
    assert not trap.mark.exists()


@pytest.mark.parametrize(
    ("kind", "path", "says"),
    [
        *((kind, "", "code of its own") for kind in ("hostile.Config", "hostile", "os.path", None, f"{PACKAGE}x.Evil")),
        *((f"{PACKAGE}.models.Transformer", path, "outside") for path in ("../elsewhere", "/elsewhere", "1_P/../../x")),
    ],
)
def test_modules_of_other_packages_and_elsewhere_are_refused(trap, kind, path, says):
    embedder = trap.model(embedder_path(), known=True)
    for head in embedder.glob("*_linear.pt"):
        head.unlink()
    (embedder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": path, "type": kind}]))
    with pytest.raises(ModelLoadError, match=says):
        load_embedder(str(embedder), device="cpu")
    assert not trap.mark.exists()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", {"_attn_implementation": "someone/kernel"}),
        ("config.json", {"attn_implementation": {"": "sdpa", "text_config": "someone/kernel@main"}}),
        ("config.json", {"parts": [{"text_config": {"attn_implementation": "paged|someone/kernel"}}]}),
        ("sentence_bert_config.json", {"model_args": {"attn_implementation": "someone/kernel:f"}}),
    ],
)
@pytest.mark.parametrize("source", [embedder_path, reranker_path])
def test_an_attention_from_the_hub_is_refused(tmp_path, source, file, message):
    """transformers would download such a kernel and run it if the package `kernels` is installed."""
    folder = tmp_path / "model"
    shutil.copytree(source(), folder)
    held = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(held | message))
    load = load_embedder if source is embedder_path else load_reranker
    with pytest.raises(ModelLoadError, match=r"code from the hub as its attention \(.*someone/kernel"):
        load(str(folder), device="cpu")


@pytest.mark.parametrize("name", ["sdpa", "eager", None])
def test_an_attention_of_transformers_own_is_not(tmp_path, name):
    shutil.copytree(embedder_path(), tmp_path / "model")
    Trap.edit(tmp_path / "model" / "config.json", _attn_implementation=name)
    assert load_embedder(str(tmp_path / "model"), device="cpu").embed_query("text").dense is not None


def test_the_language_model_attends_by_ragkvs_function_whatever_it_names(tmp_path):
    shutil.copytree(lm_path(), tmp_path / "model")
    Trap.edit(tmp_path / "model" / "config.json", _attn_implementation="someone/kernel", attn_implementation="a/b")
    assert load_model(str(tmp_path / "model")).config._attn_implementation == "ragkv"


@pytest.mark.parametrize("file", ["ragkv.json", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("source", "load"),
    [(lm_path, load_model), (embedder_path, load_embedder), (reranker_path, load_reranker)],
    ids=["model", "embedder", "reranker"],
)
def test_json_that_is_too_deep_is_one_sentence(tmp_path, file, source, load):
    shutil.copytree(source(), tmp_path / "model")
    (tmp_path / "model" / file).write_text('{"a":' * 100_000)
    with pytest.raises(ModelLoadError):
        load(str(tmp_path / "model"), device="cpu")
