"""A model whose layers are on several devices: each layer's KV is where the layer is, and answers stay the same."""

from __future__ import annotations

import copy

import pytest
import torch
from asking import run

from ragkv.errors import ModelLoadError
from ragkv.index.budget import memory_of
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.device import pick_device, pick_devices
from ragkv.model.language import LanguageModel
from ragkv.model.proof import check_model
from ragkv.model.split import module_map
from ragkv.store import Store
from ragkv.store.format.identity import KVIdentity
from ragkv.types import Encoding

FAMILIES = ("llama", "gemma3", "cohere2")  # the last two have tied matrices


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, pretend_device, make_model):
    """The model on the CPU, and split over two devices: four layers here, five there."""
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


@pytest.mark.parametrize("engine", ["full", "block", "ape", "pced", "ippd-stacked"])
def test_answers_are_those_of_one_device(pair, engine):
    traces: list[list[torch.Tensor]] = [[], []]
    tuning = {"temperature": 0.7, "scale": 0.8} if engine == "ape" else {}
    answers = [run(m, engine, tuning=tuning, trace=t) for m, t in zip(pair, traces, strict=True)]
    assert answers[0] == answers[1]
    for here, there in zip(*traces, strict=True):
        assert (there.cpu() - here).abs().max() < 1e-5 * here.abs().max()


def test_kv_lies_with_its_layer_and_comes_back_from_the_store(pair, tmp_path):
    whole, split = pair
    assert [str(device) for device in split.place] == ["pretend:0"] * 4 + ["pretend:1"] * 5
    [made], [expected] = (model.encode([[5, 6, 7, 8]]) for model in (split, whole))
    identity = KVIdentity(model="m", encoding=Encoding.STANDALONE, prefix_ids=(), chunk_ids=(5, 6, 7, 8))
    with Store.create(tmp_path / "store") as store:
        store.keep_kv(identity, made.to(torch.device("cpu")))
        found = store.get_many([identity], device=split.place)[identity]
        mixed = (torch.device("cpu"),) * 4 + split.place[4:]
        beside = store.get_many([identity], device=mixed)[identity]
    assert [key.device for key in found.keys] == list(split.place)
    assert [value.device for value in beside.values] == list(mixed)  # and no view of the file, which is closed
    for kv in (found, beside):
        for key, right in zip(kv.keys, expected.keys, strict=True):
            assert (key.cpu() - right).abs().max() <= 1e-5 * right.abs().max()


def test_memory_is_what_fills_the_first_device(monkeypatch):
    sizes = {"cuda:0": 80, "cuda:1": 20}
    monkeypatch.setattr("ragkv.index.budget._memory_of", lambda device: sizes[str(device)])
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
