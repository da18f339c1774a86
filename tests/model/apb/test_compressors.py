"""Retaining heads: their scores, their file, and files that do not fit the model."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from ragkv.errors import ModelLoadError
from ragkv.model.apb.compressors import FORMAT, BlockTokens, RetainingHeads, load_heads, widths_of
from ragkv.model.apb.document import BlockLayout, BlockLengths, LongDocument, SequentialExecutor

IDS = tuple(range(20, 90))


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Any]) -> Any:
    return make_model("llama")


@pytest.fixture(scope="module")
def heads(model: Any) -> RetainingHeads:
    torch.manual_seed(3)
    return RetainingHeads(widths_of(model), 16)


@pytest.fixture
def path(heads: RetainingHeads, tmp_path: Path) -> Path:
    heads.save(tmp_path / "heads.safetensors")
    return tmp_path / "heads.safetensors"


def local(query: Tensor, key: Tensor, value: Tensor) -> BlockTokens:
    return BlockTokens(
        layer=2, position=0, query=query, key=key, value=value, scale=0.25, unrotated=lambda: (query, key)
    )


@pytest.mark.parametrize("pool", [5, 1, 3])
def test_scores_are_the_papers_pooled(model: Any, heads: RetainingHeads, path: Path, pool: int) -> None:
    if pool != 5:  # 5 is the paper's
        heads.save(path, pool=pool)
    query, key, value = (torch.randn(n, 11, 16, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2))
    found = load_heads(path, model).scores(local(query, key, value))
    first, second = heads.layers["2"]["fc1"].weight, heads.layers["2"]["fc2"].weight
    flat = torch.stack([torch.cat([states[:, i].flatten() for states in (query, key, value)]) for i in range(11)])
    plain = (torch.nn.functional.silu(flat @ first.T) @ second.T).T
    for at in range(11):
        torch.testing.assert_close(found[:, at], plain[:, max(0, at - pool // 2) : at + pool // 2 + 1].amax(-1))


@pytest.mark.parametrize("layer", [0, 2])
def test_queries_and_keys_come_without_positions(model: Any, layer: int) -> None:
    """Those of attention are what the projections give, rotated; rotated back they are the projections again."""
    seen: list[tuple[BlockTokens, Tensor, Tensor]] = []

    class Looking:
        def identity(self) -> str:
            return "looking"

        def scores(self, local: BlockTokens) -> Tensor:
            if local.layer == layer:
                seen.append((local, *local.unrotated()))
            return torch.zeros(local.key.shape[:2])

    layout = BlockLayout(tokens=70, lengths=BlockLengths(block=40, anchor=8, passing=4))
    list(SequentialExecutor().run(LongDocument(model=model, layout=layout, ids=IDS, compressor=Looking())))
    for local_, query, key in seen:
        places = torch.arange(local_.position, local_.position + local_.tokens)
        cos, sin = (each[0] for each in model.module.model.rotary_emb(torch.zeros(1), places[None]))
        for states, rotated in ((query, local_.query), (key, local_.key)):
            torch.testing.assert_close(states * cos + rotate_half(states) * sin, rotated, atol=1e-5, rtol=1e-4)
    # the first block offers what is not in the anchor, so that no pool reaches across its end
    assert [(each.position, each.tokens) for each, _, _ in seen] == [(8, 32), (40, 30)]


def test_a_file_is_part_of_what_blocks_are_known_by(model: Any, path: Path, tmp_path: Path) -> None:
    other = RetainingHeads(widths_of(model), 16)
    other.save(tmp_path / "other.safetensors")
    assert load_heads(path, model).identity() == load_heads(path, model).identity()
    assert load_heads(path, model).identity() != load_heads(tmp_path / "other.safetensors", model).identity()


def test_the_same_heads_are_the_same_file(model: Any, heads: RetainingHeads, tmp_path: Path) -> None:
    for each in range(30):
        heads.save(tmp_path / str(each), "a model")
    first, *others = {(tmp_path / str(each)).read_bytes() for each in range(30)}
    assert not others
    assert int.from_bytes(first[:8], "little") % 8 == 0
    loaded = load_file(tmp_path / "0")
    assert all(torch.equal(loaded[name.removesuffix(".weight")], weight) for name, weight in heads.state_dict().items())


def test_files_that_are_not_the_models_are_refused(model: Any, heads: RetainingHeads, tmp_path: Path) -> None:
    whole = {name.removesuffix(".weight"): weight for name, weight in heads.state_dict().items()}
    result = {"format": FORMAT}
    path = tmp_path / "bad.safetensors"
    first = whole["layers.0.fc1"]
    for changed, metadata, message in (
        (whole, {}, "not a file of retaining heads"),
        ({name: each for name, each in whole.items() if ".0." not in name}, result, "other layers"),
        (whole | {"layers.9.fc1": first.clone()}, result, "other layers"),
        (whole | {"layers.0.fc1": first[:, 1:].contiguous()}, result, "do not fit layer 0"),
        (whole | {"layers.0.fc1": first[0].contiguous()}, result, "do not fit layer 0"),
        (whole | {"layers.0.fc1": first.long()}, result, "one float type"),
        (whole | {"layers.0.fc1": torch.full_like(first, torch.nan)}, result, "not finite"),
        (whole, result | {"pool": "4"}, "only an odd number"),
        (whole, result | {"pool": "-1"}, "only an odd number"),
        (whole, result | {"pool": "1" * 40}, "only an odd number"),
    ):
        save_file(changed, path, metadata=metadata)
        with pytest.raises(ModelLoadError, match=message):
            load_heads(path, model)
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_heads(path, model)
    path.unlink()
    with pytest.raises(ModelLoadError, match="no retaining heads"):
        load_heads(path, model)
    os.mkfifo(path)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_heads(path, model)
