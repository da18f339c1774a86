"""What a self-check has found is kept: a second load neither checks nor imports transformers, and answers the same."""

import os
from pathlib import Path

import pytest
import torch
from asking import run

from ragkv.errors import UnsupportedModelError
from ragkv.model import self_check, verdict
from ragkv.model.decoder import PlainDecoder
from ragkv.model.self_check import load_model
from ragkv.model.tokenizer import PlainTokenizer, facts_of
from ragkv.util import files

ENGINES = ("full", "block", "ape", "pced")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ragkv" / "checked"


@pytest.fixture
def checks(monkeypatch) -> list[str]:
    """The models that were checked."""
    checked, check = [], self_check.check_model

    def counted(model):
        checked.append(model.checkpoint.name)
        check(model)

    monkeypatch.setattr(self_check, "check_model", counted)
    return checked


def load(folder: Path, **options):
    return load_model(str(folder), device="cpu", **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_second_load_checks_nothing_and_answers_the_same(folder, checks, cache, dtype):
    first, second = load(folder, dtype=dtype), load(folder, dtype=dtype)
    assert len(checks) == 1
    assert [path.stat().st_mode & 0o777 for path in cache.iterdir()] == [0o600]
    assert isinstance(second.network, PlainDecoder)
    assert isinstance(second.tokens.tokenizer, PlainTokenizer)
    assert second.precision == first.precision
    kv = [model.encode([(5, 6, 7)])[0] for model in (first, second)]
    assert all(torch.equal(one, same) for one, same in zip(kv[0].keys, kv[1].keys, strict=True))
    for engine in ENGINES:
        assert run(second, engine) == run(first, engine)
    assert second.tokens.render([{"role": "user", "content": "a"}]) == first.tokens.render(
        [{"role": "user", "content": "a"}]
    )
    assert second.tokens.serialized == first.tokens.serialized


def test_transformers_own_model_is_loaded_when_it_is_asked_for(folder, checks):
    load(folder)
    model = load(folder)
    expected = run(model, "block")
    ids = torch.tensor([[5, 6, 7]])
    with model.plain() as plain:
        assert type(plain).__name__ == "LlamaForCausalLM"
        assert plain(input_ids=ids).logits.shape == (1, 3, model.config.vocab_size)
    assert type(model.module).__name__ == type(model.network).__name__ == "LlamaForCausalLM"
    assert run(model, "block") == expected
    assert type(load(folder, train=True).network).__name__ == "LlamaForCausalLM"
    assert len(checks) == 1


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mistral-sliding"])
def test_what_was_found_is_set_for_a_model_that_transformers_runs(make_folder, family, checks):
    folder = make_folder(family)
    first, second = load(folder), load(folder)
    assert len(checks) == 1
    assert not isinstance(second.network, PlainDecoder)
    for name in ("windows", "missing_capabilities", "moves_within", "shared"):
        assert getattr(second, name) == getattr(first, name)
    assert second.rotary.kinds == first.rotary.kinds
    assert run(second, "block") == run(first, "block")


def weights(folder, monkeypatch):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


CHANGES = {
    "weights": weights,
    "code": lambda _, patch: patch.setattr(verdict, "_code", lambda: "edited"),
    "a library": lambda _, patch: patch.setattr(verdict, "_libraries", lambda: ["torch 9"]),
    "the processor": lambda _, patch: patch.setattr(verdict, "_processor", lambda: "another"),
    "a variable": lambda _, patch: patch.setenv("ATEN_CPU_CAPABILITY", "default"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_checked_again(folder, checks, monkeypatch, change):
    load(folder)
    CHANGES[change](folder, monkeypatch)
    load(folder)
    assert len(checks) == 2


def another_user(_: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files, "_key", lambda: bytes(32))


def flipped(entry: Path, _: pytest.MonkeyPatch) -> None:
    data = bytearray(entry.read_bytes())
    data[100] ^= 1
    entry.write_bytes(data)


def linked(entry: Path, _: pytest.MonkeyPatch) -> None:
    entry.symlink_to(entry.rename(entry.with_name("elsewhere")))


def piped(entry: Path, _: pytest.MonkeyPatch) -> None:
    entry.unlink()
    os.mkfifo(entry)


DAMAGES = {
    "a byte": flipped,
    "cut off": lambda entry, _: entry.write_bytes(entry.read_bytes()[:200]),
    "empty": lambda entry, _: entry.write_bytes(b""),
    "deleted": lambda entry, _: entry.unlink(),
    "a link": linked,
    "a pipe": piped,
    "another user's": another_user,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_counts_as_missing_and_is_replaced(folder, checks, cache, monkeypatch, damage):
    expected = run(load(folder), "block")
    [entry] = cache.iterdir()
    DAMAGES[damage](entry, monkeypatch)
    assert run(load(folder), "block") == expected
    assert len(checks) == 2
    load(folder)
    assert len(checks) == 2


def test_a_model_that_is_refused_is_refused_again(folder, checks, cache, monkeypatch):
    def refuse(*_):
        raise UnsupportedModelError("it differs")

    for name in ("_check_causal", "check_stateful"):
        monkeypatch.setattr(self_check, name, refuse)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="it differs"):
            load(folder)
    assert len(checks) == 2
    assert not cache.exists()


@pytest.mark.parametrize("reason", ["a file for a folder", "no room"])
def test_where_nothing_can_be_kept(folder, checks, cache, monkeypatch, caplog, reason):
    def full(path: Path, content: bytes, **_: object) -> None:
        raise OSError(28, os.strerror(28), str(path))

    if reason == "no room":
        monkeypatch.setattr(verdict, "replace_plain", full)
    else:
        cache.parent.parent.mkdir()
        cache.parent.write_bytes(b"")
    assert run(load(folder), "block") == run(load(folder), "block")
    assert (len(checks), caplog.messages) == (2, [])


def test_old_entries_make_room(folder, cache, monkeypatch):
    monkeypatch.setattr(verdict, "_MOST_ENTRIES", 2)
    for number in range(4):
        monkeypatch.setattr(verdict, "_processor", lambda number=number: str(number))
        load(folder)
    assert len([*cache.iterdir()]) == 2


def test_a_tokenizer_with_methods_of_its_own_is_not_replaced(make_model):
    tokenizer = make_model("llama").tokens.tokenizer
    assert facts_of(tokenizer) is not None

    class Own(type(tokenizer)):
        def decode(self, *given, **options):
            return super().decode(*given, **options).upper()

    tokenizer = Own(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<bos>")
    assert facts_of(tokenizer) is None
